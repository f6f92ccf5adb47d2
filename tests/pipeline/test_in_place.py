"""Pipelines that only select samples let the dataset decode into the batch, and the items stay the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from shmload import ShmLoader, sample_rng
from shmload.formats import ImageDecoder, ImageFolder, RandomResizedCrop
from shmload.pipeline import (
    BatchMap,
    Cache,
    Collate,
    Conveyer,
    DistributedBatchedMap,
    Enumerate,
    Items,
    Map,
    Partition,
    Repeat,
    Shuffle,
    Skip,
    Take,
    Window,
)
from shmload.pipeline.in_place import ChosenProgram
from tests.pipeline import chosen_items as chosen

PLACES: dict[str, Callable[[], list[Any]]] = {
    "in order": list,
    "shuffled": lambda: [Shuffle()],
    "the first": lambda: [Take(10), Shuffle(7)],
    "the last": lambda: [Skip(4), Shuffle()],
    "twice": lambda: [Repeat(2), Shuffle()],
    "for ever": lambda: [Shuffle(3), Repeat()],
}


def same(item: Any) -> Any:
    return item


def plain(batch: Any) -> Any:
    """Returns the batch with lists instead of arrays and tensors, and their types."""
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(part) for part in batch]
    return (str(batch.dtype), batch.tolist()) if isinstance(batch, np.ndarray | torch.Tensor) else batch


def rows(batch: Any) -> Any:
    """Returns the rows of a `plain` batch. Item by item, a ragged field is stacked if all its rows happen to have one shape."""
    if isinstance(batch, dict):
        return {name: rows(part) for name, part in batch.items()}
    return [(batch[0], row) for row in batch[1]] if isinstance(batch, tuple) else batch


def two_epochs(stages: list[Any], **options: Any) -> list[Any]:
    """Returns the batches of two epochs, or 20 of an endless pipeline."""
    with Conveyer(stages, **options) as pipeline:
        if pipeline.is_endless:
            return [plain(pipeline()) for _ in range(20)]
        return [plain(batch) for _ in range(2) for batch in pipeline]


def decodes_in_place(stages: list[Any]) -> bool:
    return type(Conveyer(stages).plan.program) is ChosenProgram


# ------------------------------------------------------------ the same as ShmLoader, and as item by item


@pytest.mark.parametrize("kind", chosen.FORMATS)
def test_every_format_equals_shmloader(kind: str, tmp_path: Path) -> None:
    if kind in chosen.NEEDED:
        pytest.importorskip(chosen.NEEDED[kind])
    dataset = chosen.FORMATS[kind](tmp_path)
    with ShmLoader(dataset, batch_size=5, seed=3, num_workers=0) as loader:
        expected = [(type(batch), plain(batch)) for batch in loader]
    with Items(dataset).batch(5).conveyer() as pipeline:
        assert [(type(batch), plain(batch)) for batch in pipeline] == expected


@pytest.mark.parametrize("kind", chosen.FORMATS)
def test_every_format_equals_item_by_item(kind: str, tmp_path: Path) -> None:
    if kind in chosen.NEEDED:
        pytest.importorskip(chosen.NEEDED[kind])
    dataset = chosen.FORMATS[kind](tmp_path)
    stages = [Items(dataset, repeating=False), Skip(1), Repeat(2), Shuffle(5)]
    assert decodes_in_place([*stages, Collate(4)])
    in_place, one_by_one = two_epochs([*stages, Collate(4)]), two_epochs([*stages, Map(same), Collate(4)])
    assert [rows(batch) for batch in in_place] == [rows(batch) for batch in one_by_one]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("in_place", "one_by_one"),
    [
        (chosen.Into, chosen.Drawing),
        (chosen.Getting, chosen.Drawing),
        (chosen.ByIndexInto, chosen.ByIndex),
        (chosen.ByIndexGetting, chosen.ByIndex),
    ],
)
def test_draws_of_items_stay_the_same(in_place: Any, one_by_one: Any, place: str) -> None:
    expected = two_epochs([Items(one_by_one()), *PLACES[place](), Map(same), Collate(4)])
    assert two_epochs([Items(in_place()), *PLACES[place](), Collate(4)]) == expected
    drawn = [x for batch in expected for x in batch["drawn"][1]]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.slow(reason="starts workers")
@pytest.mark.parametrize("in_place", [chosen.Into, chosen.Getting, chosen.ByIndexInto, chosen.ByIndexGetting])
def test_draws_of_items_in_workers_stay_the_same(in_place: Any) -> None:
    stages = [*PLACES["twice"](), Collate(16)]
    expected = two_epochs([Items(in_place()), *stages])
    assert two_epochs([Items(in_place(), n_workers=2), *stages]) == expected


def test_random_crops_stay_the_same(tmp_path: Path) -> None:
    folder = ImageFolder(chosen.write_images(tmp_path), ImageDecoder(RandomResizedCrop(8)))
    stages = [Items(folder), Shuffle(), Collate(6)]
    batches = two_epochs(stages)
    assert batches == two_epochs([*stages[:-1], Map(same), stages[-1]])
    assert batches[0] != batches[4], "crops differ in the second epoch"


@pytest.mark.parametrize("indices", [list(range(20, 0, -3)), [2, 5, 2, 2, 9, 5], np.arange(4, 19)])
@pytest.mark.parametrize("kind", [(chosen.ByIndexInto, chosen.ByIndex), (chosen.Into, chosen.Drawing)])
def test_subset_draws_as_item_by_item(indices: Any, kind: Any) -> None:
    in_place, one_by_one = (Subset(made(), indices) for made in kind)
    expected = two_epochs([Items(one_by_one), Shuffle(1), Repeat(), Map(same), Collate(4)])
    assert two_epochs([Items(in_place), Shuffle(1), Repeat(), Collate(4)]) == expected


def test_batch_with_a_repeated_sample_is_read_row_by_row() -> None:
    dataset = chosen.ByIndexInto()
    with Conveyer([Items(dataset), Repeat(2), Collate(chosen.N + 5)]) as pipeline:
        batches = [plain(batch) for batch in pipeline]
    assert dataset.num_batches == chosen.N + 5 + 1, "the second batch repeats no sample"
    with Conveyer([Items(chosen.ByIndex()), Repeat(2), Map(same), Collate(chosen.N + 5)]) as pipeline:
        assert batches == [plain(batch) for batch in pipeline]


# ------------------------------------------------------------ when the dataset decodes in place


def test_dataset_decodes_in_place_unless_items_are_changed() -> None:
    dataset = chosen.Into()
    assert decodes_in_place([Items(dataset), Shuffle(), Partition(0, 2), Collate(4)])
    assert decodes_in_place([Items(dataset), Take(5), Skip(1), Repeat(), Collate(4), Map(same)])
    for stages in (
        [Items(dataset), Collate(4), BatchMap(same)],
        [Items(dataset), Map(same), Collate(4)],
        [Items(dataset), Window(2), Collate(4)],
        [Items(dataset), Enumerate(), Collate(4)],
        [Items(dataset), Cache(), Collate(4)],
        [Items(dataset), Shuffle()],
    ):
        assert not decodes_in_place(stages)


def test_ranks_and_resumes_also_decode_in_place() -> None:
    def made(rank: int, world: int) -> Conveyer:
        return Conveyer([Items(chosen.Into()), Shuffle(), Partition(rank, world), Collate(12 // world)])

    with made(0, 1) as alone:
        expected = [x for batch in alone for x in zip(batch["x"].tolist(), batch["drawn"].tolist(), strict=True)]
    with made(0, 2) as first:
        first()
        state = json.loads(json.dumps(first.state()))
    got: list[Any] = []
    for rank in range(3):
        with made(rank, 3) as pipeline:
            pipeline.load_state(state)
            for batch in pipeline:
                got += list(zip(batch["x"].tolist(), batch["drawn"].tolist(), strict=True))[: pipeline.valid]
    assert sorted(got) == sorted(expected[12:])


@pytest.mark.slow(reason="starts workers")
def test_items_can_start_workers(tmp_path: Path) -> None:
    dataset = chosen.images(tmp_path)
    with Conveyer([Items(dataset, n_workers=2), Collate(4)]) as pipeline:
        batches = [plain(batch) for batch in pipeline]
        assert len(pipeline.stats()["workers"]) == 2
    assert batches == [plain(batch) for batch in Items(dataset).batch(4)]
    with Conveyer([Items(["a", "b"], n_workers=1), DistributedBatchedMap(same, 1)]) as pipeline:
        assert list(pipeline) == ["a", "b"]
        assert len(pipeline.stats()["workers"]) == 2
    with pytest.raises(ValueError, match=r"Items\(n_workers\) must be an integer from 0 to 16000; got -1"):
        Items(["a"], n_workers=-1)


class Drawn:
    """A number for each index; before it is drawn, the dataset calls `read`, which may read batches of other loaders."""

    schema = {"x": np.int64}

    def __init__(self, read: Callable[[], None] = lambda: None) -> None:
        self.read = read

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it reads batches")

    def read_batch_into(self, indices: Any, out: Any) -> None:
        self.read()
        out["x"] = [int(sample_rng(index).integers(1000)) for index in indices]


@pytest.mark.parametrize("is_chosen", [False, True])
def test_nested_reads_draw_the_same_as_alone(is_chosen: bool) -> None:
    def numbers(read: Callable[[], None] = lambda: None, seed: int = 3) -> list[int]:
        with Conveyer([Items(Drawn(read)), Shuffle(seed), Collate(3)]) as pipeline:
            return [x for batch in pipeline for x in batch["x"].tolist()]

    def inner() -> list[int]:
        return numbers(seed=4) if is_chosen else [x for batch in ShmLoader(Drawn(), 3, seed=1) for x in batch["x"].tolist()]

    found: list[list[int]] = []
    assert numbers(lambda: found.append(inner())) == numbers()
    assert len(found) >= 2  # more often if batches are read again one by one
    assert all(each == inner() for each in found)


# ------------------------------------------------------------ errors


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize("kind", [chosen.Broken, chosen.BrokenInto, chosen.BrokenGetting])
def test_error_names_the_sample_that_cannot_be_read(kind: Any, n_workers: int) -> None:
    with Conveyer([Items(kind(), n_workers=n_workers), Skip(2), Collate(4)]) as pipeline:
        assert pipeline()["x"].tolist() == [2, 3, 4, 5]
        with pytest.raises(ValueError, match="no sample") as caught:
            pipeline()
        assert pipeline()["x"].tolist() == [10, 11, 12, 13]
    assert "shmload: item 7 of epoch 0" in str(caught.value) + "".join(caught.value.__notes__)


@pytest.mark.parametrize("kind", [chosen.Broken, chosen.BrokenInto, chosen.BrokenGetting])
def test_bad_samples_can_be_skipped(kind: Any) -> None:
    with Conveyer([Items(kind()), Collate(4)], on_error="skip") as pipeline:
        assert [batch["x"].tolist() for batch in pipeline][:3] == [[0, 1, 2, 3], [4, 5, 6], [8, 9, 10, 11]]


class KeyedByIndex:
    """A dataset that reads several samples at once, with a random number of each by its index."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, sample_rng(index).random()) for index in indices]


def test_subset_of_a_dataset_that_reads_several_samples_draws_by_keys() -> None:
    def numbers(dataset: Any) -> list[Any]:
        with Items(dataset, repeating=True).batch(3).conveyer() as pipeline:
            return [pipeline()[1].tolist() for _ in range(3)]

    class Three(KeyedByIndex):
        def __len__(self) -> int:
            return 3

    expected = numbers(Three())
    assert len({value for batch in expected for value in batch}) == 9
    for indices in ([3, 5, 7], [1, 2, 0], [4, 4, 4]):
        assert numbers(Subset(KeyedByIndex(), indices)) == expected
    assert numbers(Subset(Subset(KeyedByIndex(), [8, 6, 4, 2]), [1, 2, 3])) == expected
