"""Datasets that keep workers busy, digests of streams, and killing processes by pidfd, for the tests of faults.

A plain module beside the tests (conftest puts it on the path), so that workers of every start method can import it.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from shmload.processes.proc_stat import stat_of


class FaultFolder:
    """A folder of armed faults, as `shmload.faults` describes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num = 0

    def arm(self, point: str, harm: int | str) -> None:
        """Arms a fault for the next process that reaches the point; a signal is given by its number."""
        self._num += 1
        path = self.folder / f"new-{self._num}"
        path.write_text(harm if isinstance(harm, str) else str(int(harm)))
        path.rename(self.folder / f"{point}.{self._num}")

    @property
    def num_armed(self) -> int:
        """Returns the number of armed faults that have not been triggered."""
        return sum(not name.startswith("spent-") for name in os.listdir(self.folder))

    @property
    def num_triggered(self) -> int:
        """Returns the number of triggered faults."""
        return len(os.listdir(self.folder)) - self.num_armed


BLOCK = bytes(256 * 1024)
DEADLINE_S = 60  # upper bound of any wait in these tests, reached only if something hangs


def busy(kib: int) -> None:
    """Computes for about 1 us per `kib`."""
    digest = hashlib.blake2b()
    for _ in range(kib // 256 + 1):
        digest.update(BLOCK[: min(kib, 256) * 1024])


class Rows:
    """Samples with fixed rows that contain the index and random numbers."""

    def __init__(self, n: int, work: int = 0) -> None:
        self.n, self.work = n, work

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        busy(self.work)
        return {"x": np.arange(index, index + 40), "r": random.random(), "t": torch.rand(3), "i": index}


class Texts(Rows):
    """Samples that only packed batches can store."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        busy(self.work)
        return {"name": f"sample {index}", "x": np.arange(index % 7 + 1), "r": random.random()}


class InPlace(Rows):
    """A dataset that decodes into the batch."""

    schema = {"x": ("int64", (40,)), "r": ("float64", ())}

    def read_into(self, index: int, out: Any) -> None:
        out["x"][:] = np.arange(index, index + 40)
        busy(self.work)
        out["r"][...] = random.random()


class Growing(Rows):
    """Texts whose length doubles every four samples, so that slots grow repeatedly."""

    def __getitem__(self, index: int) -> str:
        busy(self.work)
        return f"{index} " * (50 << index // 4)


def as_list(samples: list[Any]) -> list[Any]:
    """Collates to a list, without stacking."""
    return samples


DATASETS = {"rows": Rows, "texts": Texts, "in place": InPlace, "growing": Growing}
COLLATE = {"texts": as_list, "growing": as_list}


def digest(batch: Any) -> str:
    """Returns a short hash of the batch's structure, types and bytes."""
    return hashlib.sha256(pickle.dumps(_plain(batch))).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(key, _plain(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_plain(part) for part in value]
    return repr(value)


def batches(loader: Any, epochs: int) -> Iterator[str]:
    """Yields the digests of `epochs` epochs."""
    for _ in range(epochs):
        for batch in loader:
            yield digest(batch)


class WorkerKiller:
    """Kills workers of an engine, and records which rows they held."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.num_kills = self.num_holding = 0
        # newest batch during which a worker was killed; killing twice during one batch would make a sample a suspect
        self._last = (-1, -1)

    def kill(self, worker: int, number: int = signal.SIGKILL) -> None:
        """Kills a worker and waits until it is dead. The engine still has to find what it held."""
        pid = self.engine._ring.worker(worker)["pid"] or self.engine.pool.pids[worker]
        kill_and_wait(pid, number)
        self.num_kills += 1
        held = self.engine._ring.held_by(worker)
        if held is not None:
            self.num_holding += 1
            self._last = max(self._last, self._batch_in(held[0]) or (-1, -1))

    def kill_one(self, rng: random.Random, looks: int = 400) -> bool:
        """Kills, at a random moment, a worker that holds rows of a batch during which no worker was killed; seldom an idle one.

        Returns:
            whether such a worker was found.
        """
        ring = self.engine._ring
        num_workers = ring.num_workers
        for _ in range(rng.randrange(looks // 2)):
            ring.num_free  # noqa: B018  # takes a random time
        # on a busy machine most workers that are found are idle, so their share is limited
        may_be_idle = self.num_kills - self.num_holding <= 0.06 * self.num_kills and rng.random() < 0.5
        for _ in range(looks):
            worker = rng.randrange(num_workers)
            held = ring.held_by(worker)
            if not ring.worker(worker)["pid"] or (held is None and not may_be_idle):
                continue
            batch = None if held is None else self._batch_in(held[0])
            if held is None or (batch is not None and batch > self._last):
                pid = ring.worker(worker)["pid"]
                stop(pid)  # it may have begun another batch since the check, so check again while it is stopped
                held = ring.held_by(worker)
                batch = None if held is None else self._batch_in(held[0])
                if held is None or (batch is not None and batch > self._last):
                    self.kill(worker)
                    return True
                os.kill(pid, signal.SIGCONT)
        return False

    def _batch_in(self, slot: int) -> tuple[int, int] | None:
        return next(((o.epoch, o.step) for o in self.engine._queue if o.slot == slot), None)


def stop(pid: int) -> bool:
    """Stops a process and waits until the kernel reports it. Returns False if the process is gone."""
    try:
        os.kill(pid, signal.SIGSTOP)
        deadline = monotonic() + DEADLINE_S
        while monotonic() < deadline:
            if (state := stat_of(pid)[0]) in "TtZX":
                return state in "Tt"
    except (FileNotFoundError, ProcessLookupError):
        return False
    raise AssertionError(f"process {pid} did not stop")


def kill_and_wait(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends the signal by pidfd and waits until every thread of the process is gone."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, number)
        await_readable(pidfd)
    finally:
        os.close(pidfd)


def await_readable(fd: int, timeout_s: float = DEADLINE_S) -> None:
    """Waits for a descriptor, and fails if it does not become readable."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(timeout_s * 1000), f"not readable within {timeout_s} s"


def program_env() -> dict[str, str]:
    """Returns the environment of a program that can import what this process can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
