"""Datasets for tests with actors and processes in one loader, which behave differently in the two kinds; actors can import them."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.ray.ray_datasets import Rows, Texts
from tests.ray.stuck_datasets import Stuck

HERE = "SHMLOAD_TEST_HERE"  # set only in the environment of the test and its children: Ray gives actors another environment


class StuckHere(Stuck):
    """One sample blocks forever in processes of the test's machine, but not in actors."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) if HERE in os.environ else Rows.__getitem__(self, index)


class DyingThere(Texts):
    """The first sample that any actor reads kills it with SIGKILL; a file records that."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, index: int) -> dict[str, Any]:
        if HERE not in os.environ:
            try:
                os.close(os.open(f"{self.folder}/dead", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)
