"""Runs a packing in a forked process that reports each of its steps, and kills it after some step."""

from __future__ import annotations

import os
import select
import signal
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from shmload.storage.store import StoredObject
from tests.remote.packing.packing_kit import CountingStore, Noisy, packed, published_bytes_in

NUM_SAMPLES, MAXCOUNT, SEED = 300, 12, 5
DEADLINE_S = 60


class ReportingStore(CountingStore):
    """A folder that reports before and after it writes each object."""

    def __init__(self, root: Path, fd: int) -> None:
        super().__init__(root)
        object.__setattr__(self, "fd", fd)

    def put(self, key: str, data: Any) -> StoredObject:
        os.write(self.fd, b"<")
        done = super().put(key, data)
        os.write(self.fd, b">")
        return done

    def put_file(self, key: str, path: Path) -> StoredObject:
        os.write(self.fd, b"[")
        done = super().put_file(key, path)
        os.write(self.fd, b"]")
        return done


def _pack(folder: Path, fd: int, num_samples: int, workers: int, append: bool, part: tuple[int, int]) -> None:
    try:
        store = ReportingStore(folder, fd)
        method = "fork" if workers else None
        packed(
            Noisy(num_samples),
            store,
            maxcount=MAXCOUNT,
            seed=SEED,
            append=append,
            part=part,
            workers=workers,
            multiprocessing_context=method,
            on_progress=lambda progress: os.write(fd, b"."),
        )
        os._exit(0)
    finally:
        os._exit(1)


def killed_after(
    folder: Path,
    num_steps: int | None,
    *,
    num_samples: int = NUM_SAMPLES,
    workers: int = 0,
    append: bool = False,
    part: tuple[int, int] = (1, 1),
) -> int:
    """Packs in a forked process and kills it after `after` steps (None: a fault is armed for that). Returns the number of steps,
    or -1 if it ended first.
    """
    read, write = os.pipe()
    process = ForkProcess(target=_pack, args=(folder, write, num_samples, workers, append, part))
    process.start()
    os.close(write)
    count = 0
    try:
        while num_steps is None or count < num_steps:
            assert select.select([read], [], [], DEADLINE_S)[0], "the packing makes no progress"
            if not os.read(read, 1):
                break
            count += 1
        if num_steps is not None and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE_S)
        assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
        return -1 if process.exitcode == 0 else count
    finally:
        os.close(read)
        process.close()


def finished(folder: Path, num_samples: int = NUM_SAMPLES) -> dict[str, bytes]:
    """Packs to the end and returns the bytes of each file, except files that a killed writer left."""
    packed(Noisy(num_samples), CountingStore(folder), maxcount=MAXCOUNT, seed=SEED)
    return published_bytes_in(folder)
