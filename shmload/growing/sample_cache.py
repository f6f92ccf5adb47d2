"""SampleCache: the face of the growing cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shmload.formats.paths import write_whole
from shmload.growing.cache_file import CONTROL, CacheFile
from shmload.growing.cache_statistics import CacheStatistics, statistics_of
from shmload.growing.cache_writer import CacheWriter
from shmload.growing.damage import BAD
from shmload.growing.dataset import GrowingDataset, SnapshotRecords
from shmload.growing.growing_epochs import GrowingEpochs, Missing
from shmload.growing.growing_run import JoinedRun, forget_runs
from shmload.growing.intake import MAX_INFLATED_BYTES
from shmload.growing.library import Library, are_samples
from shmload.growing.sampler_process import Sampler
from shmload.growing.samplers import Samplers
from shmload.storage.budgeted_folder import BudgetedFolder

BUDGET = "budget"  # for stats readers


class SampleCache:
    """A folder of samples that grows while it is trained on, within a budget.

    Any number of processes write into it; each epoch reads what is there when it begins. Oldest files are evicted for new ones,
    never one that an epoch under way reads. The folder holds true TFRecord files and nothing else that matters, so a cache is
    opened again by naming it, and other programs may read it or put files (named *tfrecord*) there.

    Args:
        folder: made if it is not there. On a local disk; all who use it give the same budget.
        capacity_bytes: of all files together, what is being written included.
        file_nbytes: how large the files become that writers write, about; default 64 MB, or a 16th of the cache.
        headroom: the share of the budget that no epoch reads once the cache is full: its oldest files, which may then be
            evicted while the epoch runs. More makes the cache renew itself faster, less makes epochs larger.
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
        capacity_bytes = int(capacity_bytes)  # 1e9 is one, too
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
        self.folder = BudgetedFolder(self.path, capacity_bytes, adopts=True, order=are_samples)
        self._begin()
        budget, said = self.path / CONTROL / BUDGET, b"%d" % capacity_bytes
        if not budget.exists() or budget.read_bytes() != said:
            self.folder.evicting(partial(write_whole, budget, said))
        forget_runs(self.path, lambda name: (self.path / name).exists())

    def _begin(self) -> None:
        self._samplers: list[Samplers] = []
        self._library = Library(self.folder, file_nbytes=self.file_nbytes, headroom=self.headroom, samplers=self._samplers)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_library", "_samplers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    # ------------------------------------------------------------ writing

    def writer(
        self, *, raw: Iterable[str] = (), compression: str | None = None, publish_s: float = 10.0, timeout_s: float | None = None
    ) -> CacheWriter:
        """Writes samples from this process. Close it, or use it as a context manager.

        Args:
            raw, compression: as of TFRecordWriter.
            publish_s: the first sample that comes so many seconds after a file's first has the file published, so that an epoch
                can have it; `publish()` does so at once.
            timeout_s: seconds to wait while the budget is full of samples that epochs read; None: as long as it takes.
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
        """Runs a sampler in processes of its own, until it ends, the cache is closed, or this process ends in any way.

        One that fails or is killed is started again, after a pause that doubles from 0.1 s to 30 s with each failure in a row;
        what it has collected is kept. Where the budget is full of samples that epochs read, samplers wait.

        Args:
            sampler: `sampler(worker_id, num_workers)` yields samples: dicts of arrays and texts, or bytes. Random generators are
                seeded anew in each process.
            num_processes: how many run it.
            raw, compression: as of `writer`.
            publish_s: the longest that a sample waits for others before an epoch can have it.
            max_restarts: failures in a row, without a file published between, after which a sampler is given up. When all are, the
                next epoch's start raises WorkerDied with the traceback.
            multiprocessing_context: how their supervisor is started: "fork", "spawn", "forkserver" or a context. None: as Python
                does.
        Returns:
            their handle: `states`, `stop()`.
        Raises:
            ValueError: `num_processes` or `max_restarts` is out of its range.
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
        """The samples as ShmLoader reads them, in seed mode: in each epoch those that are there when it begins.

        Args:
            schema, records, verify, defaults, decode: as of TFRecordDataset.
            min_samples: an epoch begins when there are so many.
            timeout_s: seconds to wait for them; then TimeoutError.
            missing: what a resume does about samples of its epoch that were evicted or replaced. "error": StateMismatch, which
                names them; "skip": leaves them out, so batches are shorter (never empty); "substitute": other samples of that epoch
                in their place. What it does is logged.
            run: what this training run is called, the same in all its ranks and in no other run. None: for one rank a name drawn
                anew; for several, made of what their launcher sets (torchrun, Slurm, or their common parent).
        Raises:
            ValueError: an argument is out of its range.
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
        make = partial(GrowingEpochs, self._library, joined, min_samples=min_samples, timeout_s=timeout_s, missing=missing)
        return GrowingDataset(self.path, joined, make, reader)

    def files(self) -> list[CacheFile]:
        """What could be read now, oldest first; the oldest of a full cache, within the headroom, no epoch begins to read."""
        return self._library.files()

    # ------------------------------------------------------------ views

    def stats(self) -> CacheStatistics:
        """The cache now."""
        return statistics_of(self._library)

    # ------------------------------------------------------------ ends

    def close(self) -> None:
        """Ends the samplers that this process has started, and its hold on files. What is in the folder stays."""
        for samplers in self._samplers:
            samplers.stop()
        self._samplers.clear()
        for epochs in list(self._library.readers):
            epochs.ended()
        self.folder.close()

    def __enter__(self) -> SampleCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def look(cls, folder: str | os.PathLike[str]) -> CacheStatistics:
        """What the cache in a folder is doing, for who does not use it.

        Args:
            folder: of a cache that was opened once.
        Raises:
            FileNotFoundError: there is none.
        """
        with cls(folder, int((Path(folder) / CONTROL / BUDGET).read_bytes())) as cache:
            return cache.stats()

    def __repr__(self) -> str:
        kept = self.folder.files()
        nbytes = sum(one.nbytes for one in kept)
        return f"<SampleCache {self.path}: {len(kept)} files, {nbytes} of {self.capacity_bytes} bytes>"
