"""Ranks that read different samples of one dataset. The samples can detect which worker reads them and wait for events in other
processes.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from shmload import ShmLoader
from tests.sharing.sharing_kit import DEADLINE_S

NUM_SAMPLES, BATCH = 48, 4
HALF = 2  # number of ranks in most tests: each reads every other run of BATCH samples


def owner_of(index: int, world_size: int = HALF) -> int:
    """Returns the rank whose batch a sample is in, if nothing is shuffled."""
    return index // BATCH % world_size


class Events:
    """Events, as files in a folder: any process may set one, and others wait for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def set(self, name: str) -> bool:
        """Sets an event; returns whether this call was the first."""
        try:
            os.close(os.open(f"{self._folder}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def has(self, name: str) -> bool:
        return os.path.exists(f"{self._folder}/{name}")

    def wait(self, name: str) -> None:
        deadline = monotonic() + DEADLINE_S / 3
        while not self.has(name):
            self.check(deadline, name)
            sleep(0.001)  # the pause between two checks; no result depends on it

    def check(self, deadline: float, name: str) -> None:
        """Fails after the deadline, or if another process has failed: then all give up."""
        if self.has("given up") or monotonic() > deadline:
            self.set("given up")
            raise AssertionError(f"event {name!r} was not set in time")


class Samples:
    """Samples with noise from `sample_rng`. `act(marks, index, is_helper)` is called each time a sample of rank 1 is read."""

    def __init__(self, marks: Events, act: Callable[[Events, int, bool], None] | None = None) -> None:
        self._marks, self._act = marks, act
        self._rank = os.environ.get("LOCAL_RANK")

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._act is not None and owner_of(index) == 1:
            self._act(self._marks, index, self._rank != "1")
        return {"x": np.full((16, 16), index, np.int64), "noise": np.random.rand(3)}


def is_first(index: int) -> bool:
    """Returns whether a sample is in the first batch of its rank: helpers start once the layout is known."""
    return index < HALF * BATCH


def own_wait_for_a_helper(marks: Events, index: int, is_helper: bool) -> None:
    """Blocks rank 1's own worker until another rank's worker helps it."""
    if is_helper:
        marks.set("helped")
    elif not is_first(index):
        marks.wait("helped")


def helper_hangs(marks: Events, index: int, is_helper: bool) -> None:
    """Blocks the first helper forever."""
    if is_helper and marks.set("helped"):
        while True:  # the signal that asks for its stack ends a pause
            signal.pause()
    own_wait_for_a_helper(marks, index, is_helper)


def helper_is_killed(marks: Events, index: int, is_helper: bool) -> None:
    """Kills the first helper during its sample."""
    if is_helper and marks.set("helped"):
        os.kill(os.getpid(), signal.SIGKILL)
    own_wait_for_a_helper(marks, index, is_helper)


DEADLY = HALF * BATCH + BATCH + 1  # the second sample of rank 1's second batch


def deadly(marks: Events, index: int, is_helper: bool) -> None:
    """Kills each process that reads one sample; a helper reads it first."""
    if index == DEADLY - 1 and not is_helper:
        marks.wait("helped")
    if index == DEADLY:
        marks.set("helped")
        os.kill(os.getpid(), signal.SIGKILL)


def loader_of(rank: int, dataset: Any, *, share: str | None = "node", world_size: int = HALF, **others: Any) -> Any:
    """Returns a loader for one rank's part."""
    arguments = {"num_workers": 1, "multiprocessing_context": "fork", "seed": 3, "timeout": DEADLINE_S / 2, **others}
    return ShmLoader(dataset, BATCH, rank=rank, world_size=world_size, share=share, **arguments)


def read_until(marks: Events, name: str, loader: Any) -> None:
    """Reads batches, so that this rank's dead workers are replaced, until an event is set."""
    deadline = monotonic() + DEADLINE_S / 1.5
    while not marks.has(name):
        for _ in loader:
            marks.check(deadline, name)


def digest(batch: Any) -> str:
    """Returns the hash of a batch's bytes."""
    return hashlib.sha256(b"".join(np.asarray(part).tobytes() for part in batch.values())).hexdigest()


def alone(rank: int, dataset: Any, num_epochs: int = 1, **others: Any) -> list[str]:
    """Returns the digests of what a rank reads without sharing."""
    with loader_of(rank, dataset, share=None, **{**others, "multiprocessing_context": "fork"}) as loader:
        return [digest(batch) for _ in range(num_epochs) for batch in loader]
