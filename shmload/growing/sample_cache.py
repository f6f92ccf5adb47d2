"""SampleCache: the public interface of the growing cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shmload.formats.atomic_write import write_whole
from shmload.growing.cache_file import CONTROL, CacheFile
from shmload.growing.cache_statistics import CacheStatistics, statistics_of
from shmload.growing.cache_view import CacheView, are_samples
from shmload.growing.cache_writer import CacheWriter
from shmload.growing.damage import BAD
from shmload.growing.growing_dataset import GrowingDataset, SnapshotRecords
from shmload.growing.growing_epochs import GrowingEpochs, Missing
from shmload.growing.growing_run import JoinedRun, forget_runs
from shmload.growing.intake import MAX_INFLATED_BYTES
from shmload.growing.sampler_process import Sampler
from shmload.growing.samplers import Samplers
from shmload.storage.budgeted_folder import BudgetedFolder

BUDGET = "budget"  # name of the file with the budget, for readers of statistics


class SampleCache:
    """A folder of samples that grows while you train on it, within a budget.

    Any number of processes write into it; each epoch reads the samples that are there when it begins. The oldest files are evicted
    for new ones, but never a file that a running epoch reads. The folder contains plain TFRecord files and no other needed data, so
    a cache is opened again by its path, and other programs may read it or add files (named *tfrecord*).

    Args:
        folder: a folder on a local disk, created if missing. All its users must give the same budget.
        capacity_bytes: the total size of all files, including those being written.
        file_nbytes: the approximate size of a file; by default 64 MB, or a 16th of the cache.
        headroom: the share of the budget that no epoch reads once the cache is full: its oldest files, which may then be evicted
            while the epoch runs; at least the size of two files. A larger share renews the cache faster, a smaller one makes
            epochs larger.
    Raises:
        ValueError: a number is out of range, or others use the folder with another budget.
    Thread/process safety: picklable; any number of processes.
    Example:
        >>> import tempfile
        >>> from shmload import ShmLoader
        >>> with SampleCache(tempfile.mkdtemp(), 1 << 20) as cache:
        ...     with cache.writer() as writer:
        ...         for label in range(6):
        ...             writer.write({"label": label})
        ...     dataset = cache.dataset({"label": "int64"})
        ...     with ShmLoader(dataset, batch_size=3, shuffle=True, seed=7) as loader:
        ...         sorted(int(label) for batch in loader for label in batch["label"])
        [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self, folder: str | os.PathLike[str], capacity_bytes: float, *, file_nbytes: float | None = None, headroom: float = 0.125
    ) -> None:
        if not 4 <= capacity_bytes < 1 << 63:
            raise ValueError(f"capacity_bytes is a number of bytes, at least 4; got {capacity_bytes!r}")
        capacity_bytes = int(capacity_bytes)  # a float such as 1e9 is accepted
        if not 0 < headroom < 1:
            raise ValueError(f"headroom is a share of the budget, between 0 and 1; got {headroom}")
        self.file_nbytes = min(64_000_000, max(capacity_bytes // 16, 1)) if file_nbytes is None else int(file_nbytes)
        if not 0 < self.file_nbytes <= capacity_bytes // 4:
            raise ValueError(
                f"file_nbytes is at most a quarter of capacity_bytes={capacity_bytes}, so that there is room for new files while "
                f"an epoch reads the others; got {file_nbytes}"
            )
        self.path, self.capacity_bytes = Path(folder).absolute(), capacity_bytes
        self.headroom = headroom
        (self.path / CONTROL / BAD).mkdir(parents=True, exist_ok=True)
        self.folder = BudgetedFolder(self.path, capacity_bytes, adopts=True, order=are_samples, spares_new=True)
        self._begin()
        budget, said = self.path / CONTROL / BUDGET, b"%d" % capacity_bytes
        if not budget.exists() or budget.read_bytes() != said:
            self.folder.evicting(partial(write_whole, budget, said))
        forget_runs(self.path, lambda name: (self.path / name).exists())

    def _begin(self) -> None:
        self._samplers: list[Samplers] = []
        self._view = CacheView(self.folder, file_nbytes=self.file_nbytes, headroom=self.headroom, samplers=self._samplers)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_view", "_samplers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    # ------------------------------------------------------------ writing

    def writer(
        self, *, raw: Iterable[str] = (), compression: str | None = None, publish_s: float = 10.0, timeout_s: float | None = None
    ) -> CacheWriter:
        """Return a writer of samples from this process. Close it, or use it as a context manager.

        Args:
            raw, compression: see TFRecordWriter.
            publish_s: seconds after a file's first sample from which the next sample publishes the file, so that epochs can read
                it; `publish()` publishes it at once.
            timeout_s: seconds to wait while the budget is full of samples that epochs read; None for no limit.
        """
        return self._writer("writer", raw=tuple(raw), compression=compression, publish_s=publish_s, timeout_s=timeout_s)

    def _writer(self, role: str, **options: Any) -> CacheWriter:
        return CacheWriter(self.folder, file_nbytes=self.file_nbytes, role=role, **options)

    def start(
        self,
        sampler: Sampler,
        num_processes: int = 1,
        *,
        raw: Iterable[str] = (),
        compression: str | None = None,
        publish_s: float = 10.0,
        max_restarts: int = 8,
        multiprocessing_context: Any = None,
    ) -> Samplers:
        """Run a sampler in separate processes, until it ends, the cache is closed, or this process ends for any reason.

        A sampler that fails or is killed is restarted, after a pause that doubles from 0.1 s to 30 s with each failure in a row;
        the samples it has written are kept. While the budget is full of samples that epochs read, samplers wait.

        Args:
            sampler: `sampler(worker_id, num_workers)` yields samples: dicts of arrays and texts, or bytes. Random generators are
                reseeded in each process.
            num_processes: the number of processes that run it.
            raw, compression: as in `writer`.
            publish_s: the longest time that a sample waits for others before its file is published.
            max_restarts: successive failures, without a published file between, after which a sampler is not restarted. Once this
                is true of all, the next epoch's start raises WorkerDied with the traceback.
            multiprocessing_context: how the supervisor is started: "fork", "spawn", "forkserver" or a context. None is Python's
                default.
        Returns:
            a handle with `states` and `stop()`.
        Raises:
            ValueError: `num_processes` or `max_restarts` is out of range.
        """
        if num_processes < 1:
            raise ValueError(f"num_processes is at least 1; got {num_processes}")
        if max_restarts < 0:
            raise ValueError(f"max_restarts is at least 0; got {max_restarts}")
        options: dict[str, Any] = {"raw": tuple(raw), "compression": compression, "publish_s": publish_s, "timeout_s": None}
        samplers = Samplers(
            self.path,
            sampler,
            num_processes,
            max_restarts=max_restarts,
            multiprocessing_context=multiprocessing_context,
            make_writer=partial(self._writer, **options),
        )
        self._samplers.append(samplers)
        return samplers

    # ------------------------------------------------------------ reading

    def dataset(
        self,
        schema: Mapping[str, Any] | None = None,
        *,
        records: str | None = None,
        verify: str = "all",
        defaults: Mapping[str, Any] | None = None,
        decode: Mapping[str, Callable[[bytes], Any]] | None = None,
        min_samples: int = 1,
        timeout_s: float = 60.0,
        missing: Missing = "error",
        run: str | None = None,
    ) -> GrowingDataset:
        """Return the samples as a dataset for ShmLoader in seed mode: each epoch has the samples that are there when it begins.

        Args:
            schema, records, verify, defaults, decode: see TFRecordDataset.
            min_samples: least number of samples with which an epoch begins.
            timeout_s: seconds to wait for them before TimeoutError.
            missing: the policy of a resume for samples of its epoch that were evicted or replaced. "error" raises StateMismatch
                with their files; "skip" omits them, so batches are shorter (never empty); "substitute" uses other samples of that
                epoch in their place. The decision is logged.
            run: the name of this training run, the same in all its ranks and in no other run. If None, a single rank gets a random
                name, and several ranks one that is derived from their launcher (torchrun, Slurm, or their common parent).
        Raises:
            ValueError: an argument is out of range.
        """
        for name, value, at_least in (("min_samples", min_samples, 1), ("timeout_s", timeout_s, 0)):
            if value < at_least:
                raise ValueError(f"{name} is at least {at_least}; got {value}")
        if missing not in ("error", "skip", "substitute"):
            raise ValueError(f'missing is one of "error", "skip", "substitute"; got {missing!r}')
        reader = SnapshotRecords(
            os.devnull, schema, records=records, verify=verify, defaults=defaults, decode=decode,
            max_inflated_bytes=MAX_INFLATED_BYTES,
        )  # fmt: skip
        joined = JoinedRun(self.path, run)
        make = partial(GrowingEpochs, self._view, joined, min_samples=min_samples, timeout_s=timeout_s, missing=missing)
        return GrowingDataset(self.path, joined, make, reader)

    def files(self) -> list[CacheFile]:
        """Return the files that can be read now, oldest first.

        If the cache is full, new epochs do not read the oldest of them, the headroom.
        """
        return self._view.files()

    # ------------------------------------------------------------ views

    def stats(self) -> CacheStatistics:
        """Return statistics of the cache now."""
        return statistics_of(self._view)

    # ------------------------------------------------------------ ends

    def close(self) -> None:
        """End the samplers that this process has started, and release its files. The folder keeps its contents."""
        for samplers in self._samplers:
            samplers.stop()
        self._samplers.clear()
        for epochs in list(self._view.readers):
            epochs.ended()
        self.folder.close()

    def __enter__(self) -> SampleCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def look(cls, folder: str | os.PathLike[str]) -> CacheStatistics:
        """Return statistics of the cache in a folder, for processes that do not use it.

        Args:
            folder: a folder that was opened as a cache before.
        Raises:
            FileNotFoundError: the folder has no cache.
        """
        with cls(folder, int((Path(folder) / CONTROL / BUDGET).read_bytes())) as cache:
            return cache.stats()

    def __repr__(self) -> str:
        kept = self.folder.files()
        nbytes = sum(one.nbytes for one in kept)
        return f"<SampleCache {self.path}: {len(kept)} files, {nbytes} of {self.capacity_bytes} bytes>"
