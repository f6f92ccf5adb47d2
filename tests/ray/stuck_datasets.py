"""Datasets with samples that never finish, for tests of Ray actors as workers. Actors can import them, and they do not import
torch.
"""

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
    """One sample blocks forever."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            threading.Event().wait()
        return super().__getitem__(index)


class HalfWritten(Rows):
    """One sample stops when half of its row is written, and overwrites the whole row once it may continue: the first one from
    FREE on.


    Args:
        is_away: only a sample that is read on a node other than the head's stops; the head's actors wait for that.
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
            (self.folder / "pid.new").rename(self.folder / "pid")  # renamed, so that a reader never sees an incomplete file
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


def block_on_other_nodes(worker: int) -> None:
    """Blocks forever on every node except the head's: a worker_init_fn."""
    if not on_head():
        threading.Event().wait()


@cache
def on_head() -> bool:
    """Returns whether this actor runs on the head's node."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (head,) = [node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]
    return bool(here == head)


class AtOnce(Rows):
    """Samples that are read several at a time; number 5 blocks forever or kills its actor."""

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
    """Like `AtOnce`, but written into the batch."""

    schema: ClassVar[Any] = {"index": np.int64}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["index"][:] = [sample["index"] for sample in self.__getitems__(indices.tolist())]
