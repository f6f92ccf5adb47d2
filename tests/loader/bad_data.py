"""Datasets with some samples that cannot be read, for each way of reading."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

BAD = frozenset({3, 4, 11, 28})


class Broken(ValueError):
    """The error of a bad sample."""


class Rows:
    def __init__(self, n: int = 30, bad: frozenset[int] = BAD) -> None:
        self.n, self.bad = n, bad

    def __len__(self) -> int:
        return self.n

    def check(self, index: int) -> None:
        if index in self.bad:
            raise Broken(f"sample {index} is broken")

    def __getitem__(self, index: int) -> Any:
        self.check(index)
        return {"index": index, "noise": np.random.rand(2)}


class Lists(Rows):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class Filtered(Rows):
    """A dataset whose `__getitems__` leaves out the samples in BAD. It numbers what it reads."""

    num_read = 0

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        return {**super().__getitem__(index), "noise": np.array([self.num_read, np.random.rand()])}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [sample for sample in map(self.__getitem__, indices) if sample["index"] not in BAD]


class FailsTogether(Rows):
    """A dataset whose `__getitems__` fails for batches with a sample in BAD, although it can read each sample alone.

    It draws from a generator of its own, too.
    """

    def __init__(self, n: int = 30, bad: frozenset[int] = BAD) -> None:
        super().__init__(n, bad)
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "noise": np.array([self.rng.random(), np.random.rand()])}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) > 1 and BAD.intersection(indices):
            raise Broken("batch")
        return [self[i] for i in indices]


class InPlace(Rows):
    schema = {"index": ("int64", ()), "noise": ("float64", (2,))}

    def read_into(self, index: int, out: Any) -> None:
        out["noise"][:] = -1
        self.check(index)
        out["index"] = index
        out["noise"][:] = np.random.rand(2)


class Batches(Rows):
    schema = {"index": ("int64", ()), "noise": ("float64", (2,))}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        for index in indices:
            self.check(int(index))
        out["index"][:] = indices
        out["noise"][:] = np.asarray(indices)[:, None]


class Texts(Rows):
    def __getitem__(self, index: int) -> Any:
        self.check(index)
        return {"index": index, "text": "x" * index}


class TextsInPlace(Rows):
    """A dataset whose bad samples have a text of the wrong type, which the dataset does not notice."""

    schema = {"index": "int64", "text": str, "names": (str, (None,))}

    def text(self, index: int) -> Any:
        return None if index in self.bad and index % 2 else "x" * index

    def names(self, index: int) -> Any:
        return "xy" if index in self.bad and index % 2 == 0 else ["x", "y"]

    def read_into(self, index: int, out: Any) -> None:
        out["index"] = index
        out["text"], out["names"] = self.text(index), self.names(index)


class BatchesOfTexts(TextsInPlace):
    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["index"] = indices
        out["text"] = map(self.text, indices.tolist())
        out["names"] = [self.names(index) for index in indices.tolist()]


def as_tagged_batch(samples: list[Any]) -> dict[str, Any]:
    return {"index": torch.tensor([s["index"] for s in samples]), "all": len(samples)}


def fail_at_bad(samples: Any) -> Any:
    """Collates samples; raises if one of them is in BAD."""
    batch: dict[str, Any] = (default_collate if isinstance(samples, list) else default_convert)(samples)
    if BAD.intersection(np.atleast_1d(batch["index"]).tolist()):
        raise Broken("collate")
    return batch


class Deadly(Rows):
    """A dataset whose bad samples kill their worker."""

    def check(self, index: int) -> None:
        if index in self.bad:
            os.kill(os.getpid(), signal.SIGKILL)


class Stuck(Rows):
    """A dataset whose bad samples never return."""

    def check(self, index: int) -> None:
        if index in self.bad:
            threading.Event().wait()


class Flaky(Rows):
    """A dataset whose bad samples fail `times` times, whichever process reads them, and then succeed.

    Args:
        folder: a folder that gets an empty file for each failure.
    """

    def __init__(self, n: int, bad: frozenset[int], folder: str, times: int) -> None:
        super().__init__(n, bad)
        self.folder, self.times = folder, times

    def check(self, index: int) -> None:
        for time in range(self.times if index in self.bad else 0):
            try:
                os.close(os.open(f"{self.folder}/{index}-{time}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            raise Broken(f"sample {index} fails, attempt {time + 1}")
