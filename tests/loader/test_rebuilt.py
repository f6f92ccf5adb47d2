"""Libraries rebuild a loader from its public attributes, which must be exactly its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from shmload import ShmLoader

DATA = TensorDataset(torch.arange(20))
ARGUMENTS = set(inspect.signature(ShmLoader.__init__).parameters) - {"self"}


def halves(samples: list[Any]) -> Any:
    return torch.stack([x for (x,) in samples]) / 2


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True, "num_workers": 1},
    "seeded": {"seed": 3, "shuffle": True, "num_workers": 2, "prefetch_factor": 3},
    "policies": {"seed": 3, "on_error": "skip", "max_bad": 2, "uneven": "exact", "num_workers": 1, "max_restarts": 1},
    "ragged": {"ragged": {"0": "list"}, "seed_samples": False, "seed": 1},
    "automatic": {"num_workers": "auto", "prefetch_factor": "auto", "seed": 1},
    "collated": {"collate_fn": halves, "drop_last": True, "in_order": False},
    "threads": {"threads_per_worker": 2, "num_workers": 1, "seed": 1},
}


def names_of(loader: Any) -> set[str]:
    """Returns the public attributes of a loader; torch's own name for its context does not count."""
    return {name for name in vars(loader) if not name.startswith("_")}


@pytest.mark.parametrize("case", CASES)
def test_public_attributes_are_the_arguments(case: str) -> None:
    with ShmLoader(DATA, 4, **CASES[case]) as loader:
        assert names_of(loader) <= ARGUMENTS
        assert [name for name in ARGUMENTS if not hasattr(loader, name)] == []
        for name, value in CASES[case].items():
            if value != "auto":
                assert getattr(loader, name) == value


@pytest.mark.parametrize("case", CASES)
def test_loader_is_rebuilt_with_another_batch_sampler(case: str) -> None:
    """Ignite rebuilds it so: with all attributes but those that a batch_sampler replaces."""
    said_by_sampler = {"batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind"}
    with ShmLoader(DATA, 4, **CASES[case]) as loader:
        given = {name: getattr(loader, name) for name in names_of(loader) - said_by_sampler}
        with type(loader)(**given, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, False)) as again:
            batches = list(again)
    rebuilt = {name: getattr(again, name) for name in given}
    assert rebuilt == given
    assert len(batches) == 4


def test_loader_is_rebuilt_from_all_arguments(tmp_path: Path) -> None:
    """Lightning rebuilds it so: with every argument by name."""
    with ShmLoader(DATA, 4, seed=5, shuffle=True, num_workers=1, audit=tmp_path, uneven="drop") as loader:
        mine = ARGUMENTS - {"sampler", "batch_sampler"}
        with ShmLoader(**{name: getattr(loader, name) for name in mine}) as again:
            assert [batch[0].tolist() for batch in again] == [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize("make", [DataLoader, ShmLoader])
def test_torchs_loader_has_the_same_attributes(make: Callable[..., Any]) -> None:
    theirs = names_of(DataLoader(DATA, 4)) & ARGUMENTS
    assert theirs <= names_of(make(DATA, 4))
