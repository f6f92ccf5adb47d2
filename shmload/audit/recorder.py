"""Record a loader's deliveries: always the newest order, and with an audit all deliveries in a file.

Every record is one write() to a file of this process, so nothing is lost if the trainer is killed. Nothing is synced to the disk,
so a machine that loses power may lose the last seconds. The file is created at the first delivery, or at a pass's end, with the
mode that the user's umask allows, because others may have to read it, like a log or a checkpoint.

If a record cannot be written (a full disk), training continues: one warning, and another attempt with every batch. Batches
that were not recorded are reported as missing by `shmload verify`, with the reason if a later record could be written.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
import platform
import secrets
import sys
import warnings
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from time import time_ns
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

import shmload
from shmload._core.trainer import Order
from shmload.audit.audit_file import (
    DISTRIBUTED,
    ITERABLE,
    SUFFIX,
    Batch,
    Change,
    Header,
    Mode,
    batch_record,
    event_record,
    header_line,
)
from shmload.audit.batch_digest import digest_of
from shmload.engine.config import LoaderConfig
from shmload.engine.outcome import NOTHING
from shmload.introspect.abilities import package_ability
from shmload.processes import private_fds
from shmload.processes.ranks import rank_and_world_size
from shmload.schedule.any_schedule import SCHEDULE_VERSION
from shmload.schedule.keyed_batches import BatchSchedule
from shmload.schedule.schedule import Schedule

log = logging.getLogger("shmload")


class Recorder:
    """Records one loader's deliveries.

    Args:
        folder: folder of the audit files; created if missing. If None, nothing is written.
        has_indices: whether samples have indices; False for an iterable dataset.
    Raises:
        OSError: the folder cannot be created.
        PermissionError: the folder is not writable.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, has_indices: bool = True) -> None:
        self._folder = None if folder is None else Path(folder).absolute()
        self.is_on = folder is not None
        self._has_indices = has_indices
        self.last: Order | None = None  # order of the batch that was yielded last
        self.num_passes = 0  # passes begun in this run; used in torch mode, in which passes have no other number
        self._header: Header | None = None
        self._path = Path()
        self._file = -1
        self._pid = 0
        self._unwritten_header = b""  # first line of the open file, until it has been written
        self._pending: list[bytes] = []  # records of events that wait for the file, or for room on the disk
        self._num_lost = 0
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(
                    f"audit={os.fspath(self._folder)!r} needs a folder that this process can write to; "
                    "give another, or leave audit out"
                )

    @property
    def last_indices(self) -> NDArray[np.int64] | list[Any] | None:
        """Return the indices of the last batch; see `ShmLoader.last_indices`."""
        if self.last is None or not self._has_indices:
            return None
        return _integers_of(self.last.indices)

    # ------------------------------------------------------------ what happens

    def resumed(self, epoch: int, step: int, *, by: str = "state", beyond: Collection[int] = ()) -> None:
        """Record that a state was loaded or set_epoch was called, so that the next pass begins there.

        Args:
            epoch: epoch of the next pass.
            step: step at which it begins.
            by: "state" or "set_epoch".
            beyond: later steps whose batches were delivered before their turn and are not delivered again.
        """
        self._event("resume", {"epoch": epoch, "step": step, "by": by, **({"beyond": sorted(beyond)} if beyond else {})})

    def begins(
        self, config: LoaderConfig, epoch: int, step: int, *, schedule: Schedule | BatchSchedule | None = None, rank: int = 0
    ) -> None:
        """Record that a pass begins.

        Args:
            config: the loader's configuration.
            epoch: epoch of the pass.
            step: step at which it begins.
            schedule: schedule in seed mode; None if a sampler, or an order of batches, determines the order.
            rank: rank in seed mode.
        """
        header = header_of(config, schedule, rank)
        if self._header is not None and header != self._header:
            self.close()  # the ranks or the length have changed, so another file begins
        self._header = header
        is_known = header.mode in (Mode.TORCH, Mode.SAMPLED) and header.order in (None, DISTRIBUTED)
        # so that a program that leaves its loop after the last batch, before the end, has left nothing out
        steps = {"num_steps": len(cast("Any", config.index_sampler))} if is_known else {}
        self._event("pass", {"epoch": epoch, "step": step, **steps})

    def delivered(
        self, order: Order, batch: Any, *, valid: int | None = None, epoch: int | None = None, step: int | None = None
    ) -> None:
        """Record a batch that is about to be yielded, or NOTHING if every sample of its order was skipped.

        Args:
            order: order of the batch.
            batch: the batch.
            valid: number of rows that are not padding; None if all are.
            epoch: epoch to record, if it differs from the order's.
            step: step to record, if it differs from the order's.
        """
        if batch is NOTHING and order.ordered is None:
            return
        valid = order.nrows if valid is None else valid
        epoch = order.epoch if epoch is None else epoch
        step = order.step if step is None else step
        digest, is_partial = 0, False
        if batch is not NOTHING:
            try:
                digest, is_partial = digest_of(batch)
            except Exception as error:  # an object whose attributes raise must not end the run
                is_partial = True
                log.debug("audit: a batch has no digest: %r", error)
        keys = _keys_of(order.indices) if self._has_indices else None
        now = time_ns()
        record = batch_record(Batch(now, epoch, step, valid, keys, digest, is_partial, _changes_of(order)))
        if self._num_lost:
            record = event_record("lost", {"batches": self._num_lost, "time_ns": now}) + record
        self._write(record, f"epoch {epoch}, step {step}")

    def ended(self, epoch: int, step: int) -> None:
        """Record that the pass has ended, also for a rank that had no batch in it."""
        self._event("end", {"epoch": epoch, "step": step}, opens=True)

    # ------------------------------------------------------------ the file

    def _event(self, kind: str, details: dict[str, Any], *, opens: bool = False) -> None:
        if self._folder is None:
            return
        record = event_record(kind, {**details, "time_ns": time_ns()})
        if opens or self._is_open():
            self._write(record)
        else:
            self._pending.append(record)

    def _is_open(self) -> bool:
        return private_fds.is_kept(self._file) and self._pid == os.getpid()  # a forked child makes its own

    def _open(self) -> None:
        assert self._folder is not None
        assert self._header is not None, "a pass has begun"
        self._file, self._pid = -1, os.getpid()
        self._path = self._folder / f"rank-{self._header.rank:04d}-{secrets.token_hex(8)}{SUFFIX}"
        started = dataclasses.replace(self._header, started_ns=time_ns(), pid=self._pid)
        self._file = private_fds.keep(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666))
        self._unwritten_header = header_line(dataclasses.asdict(started))

    def _write(self, record: bytes, batch: str = "") -> None:
        """Append the pending records and this one. After a failure a batch's record is lost, and an event's is kept for later."""
        try:
            if not self._is_open():
                self._open()
            content = b"".join((self._unwritten_header, *self._pending, record))
            num_written = os.write(self._file, content)
            if num_written < len(content):  # the disk has just filled up: the next try must not follow half a record
                os.ftruncate(self._file, os.fstat(self._file).st_size - num_written)
                raise OSError(28, "No space left on device")
        except OSError as error:
            if not batch:
                self._pending.append(record)
                return
            self._num_lost += 1
            if self._num_lost == 1:
                text = (
                    f"audit: {self._path} cannot be written: {error}. Training goes on; batches from {batch} on are not recorded "
                    "until it can be, and `shmload verify` will report them as missing. Make room"
                )
                log.error("%s", text)
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        self._unwritten_header = b""
        self._pending.clear()
        if batch:
            self._num_lost = 0

    def close(self) -> None:
        """Close the file. The next delivery begins another one."""
        if self._is_open():
            private_fds.close(self._file)
        self._file = -1

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which records to a file of its own."""
        return {**self.__dict__, "_file": -1, "_header": None, "_pending": [], "_num_lost": 0, "last": None}

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0 and sys is not None and not sys.is_finalizing():
            self.close()


def _integers_of(keys: Any) -> NDArray[np.int64] | list[Any]:
    """Return the keys of a batch as an array if they are integers, of any type; otherwise unchanged."""
    if not isinstance(keys, np.ndarray) and not any(isinstance(key, bool) for key in keys):
        with suppress(TypeError, OverflowError):
            return np.array([operator.index(key) for key in keys], np.int64)
    return cast("NDArray[np.int64] | list[Any]", keys)


def _keys_of(indices: Any) -> Any:
    if isinstance(indices, np.ndarray):
        return indices
    if set(map(type, indices)) <= {int}:
        try:
            return np.array(indices, np.int64)
        except OverflowError:
            pass
    return list(indices)


def _changes_of(order: Order) -> tuple[Change, ...]:
    """Return the changes that were made because of the order's bad samples."""
    if order.ordered is None:
        return ()
    came = {row: (order.indices[i], tries) for i, (row, tries) in enumerate(order.origins or ())}
    changes = [Change(row, key, *came.get(row, (None, 0))) for row, key in enumerate(order.ordered)]
    return tuple(change for change in changes if change.row not in came or change.num_tries)


def header_of(config: LoaderConfig, schedule: Schedule | BatchSchedule | None, rank: int | None = None) -> Header:
    """Return the header of a loader in its current state.

    Args:
        config: the loader's configuration.
        schedule: schedule in seed mode; None if a sampler, or an order of batches, determines the order.
        rank: rank in seed mode; else None.
    Raises:
        ValueError: the environment names a world size, but neither it nor the loader's arguments give this process's rank.
    """
    common: dict[str, Any] = {name: getattr(config, name) for name in ("seed", "on_error", "seed_samples")}
    common |= {"shmload": shmload.__version__, "host": platform.node(), "pid": os.getpid()}
    if schedule is not None:
        common |= {name: getattr(schedule, name) for name in ("n", "world_size", "shuffle")}
        common |= {"uneven": schedule.rest_rule, "schedule": schedule.version, "rank": rank or 0, "in_order": True}
        common["order"] = None if schedule.order is None else schedule.order.identity
        if isinstance(schedule, Schedule):
            dataset = type(config.dataset).__qualname__
            return Header(**common, mode=Mode.SEED, batch_size=schedule.batch_size, dataset=dataset)
        of_stream: dict[str, Any] = {"batch_size": schedule.rows_per_rank, "stream": schedule.stream}
        return Header(**common, **of_stream, mode=Mode.PIPELINE, dataset="pipeline")
    batches = config.index_sampler
    sampler = getattr(batches, "sampler", batches)
    is_distributed = isinstance(sampler, DistributedSampler)
    ranks = (sampler.rank, sampler.num_replicas) if is_distributed else rank_and_world_size(config.rank, config.world_size)
    grows = config.seed is not None and bool(package_ability(config.dataset, "epoch_schedule"))
    return Header(
        mode=Mode.TORCH if config.seed is None else Mode.GROWING if grows else Mode.SAMPLED,
        n=None if grows else config.num_samples,  # it differs between epochs
        batch_size=getattr(batches, "batch_size", config.batch_size),
        rank=ranks[0],
        world_size=ranks[1],
        shuffle=not isinstance(sampler, SequentialSampler),
        uneven="drop" if any(getattr(one, "drop_last", False) for one in (config, batches, sampler)) else "exact",
        schedule=SCHEDULE_VERSION,
        order=_order_name(config, batches, sampler),
        in_order=bool(config.in_order) or config.seed is not None,
        dataset=type(config.dataset).__qualname__,
        **common,
    )


def _order_name(config: LoaderConfig, batches: Any, sampler: Any) -> str | None:
    """Return the order's name; None for torch's own orders that deliver each sample once."""
    if config.is_iterable:
        return ITERABLE
    if package_ability(config.dataset, "epoch_schedule"):  # its epochs differ
        return type(config.dataset).__qualname__
    if batches is not sampler and type(batches) is not BatchSampler:
        return type(batches).__qualname__
    if isinstance(sampler, DistributedSampler):
        return DISTRIBUTED
    is_random = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == config.num_samples
    is_plain = is_random or type(sampler) is SequentialSampler
    return None if is_plain and len(sampler.data_source) == config.num_samples else type(sampler).__qualname__
