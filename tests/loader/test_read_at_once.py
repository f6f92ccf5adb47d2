"""Samples read several at a time draw what each would draw alone: batch, worker and rank do not matter."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from shmload import SampleError, ShmLoader, sample_rng

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers


class Drawing:
    """Samples read one at a time; the text makes packed batches."""

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
    """The same without text: batches are rows, read in chunks."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"draw": super().__getitem__(index)["draw"]}


class AtOnce(DrawingRows):
    """The same, read a whole batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class OnlyAtOnce:
    """A dataset that can only be read several samples at once."""

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"draw": random.random()} for _ in indices]


class InBatches:
    """A dataset that decodes in place and asks for each sample's generator by index."""

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
def test_draws_belong_to_the_sample(dataset: Any) -> None:
    alone = draws(dataset, 1, 0)
    assert len(set(alone)) == 12
    for batch_size, num_workers in ((12, 0), (12, 1), (4, 1), (6, 3)):
        assert draws(dataset, batch_size, num_workers) == alone


class Filtering(AtOnce):
    """Leaves out a third of the samples, although they draw."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [sample for index, sample in zip(indices, super().__getitems__(indices), strict=True) if index % 3]


def test_samples_kept_by_a_filter_draw_as_alone() -> None:
    alone = draws(Drawing(), 1, 0)
    for batch_size, num_workers in ((12, 0), (12, 1), (4, 1), (6, 3)):
        assert draws(Filtering(), batch_size, num_workers) == [value for index, value in enumerate(alone) if index % 3]


class CustomBatch:
    """A batch in a type of the dataset's own."""

    def __init__(self, values: list[float]) -> None:
        self.values = values


def values_of(batch: CustomBatch) -> list[float]:
    return batch.values


def test_draws_for_a_batch_of_the_datasets_own_type_do_not_depend_on_workers() -> None:
    class OfOneType(Drawing):
        def __getitems__(self, indices: list[int]) -> CustomBatch:
            return CustomBatch([random.random() for _ in indices])

    def batches(num_workers: int) -> list[Any]:
        with ShmLoader(OfOneType(), 4, num_workers=num_workers, seed=1, collate_fn=values_of) as loader:
            return list(loader)

    expected = batches(0)
    assert len({value for batch in expected for value in batch}) == 12
    assert batches(1) == batches(3) == expected


class DeadlyOnce:
    """A dataset of whole batches that drops the first sample of each; the worker that reads sample 0 is killed once."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: list[int]) -> list[int]:
        if 5 in indices and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return indices[1:]


def test_batch_of_a_killed_worker_is_what_the_dataset_returns_for_it(tmp_path: Path) -> None:
    dataset: Any = DeadlyOnce(tmp_path / "mark")
    with ShmLoader(dataset, 4, seed=1, num_workers=1, collate_fn=list) as loader:
        batches = list(loader)
    assert (tmp_path / "mark").exists()
    assert batches == [[1, 2, 3], [5, 6, 7], [9, 10, 11]]


def test_dataset_without_draws_is_still_read_at_once() -> None:
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
def test_sample_rng_without_an_index_is_refused_when_reading_several(num_workers: int) -> None:
    class AsksWithoutIndex(InBatches):
        def read_batch_into(self, indices: Any, out: Any) -> None:
            out["draw"][...] = sample_rng().random(len(indices))

    with pytest.raises(
        RuntimeError, match=r"needs an index in read_batch_into, which reads several samples at once: call sample_rng\(index\)"
    ):
        draws(AsksWithoutIndex(), 4, num_workers)
    with ShmLoader(AsksWithoutIndex(), 4, num_workers=num_workers) as loader:  # type: ignore[arg-type]  # torch mode has no sample keys
        assert len(list(loader)) == 3


class HasBadText:
    """Whole batches with text; one sample cannot be read."""

    schema: ClassVar = {"text": str, "x": "int64"}

    def __len__(self) -> int:
        return 12

    def read_batch_into(self, indices: Any, out: Any) -> None:
        if 1 in indices:
            raise SampleError("this one is spoilt")
        out["text"] = [f"t{index}" for index in indices]
        out["x"][...] = indices


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_only_the_bad_sample_among_text_is_skipped(num_workers: int) -> None:
    with ShmLoader(HasBadText(), 3, seed=1, num_workers=num_workers, on_error="skip") as loader:  # type: ignore[arg-type]
        assert [batch["x"].tolist() for batch in loader] == [[0, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize(("dataset", "is_variable"), [(Drawing(), True), (DrawingRows(), False)])
def test_loader_shows_whether_its_batches_have_fixed_rows(dataset: Any, is_variable: bool) -> None:
    with ShmLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork") as loader:
        list(loader)
        assert (" slots, variable batches" in repr(loader)) == is_variable
