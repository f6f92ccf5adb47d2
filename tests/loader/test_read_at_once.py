"""Samples that are read several at a time draw what each would draw alone: the batch, the worker and the rank change nothing."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from shmload import SampleError, ShmLoader, sample_rng

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers


class Drawing:
    """One at a time; the text makes batches packed."""

    draw = staticmethod(random.random)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": f"sample {index}", "draw": float(self.draw())}


class DrawingByNumpy(Drawing):
    draw = staticmethod(lambda: np.random.random())


class DrawingByTorch(Drawing):
    draw = staticmethod(lambda: torch.rand(()).item())


class DrawingByRng(Drawing):
    draw = staticmethod(lambda: sample_rng().random())


class DrawingRows(Drawing):
    """Without text: batches are rows, in chunks."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"draw": super().__getitem__(index)["draw"]}


class AtOnce(DrawingRows):
    """A whole batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class OnlyAtOnce:
    """There is no other way."""

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"draw": random.random()} for _ in indices]


class InBatches:
    """In place; each sample's own generator, asked for by its index."""

    schema: ClassVar = {"draw": "float64"}

    def __len__(self) -> int:
        return 12

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["draw"][...] = [sample_rng(index).random() for index in indices]


class InTextBatches(InBatches):
    schema: ClassVar = {"text": str, "draw": "float64"}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["text"] = ["x"] * len(indices)
        super().read_batch_into(indices, out)


def draws(dataset: Any, batch_size: int, num_workers: int) -> list[float]:
    with ShmLoader(dataset, batch_size, num_workers=num_workers, seed=1) as loader:
        return [value for batch in loader for value in batch["draw"].tolist()]


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(Drawing(), range(12)),  # type: ignore[type-var]  # torch's Subset has __getitems__
        Subset(DrawingByNumpy(), range(12)),  # type: ignore[type-var]
        Subset(DrawingByTorch(), range(12)),  # type: ignore[type-var]
        Subset(DrawingByRng(), range(12)),  # type: ignore[type-var]
        Subset(DrawingRows(), range(12)),  # type: ignore[type-var]
        AtOnce(),
        OnlyAtOnce(),
        InBatches(),
        InTextBatches(),
    ],
    ids=["text", "numpy", "torch", "sample_rng", "rows", "at once", "only at once", "in place", "in place, text"],
)
def test_draws_are_the_samples_own(dataset: Any) -> None:
    alone = draws(dataset, 1, 0)
    assert len(set(alone)) == 12
    for batch_size, num_workers in ((12, 0), (12, 1), (4, 1), (6, 3)):
        assert draws(dataset, batch_size, num_workers) == alone


def test_what_draws_nothing_is_still_read_at_once() -> None:
    class Counting:
        calls: ClassVar[list[int]] = []

        def __len__(self) -> int:
            return 12

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.calls.append(len(indices))
            return indices

    with ShmLoader(Counting(), 4, seed=1) as loader:  # type: ignore[arg-type]  # duck-typed
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert Counting.calls == [4, 4, 4]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_generator_of_no_one_sample_is_refused(num_workers: int) -> None:
    class Wrong(InBatches):
        def read_batch_into(self, indices: Any, out: Any) -> None:
            out["draw"][...] = sample_rng().random(len(indices))

    with pytest.raises(RuntimeError, match=r"read_batch_into reads several at once: ask for each one's, sample_rng\(index\)"):
        draws(Wrong(), 4, num_workers)
    with ShmLoader(Wrong(), 4, num_workers=num_workers) as loader:  # type: ignore[arg-type]  # torch mode has no keys
        assert len(list(loader)) == 3


class Spoilt:
    """Whole batches with text, one sample of which cannot be read."""

    schema: ClassVar = {"text": str, "x": "int64"}

    def __len__(self) -> int:
        return 12

    def read_batch_into(self, indices: Any, out: Any) -> None:
        if 1 in indices:
            raise SampleError("this one is spoilt")
        out["text"] = [f"t{index}" for index in indices]
        out["x"][...] = indices


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_bad_sample_among_text_is_skipped_alone(num_workers: int) -> None:
    with ShmLoader(Spoilt(), 3, seed=1, num_workers=num_workers, on_error="skip") as loader:  # type: ignore[arg-type]
        assert [batch["x"].tolist() for batch in loader] == [[0, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
