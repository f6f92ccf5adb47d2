"""A subclass of a dataset or an order of the package: what it overrides is used, as in torch's DataLoader, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, DataLoader, Subset

from shmload import BlockShuffle, LengthBuckets, Mix, ShmLoader, Weighted
from shmload.formats import ArrayDataset
from shmload.pipeline import Items
from shmload.remote import RemoteDataset
from shmload.remote.indexed import RemoteRecords
from tests.remote.remote_kit import write_packed

MODES = pytest.mark.parametrize("options", [{}, {"seed": 1}, {"num_workers": 1}], ids=["torch mode", "seed mode", "a worker"])


class Augmented(ArrayDataset):
    """Overrides how a sample is made."""

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index)["x"] * 10, "index": index}


class AtOnce(ArrayDataset):
    """Overrides how samples are made together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"x": self[index]["x"] * 10, "index": index} for index in indices]


class Plain:
    """Decodes in place by both methods, of which the second calls the first."""

    schema = {"x": "int64"}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"x": np.int64(index)}

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = index

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["x"][...] = indices


class InPlace(Plain):
    """Overrides one method of decoding."""

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = 10 * index


class Both(InPlace):
    """Overrides a sample and its decoding."""

    def __getitem__(self, index: int) -> Any:
        return {"x": np.int64(100 * index)}

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = 100 * index


def values(loader: Any) -> list[dict[str, list[Any]]]:
    return [{name: column.tolist() for name, column in batch.items()} for batch in loader]


@MODES
@pytest.mark.parametrize(
    "wrap",
    [lambda data: data, lambda data: Subset(data, [3, 1, 2]), lambda data: ConcatDataset([data, data])],
    ids=["bare", "subset", "concat"],
)
@pytest.mark.parametrize("kind", [Augmented, AtOnce])
def test_overridden_sample_is_read_as_by_torch(kind: type[ArrayDataset], wrap: Any, options: dict[str, Any]) -> None:
    dataset = wrap(kind({"x": np.arange(4.0)}))
    expected = values(DataLoader(dataset, 2))
    with ShmLoader(dataset, 2, **options) as loader:
        assert values(loader) == expected
        assert "read by __getitem" in repr(loader)


@MODES
@pytest.mark.parametrize(("kind", "factor"), [(Plain, 1), (InPlace, 10), (Both, 100)])
def test_overridden_decoding_is_used(kind: type[Plain], factor: int, options: dict[str, Any]) -> None:
    with ShmLoader(kind(), 4, **options) as loader:
        assert values(loader) == [{"x": [factor * index for index in range(4)]}]
        assert f"read by {'read_batch_into' if kind is Plain else 'read_into'}" in repr(loader)


def test_overridden_sample_is_read_in_a_pipeline() -> None:
    batches = list(Items(Augmented({"x": np.arange(4.0)})).batch(2))
    assert [batch["x"].tolist() for batch in batches] == [[0.0, 10.0], [20.0, 30.0]]


class TenfoldMix(Mix):
    def __getitem__(self, index: Any) -> Any:
        return {"x": super().__getitem__(index)["x"] * 10}


class ReadsLists(list[Any]):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@MODES
@pytest.mark.parametrize("member", [ArrayDataset({"x": np.arange(4.0)}), ReadsLists({"x": float(x)} for x in range(4))])
def test_overridden_sample_of_a_mix_is_used(member: Any, options: dict[str, Any]) -> None:
    order = {} if "seed" in options else {"sampler": range(4)}
    with ShmLoader(TenfoldMix([(member, 1)]), 4, **{**order, **options}) as loader:
        assert values(loader) == [{"x": [0.0, 10.0, 20.0, 30.0]}]


def test_mix_with_overridden_samples_cannot_be_a_member_of_a_mix() -> None:
    with pytest.raises(TypeError, match="member 0, a TenfoldMix, overrides how the samples of a Mix are made"):
        Mix([(TenfoldMix([([1, 2], 1)]), 1)])


def test_overridden_sample_of_remote_records_is_used(tmp_path: Path) -> None:
    np.save(tmp_path / "numbers.npy", np.arange(6))

    class Tenfold(RemoteRecords):
        def __getitem__(self, index: int) -> Any:
            return {"x": super().__getitem__(index)["data"] * 10}

    view: Any = RemoteDataset(None, str(tmp_path)).indexed()
    view.__class__ = Tenfold
    assert values(ShmLoader(view, 3)) == [{"x": [0, 10, 20]}, {"x": [30, 40, 50]}]


class FirstOfBlocks(BlockShuffle):
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, self.n, self.block_size))


class HalfAsLong(Weighted):
    def __len__(self) -> int:
        return self.n // 2


class Reversed(LengthBuckets):
    def __iter__(self) -> Iterator[list[int]]:
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    ("order", "method", "instead"),
    [
        ({"sampler": FirstOfBlocks(8, block_size=2)}, "__iter__", "take"),
        ({"sampler": HalfAsLong([1.0] * 8)}, "__len__", "n"),
        ({"batch_sampler": Reversed([1, 2, 3, 4, 5, 6, 7, 8], batch_size=2)}, "__iter__", "batch"),
    ],
    ids=["block shuffle", "length", "batches"],
)
def test_order_with_an_overridden_method_that_seed_mode_does_not_call_is_refused(
    order: dict[str, Any], method: str, instead: str
) -> None:
    with pytest.raises(
        TypeError, match=f"overrides {method}, which seed mode does not call.* Override {instead}, or leave out seed"
    ):
        ShmLoader(range(8), seed=1, **order)
    loader = ShmLoader(range(8), **order)
    assert len(list(loader)) == (4 if method == "__iter__" else 8)


def test_overridden_iteration_of_a_remote_dataset_is_used_or_refused(tmp_path: Path) -> None:
    write_packed(tmp_path, [4])

    class Labels(RemoteDataset):
        def __iter__(self) -> Iterator[int]:
            return (int(sample["cls"]) for sample in super().__iter__())

    dataset = Labels(None, str(tmp_path), shuffle=False)
    assert [batch.tolist() for batch in ShmLoader(dataset, 2)] == [[0, 1], [2, 3]]
    refused = re.escape("Labels overrides __iter__, which is not called when items are read by number")
    with pytest.raises(TypeError, match=refused):
        ShmLoader(dataset, 2, seed=1)
    with pytest.raises(TypeError, match=refused):
        Items(dataset)
