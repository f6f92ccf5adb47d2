"""Members of mixtures, at module level so that every start method can pickle them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from shmload import sample_info, sample_rng


class Tagged:
    """Samples that name their member, with random noise."""

    def __init__(self, name: int, n: int) -> None:
        self.name, self.n = name, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return {"member": self.name, "index": index, "noise": sample_rng().random()}


class KillsOnce(Tagged):
    """A dataset whose sample 3 kills the first worker that reads it."""

    def __init__(self, name: int, n: int, charge: Path) -> None:
        super().__init__(name, n)
        self.charge = charge

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 3 and self.charge.exists():
            self.charge.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class ReadsLists(Tagged):
    """A dataset that reads a list of samples, and records the lists."""

    def __init__(self, name: int, n: int) -> None:
        super().__init__(name, n)
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.asked.append(indices)
        return [self[index] for index in indices]


class Decoding(Tagged):
    """A dataset that decodes into rows."""

    schema = {"member": "int64", "index": "int64", "noise": "float64"}

    def read_into(self, index: int, out: Any) -> None:
        for name, value in self[index].items():
            out[name] = value


class DecodingBatches(Tagged):
    """A dataset that decodes ranges of rows."""

    schema = Decoding.schema

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["member"] = self.name
        out["index"] = indices
        out["noise"] = sample_info().index
