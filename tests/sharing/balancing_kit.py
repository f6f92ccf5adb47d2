"""Ranks that read different samples of one dataset, whose samples can tell who reads them and wait for what happens elsewhere."""

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
HALF = 2  # ranks in most tests: they read every other run of BATCH samples


def owner_of(index: int, world_size: int = HALF) -> int:
    """The rank whose batch a sample is in, as long as nothing is shuffled."""
    return index // BATCH % world_size


class Marks:
    """Things that have happened, as files of a folder: any process may set one, and others wait for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def set(self, name: str) -> bool:
        """Whether this call was the first."""
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
            sleep(0.001)  # between two looks at a file: nothing depends on how long it is

    def check(self, deadline: float, name: str) -> None:
        """Fails beyond the deadline, or if another has: then all give up."""
        if self.has("given up") or monotonic() > deadline:
            self.set("given up")
            raise AssertionError(f"nobody has set {name!r}")


class Samples:
    """Samples of one's own randomness. `act(marks, index, is_helper)` is called at each reading of a sample of rank 1's."""

    def __init__(self, marks: Marks, act: Callable[[Marks, int, bool], None] | None = None) -> None:
        self._marks, self._act = marks, act
        self._rank = os.environ.get("LOCAL_RANK")

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._act is not None and owner_of(index) == 1:
            self._act(self._marks, index, self._rank != "1")
        return {"x": np.full((16, 16), index, np.int64), "noise": np.random.rand(3)}


def is_first(index: int) -> bool:
    """Whether a sample is in the first batch of its rank: helpers come when the layout is known."""
    return index < HALF * BATCH


def own_wait_for_a_helper(marks: Marks, index: int, is_helper: bool) -> None:
    """The worker of rank 1 stands still until another rank's helps it."""
    if is_helper:
        marks.set("helped")
    elif not is_first(index):
        marks.wait("helped")


def helper_hangs(marks: Marks, index: int, is_helper: bool) -> None:
    """The first helper stands still for good."""
    if is_helper and marks.set("helped"):
        while True:  # the signal that asks for its stack ends a pause
            signal.pause()
    own_wait_for_a_helper(marks, index, is_helper)


def helper_is_killed(marks: Marks, index: int, is_helper: bool) -> None:
    """The first helper is killed over its sample."""
    if is_helper and marks.set("helped"):
        os.kill(os.getpid(), signal.SIGKILL)
    own_wait_for_a_helper(marks, index, is_helper)


DEADLY = HALF * BATCH + BATCH + 1  # the second sample of rank 1's second batch


def deadly(marks: Marks, index: int, is_helper: bool) -> None:
    """One sample kills whoever reads it; a helper does so first."""
    if index == DEADLY - 1 and not is_helper:
        marks.wait("helped")
    if index == DEADLY:
        marks.set("helped")
        os.kill(os.getpid(), signal.SIGKILL)


def loader_of(rank: int, dataset: Any, *, share: str | None = "node", world_size: int = HALF, **others: Any) -> Any:
    """A loader of one rank's part."""
    arguments = {"num_workers": 1, "multiprocessing_context": "fork", "seed": 3, "timeout": DEADLINE_S / 2, **others}
    return ShmLoader(dataset, BATCH, rank=rank, world_size=world_size, share=share, **arguments)


def read_until(marks: Marks, name: str, loader: Any) -> None:
    """Reads on, so that this rank's dead workers are replaced, until something has happened."""
    deadline = monotonic() + DEADLINE_S / 1.5
    while not marks.has(name):
        for _ in loader:
            marks.check(deadline, name)


def digest(batch: Any) -> str:
    """Of a batch's bytes."""
    return hashlib.sha256(b"".join(np.asarray(part).tobytes() for part in batch.values())).hexdigest()


def alone(rank: int, dataset: Any, num_epochs: int = 1, **others: Any) -> list[str]:
    """What a rank reads that has no rank sync."""
    with loader_of(rank, dataset, share=None, **{**others, "multiprocessing_context": "fork"}) as loader:
        return [digest(batch) for _ in range(num_epochs) for batch in loader]
