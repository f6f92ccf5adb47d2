"""The built-in datasets of generated numbers.

Contents are random, never zeros, which some memory systems deliver faster. Every draw has a fixed seed, so that two loaders must
deliver the same bytes.
"""

from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shmload.tools.bench.workload import NUM_LABELS, Field

RECORD_LENGTH = 1 << 18  # float32 values of a record: 1 MiB
NUM_RECORDS = 256


class Records:
    """Raw float32 records of 1 MiB in a mapped file, as is common for scientific data; an epoch repeats them."""

    schema: dict[str, Field] = {"x": ("float32", (RECORD_LENGTH,))}  # noqa: RUF012  # never changed

    def __init__(self, path: str, num_samples: int) -> None:
        self.path, self.num_samples = path, num_samples
        # Copy on write: rows are writable arrays, as torch's collate wants them, although nothing is written.
        self.records = np.asarray(np.memmap(path, np.float32, mode="c")).reshape(-1, RECORD_LENGTH)

    def __reduce__(self) -> tuple[type["Records"], tuple[str, int]]:
        return Records, (self.path, self.num_samples)  # a pickled map would contain the file's contents

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.records[index % len(self.records)]}

    def read_into(self, index: int, out: MutableMapping[str, Any]) -> None:
        np.copyto(out["x"], self.records[index % len(self.records)])


def prepare_records(folder: Path, small: bool) -> dict[str, Any]:
    path, count = folder / "records.bin", NUM_RECORDS // (16 if small else 1)
    draw = np.random.default_rng(1)
    with path.open("wb") as file:
        for _ in range(count):
            file.write(draw.random(RECORD_LENGTH, np.float32).data)
    return {"path": str(path), "num_samples": 16 * count}


ROW_LENGTH = 64


class RowsWorkload:
    """Tiny rows, 64 float32 and a label, from an array in memory; reads a whole batch at once."""

    schema: dict[str, Field] = {"x": ("float32", (ROW_LENGTH,)), "label": ("int64", ())}  # noqa: RUF012  # never changed

    def __init__(self, num_samples: int) -> None:
        draw = np.random.default_rng(2)
        self.x = draw.random((num_samples, ROW_LENGTH), np.float32)
        self.labels = draw.integers(0, NUM_LABELS, num_samples)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "label": self.labels[index]}

    def read_batch_into(self, indices: Sequence[int], out: MutableMapping[str, Any]) -> None:
        # numpy's default mode checks and buffers; "clip" writes straight into `out` in half the time
        np.take(self.x, indices, 0, out=out["x"], mode="clip")
        np.take(self.labels, indices, 0, out=out["label"], mode="clip")


WINDOW = 1025  # inputs and, shifted by one, targets of 1,024
STRIDE = WINDOW - 1
NUM_WINDOWS = 48 * 1024


class Tokens:
    """Language-model windows of uint16 tokens in a mapped file, delivered as int64; neighbors share one token."""

    schema: dict[str, Field] = {"tokens": ("int64", (WINDOW,))}  # noqa: RUF012  # never changed

    def __init__(self, path: str) -> None:
        self.path = path
        self.tokens = np.asarray(np.memmap(path, np.uint16, mode="r"))

    def __reduce__(self) -> tuple[type["Tokens"], tuple[str]]:
        return Tokens, (self.path,)  # a pickled map would contain the file's contents

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // STRIDE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": self.tokens[index * STRIDE : index * STRIDE + WINDOW].astype(np.int64)}

    def read_batch_into(self, indices: Sequence[int], out: MutableMapping[str, Any]) -> None:
        for row, index in zip(out["tokens"], indices, strict=True):
            row[...] = self.tokens[index * STRIDE : index * STRIDE + WINDOW]


def prepare_tokens(folder: Path, small: bool) -> dict[str, Any]:
    path = folder / "tokens.bin"
    count = NUM_WINDOWS // (16 if small else 1) * STRIDE + 1
    path.write_bytes(np.random.default_rng(3).integers(0, 50_257, count, np.uint16).data)
    return {"path": str(path)}


SHAPE = (3, 224, 224)


class Plain:
    """(uint8 image, int label) from memory; a dataset without any loader's protocol, like most users' own."""

    def __init__(self, num_images: int = 256, num_samples: int = 8192) -> None:
        self.images = np.random.default_rng(4).integers(0, 256, (num_images, *SHAPE), np.uint8)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index % len(self.images)], index


def prepare_rows(folder: Path, small: bool) -> dict[str, Any]:
    return {"num_samples": (48 if small else 480) * 1024}


def prepare_plain(folder: Path, small: bool) -> dict[str, Any]:
    return {"num_images": 32, "num_samples": 1024} if small else {}
