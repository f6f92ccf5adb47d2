"""Datasets for tests of Ray actors as workers. Actors can import them, and they do not import torch, so that actors start
quickly.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from shmload import sample_rng


class Rows:
    """Fixed-shape rows with values drawn from `sample_rng`."""

    def __init__(self, n: int = 61) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full((3, 2), index, np.float32), "drawn": sample_rng().standard_normal(3), "index": index}


class Texts(Rows):
    """Samples that do not have fixed-shape rows."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": "a" * index, "ragged": np.arange(index, dtype=np.int32), "drawn": sample_rng().random()}


class InPlace(Rows):
    """Rows that are decoded in place."""

    schema = {"image": (np.uint8, (5, 4)), "label": (np.int64, ())}

    def read_into(self, index: int, out: Any) -> None:
        out["image"][:] = index
        out["label"] = sample_rng().integers(1 << 30)


class Changing(Rows):
    """Rows of two dtypes: batches that contain both are packed, no matter which worker has set the layout."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(3, index, np.float32 if index % 7 else np.float64)}


class Failing(Rows):
    """Rows of which sample 7 cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 7:
            raise KeyError("the seventh")
        return super().__getitem__(index)


class Counting(Rows):
    """Counts how often each sample was read, in its own array (a large one by default)."""

    def __init__(self, n: int = 1 << 17, *, is_in_place: bool = False) -> None:
        super().__init__(n)
        self.counts, self.is_in_place = np.zeros(n, np.int64), is_in_place

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.is_in_place:
            np.add(self.counts, 1, out=self.counts)
        else:
            self.counts[index] += 1
        return {"count": self.counts[index]}


class ReportsMappings(Rows):
    """Samples that report the memory mappings of the dataset's large array and large tensor."""

    def __init__(self, n: int, *, tensor: Any) -> None:
        super().__init__(n)
        self.array, self.tensor = np.arange(1 << 17), tensor
        self.again = self.array

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.again is self.array
        self.tensor[index] += 1  # a private copy: no other process sees this write
        array, counts = self.array[index : index + 1], self.tensor.numpy()
        places = [mapped_at(array.ctypes.data), mapped_at(counts.ctypes.data)]
        kinds = [array.flags.writeable, counts.flags.writeable]
        return {"index": array[0], "count": counts[index], "pid": os.getpid(), "places": np.array(places), "kinds": np.array(kinds)}


def mapped_at(address: int) -> tuple[int, int]:
    """Returns the inode and offset of the file mapped at an address of this process; zeros if no file is mapped there."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, _, offset, _, inode, *_ = line.split()
            begin, end = (int(bound, 16) for bound in bounds.split("-"))
            if begin <= address < end:
                return (int(inode), int(offset, 16) + address - begin) if int(inode) else (0, 0)
    raise AssertionError(f"nothing is mapped at {address:#x}")


class Deadly(Rows):
    """Some samples kill their process with SIGKILL the first few times; files count the deaths across all processes."""

    def __init__(self, folder: str, deadly: dict[int, int], n: int = 61) -> None:
        super().__init__(n)
        self.folder, self.deadly = folder, deadly

    def __getitem__(self, index: int) -> dict[str, Any]:
        for number in range(self.deadly.get(index, 0)):
            try:
                os.close(os.open(f"{self.folder}/{index}-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class BlockedByPipe(Rows):
    """Sample 9 blocks until someone writes to a named pipe."""

    def __init__(self, gate: str, n: int) -> None:
        super().__init__(n)
        self.gate = gate

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 9:
            with open(self.gate, "rb") as gate:
                gate.read(1)
        return super().__getitem__(index)


class Numbers(Rows):
    """Rows with negative indices, as a second member of a mixture."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "index": -index}


class Labeled:
    """Names and labels read from an index."""

    def __init__(self, entries: Any) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, label = self.entries[index]
        return {"name": name, "label": label}


def drawn(item: Any) -> dict[str, Any]:
    """Draws a random number beside the item: a stage of a pipeline."""
    return {"item": np.array(item), "drawn": sample_rng().random()}
