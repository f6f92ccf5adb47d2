"""Datasets for tests of a worker pool of Ray actors whose samples do not end; importable by the actors, and without torch."""

from __future__ import annotations

import os
import signal
import threading
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tests.ray.ray_datasets import Rows


class Stuck(Rows):
    """One sample waits for what never comes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            threading.Event().wait()
        return super().__getitem__(index)


class HalfWritten(Rows):
    """One sample stands still with half of its row written, and spoils the whole row once it may go on: the first from FREE on.

    Args:
        is_away: only one that is read on another node than the head's, whose actors wait for that.
    """

    FREE = 8
    schema = {"image": (np.uint8, (300, 40)), "index": (np.int64, ())}

    def __init__(self, folder: str, *, is_away: bool = False) -> None:
        super().__init__(32)
        self.folder, self.is_away = Path(folder), is_away

    def read_into(self, index: int, out: Any) -> None:
        image = out["image"]
        if index >= self.FREE and self.is_away and on_head():
            while not (self.folder / "pid").exists():
                threading.Event().wait(0.01)
        if index >= self.FREE and self._is_first():
            image[:150] = 255
            (self.folder / "pid.new").write_text(str(os.getpid()))
            (self.folder / "pid.new").rename(self.folder / "pid")  # only here it is whole
            while not (self.folder / "go_on").exists():
                threading.Event().wait(0.01)
            image[:] = 254
            (self.folder / "spoilt").touch()
        image[:] = index
        out["index"] = index

    def _is_first(self) -> bool:
        try:
            os.close(os.open(self.folder / "begun", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def stick_away_from_the_head(worker: int) -> None:
    """A worker_init_fn that does not end on any node but the head's."""
    if not on_head():
        threading.Event().wait()


@cache
def on_head() -> bool:
    """Whether this actor's node is the head's."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (head,) = [node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]
    return bool(here == head)


class AtOnce(Rows):
    """Samples that are read several at once, of which number 5 never comes, or ends its actor."""

    def __init__(self, harm: str) -> None:
        super().__init__(12)
        self.harm = harm
        self.asked: list[list[int]] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.asked.append(indices)
        if 5 in indices and self.harm == "waits":
            threading.Event().wait()
        elif 5 in indices and self.harm == "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        return [{"index": index} for index in indices]


class RowsAtOnce(AtOnce):
    """The same, written into the batch."""

    schema: ClassVar[Any] = {"index": np.int64}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["index"][:] = [sample["index"] for sample in self.__getitems__(indices.tolist())]
