"""A subclass of a dataset that decodes in place: what it overrides is used, as in torch's DataLoader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, DataLoader, Subset

from shmload import ShmLoader
from shmload.formats import ArrayDataset
from shmload.pipeline import Items

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
