"""Loaders whose rings are poisoned: a slot is overwritten as soon as it is returned, so that a lost lease is noticed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shmload import ShmLoader

ROWS = 4


class Fields:
    """A dataset whose sample i contains i in every dtype that slots can store."""

    def __init__(self, n: int = 1_000_000) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "x": np.full((3, 8), i, np.float32),
            "bfloat16": torch.full((5,), i % 256, dtype=torch.bfloat16),
            "bool": np.array([i % 2, (i + 1) % 2], np.bool_),
            "complex64": np.full(3, complex(i, -i), np.complex64),
            "label": i,
        }


def collated(samples: list[dict[str, Any]]) -> Any:
    """Returns the default collation of `Fields`."""
    return torch.utils.data.default_collate(samples)


def collate_packed(samples: list[dict[str, Any]]) -> Any:
    """Returns the same tensors with text and an array, which only packed batches can store."""
    return [collated(samples), "text", np.stack([s["x"] for s in samples])]


class Stream:
    """A running loader over `Fields` in order, with a poisoned ring."""

    def __init__(self, **options: Any) -> None:
        options = {"batch_size": ROWS, "num_workers": 1, "seed": 0, "multiprocessing_context": "fork"} | options
        self.loader: ShmLoader[Any] = ShmLoader(Fields(), **options)
        self.iterator = iter(self.loader)
        self.step = 0
        self.next()
        self.engine = self.loader._builder.last
        self.ring = self.engine._ring
        self.ring.poison = True

    def next(self) -> Any:
        """Returns the next batch."""
        self.step += 1
        return next(self.iterator)

    def run_on(self) -> None:
        """Reads on until every free slot has been reused several times."""
        for _ in range(3 * self.ring.num_slots):
            self.next()

    def expected(self) -> Any:
        """Returns the last batch of `next`, computed without the loader."""
        first = (self.step - 1) * ROWS
        return collated([Fields()[i] for i in range(first, first + ROWS)])

    @property
    def num_leased(self) -> int:
        """Returns the number of leased slots."""
        return self.ring.num_leased


@pytest.fixture(scope="module")
def shared_stream() -> Iterator[Stream]:
    """Yields a stream for all tests of a file, because starting workers is slow."""
    stream = Stream()
    yield stream
    stream.loader.close()


@pytest.fixture(scope="module")
def shared_packed_stream() -> Iterator[Stream]:
    """Yields such a stream with packed batches."""
    stream = Stream(collate_fn=collate_packed)
    yield stream
    stream.loader.close()


def _unheld(stream: Stream) -> Stream:
    gc.collect()
    assert stream.num_leased == 0
    return stream


@pytest.fixture
def stream(shared_stream: Stream) -> Stream:
    """Returns the file's stream, without leased slots."""
    return _unheld(shared_stream)


@pytest.fixture
def packed_stream(shared_packed_stream: Stream) -> Stream:
    """Returns the file's packed stream, without leased slots."""
    return _unheld(shared_packed_stream)


@pytest.fixture
def make_stream() -> Iterator[Callable[..., Stream]]:
    """Yields a function that makes streams for one test, and closes them afterwards."""
    made: list[ShmLoader[Any]] = []

    def make(**options: Any) -> Stream:
        stream = Stream(**options)
        made.append(stream.loader)
        return stream

    yield make
    for loader in made:
        loader.close()


@pytest.fixture
def raw() -> Callable[[Any], bytes]:
    """Returns a function that reads any alias to bytes."""
    return raw_bytes


def raw_bytes(alias: Any) -> bytes:
    """Returns the bytes that an alias shows."""
    if isinstance(alias, torch.Tensor):
        return alias.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(alias, torch.UntypedStorage):
        return bytes(alias.tolist())
    if isinstance(alias, np.ndarray):
        return alias.tobytes()
    if isinstance(alias, dict):
        return raw_bytes(list(alias.values()))
    if isinstance(alias, (list, tuple)):
        return b"|".join(raw_bytes(a) for a in alias)
    if isinstance(alias, BaseException):
        return raw_bytes(alias.__traceback__.tb_frame.f_locals["kept"])
    if callable(alias):
        return raw_bytes(alias())
    return bytes(alias)
