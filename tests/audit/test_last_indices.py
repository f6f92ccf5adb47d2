"""`loader.last_indices`: the sample indices of the last yielded batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from shmload import ShmLoader
from tests.audit.audit_kit import Samples, verdict_of

BOTH_MODES = pytest.mark.parametrize("seed", [None, 7], ids=["torch mode", "seed mode"])
PAIRS = [(i, -i) for i in range(11)]


@BOTH_MODES
@pytest.mark.parametrize("more", [{}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}], ids=str)
def test_last_indices_are_those_of_the_last_batch(seed: int | None, more: dict[str, Any]) -> None:
    with ShmLoader(PAIRS, 3, shuffle=True, seed=seed, **more) as loader:
        assert loader.last_indices is None
        for numbers, _ in loader:
            assert isinstance(loader.last_indices, np.ndarray)
            assert np.int64 == loader.last_indices.dtype
            assert numbers.tolist() == loader.last_indices.tolist()


@BOTH_MODES
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_last_indices_include_skipped_and_substituted_samples(seed: int | None, on_error: Any) -> None:
    loader = ShmLoader(Samples(12, frozenset({1, 5})), 3, seed=seed, on_error=on_error)
    for batch in loader:
        assert loader.last_indices is not None
        assert batch["index"].tolist() == list(loader.last_indices)


class InPlace:
    schema: ClassVar = {"x": "float32"}

    def __len__(self) -> int:
        return 8

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = index


@BOTH_MODES
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"sampler": np.array([0, 1])}, {"sampler": torch.tensor([0, 1])}, {"batch_sampler": [[0, 1]]}],
    ids=["default", "numpy", "torch", "batch sampler"],
)
def test_integers_are_an_array_wherever_they_come_from(options: dict[str, Any], num_workers: int, seed: int | None) -> None:
    for dataset in (InPlace(), PAIRS):
        given: dict[str, Any] = options if "batch_sampler" in options else {"batch_size": 2, **options}
        with ShmLoader(dataset, num_workers=num_workers, seed=seed, **given) as loader:
            next(iter(loader))
            assert isinstance(loader.last_indices, np.ndarray)
            assert (np.int64, [0, 1]) == (loader.last_indices.dtype, loader.last_indices.tolist())


@BOTH_MODES
@pytest.mark.parametrize("num_workers", [0, 2])
def test_keys_of_a_sampler_are_unchanged(seed: int | None, num_workers: int) -> None:
    data = {"a": 1, "b": 2, ("c", 3): 4}
    with ShmLoader(data, batch_sampler=[["a", ("c", 3)], ["b"]], seed=seed, num_workers=num_workers) as loader:
        assert [loader.last_indices for _ in loader] == [["a", ("c", 3)], ["b"]]


@BOTH_MODES
def test_unbatched_sample_has_one_key(seed: int | None) -> None:
    loader = ShmLoader(PAIRS[:2], None, seed=seed)
    assert [list(loader.last_indices) for _ in loader] == [[0], [1]]  # type: ignore[arg-type]  # not None after the first batch


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterable_dataset_has_no_indices(num_workers: int) -> None:
    with ShmLoader(Stream(), 2, num_workers=num_workers) as loader:
        assert [loader.last_indices for _ in loader] == [None] * 3


def test_batches_skipped_on_resume_are_neither_reported_nor_recorded(tmp_path: Path) -> None:
    options = {"snapshot_every_n_steps": 0, "shuffle": True}
    first = ShmLoader(PAIRS, 2, audit=tmp_path, **options)
    stream = iter(first)
    for _ in range(3):
        next(stream)
    second = ShmLoader(PAIRS, 2, audit=tmp_path, **options)
    second.load_state_dict(first.state_dict())
    resumed = iter(second)
    assert second.last_indices is None
    list(resumed)
    report = verdict_of(tmp_path)
    assert (report.status, report.loaders[0].epochs[0].num_batches, report.loaders[0].epochs[0].num_superseded) == (0, 6, 0)
