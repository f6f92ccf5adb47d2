"""Attributes of a loader: those locked after construction, those that can be set between epochs, and the effect."""

from __future__ import annotations

import copy
import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import (
    DEADLINE_S,
    KINDS,
    ErrorSummary,
    Failing,
    Numbers,
    Shards,
    as_list,
    batches,
    raised,
    same_as_torch,
)
from tests.matrix.versions import TORCH

NEEDS_TORCH_2_10 = pytest.mark.skipif(TORCH < (2, 10), reason="older releases have another error, or none")

IGNORE_ERRORS_IN_DEL = pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
LOCKED = ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]


@pytest.mark.parametrize("name", LOCKED)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_setting_a_locked_attribute_is_an_error(name: str, num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(), num_workers=num_workers)
        return raised(lambda: setattr(loader, name, getattr(loader, name)))

    text = f"{name} attribute should not be set after DataLoader is initialized"
    assert ErrorSummary(ValueError, text, text) == same_as_torch(program)


def test_error_names_the_users_subclass() -> None:
    class UserLoader(ShmLoader):
        pass

    with pytest.raises(ValueError, match="dataset attribute should not be set after UserLoader is initialized"):
        UserLoader(Numbers()).dataset = []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_workers", 0),
        ("num_workers", 1),
        ("num_workers", 3),
        ("prefetch_factor", 1),
        ("prefetch_factor", 5),
        ("collate_fn", as_list),
        ("timeout", DEADLINE_S),
        ("worker_init_fn", int),
        ("multiprocessing_context", "fork"),
        ("multiprocessing_context", None),
        ("generator", None),
        pytest.param(
            *("pin_memory_device", "cuda"),
            marks=pytest.mark.skipif(TORCH < (2, 9), reason="older releases warn that it has no effect without pin_memory"),
        ),
    ],
)
def test_attribute_set_between_epochs_is_used_by_the_next(name: str, value: Any) -> None:
    def who(index: Any) -> Any:
        return index, get_worker_info() is not None and get_worker_info().num_workers

    class Workers(Numbers):
        def __getitem__(self, index: int) -> Any:
            return who(index)

    def program(kind: Any) -> Any:
        loader = kind(Workers(4), num_workers=2, batch_size=2, shuffle=True)
        first = batches(loader)
        setattr(loader, name, value)
        return first, batches(loader), type(getattr(loader, name))

    same_as_torch(program)


@pytest.mark.parametrize("name", ["collate_fn", "num_workers", "prefetch_factor"])
def test_attribute_set_while_workers_persist_has_no_effect(name: str) -> None:
    value = {"collate_fn": as_list, "num_workers": 3, "prefetch_factor": 4}[name]

    def program(kind: Any) -> Any:
        loader = kind(Numbers(4), num_workers=2, batch_size=2, persistent_workers=True)
        first = batches(loader)
        setattr(loader, name, value)
        return first, batches(loader)

    assert same_as_torch(program)[1] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("seed", [None, 3])
def test_workers_added_later_have_the_default_prefetch_factor(seed: int | None) -> None:
    """In torch, this loader raises TypeError, because its prefetch_factor is None."""
    with ShmLoader(Numbers(4), seed=seed) as loader:
        loader.num_workers = 1
        assert batches(loader) == [[0], [1], [2], [3]]
        assert loader.stats()["num_slots"] == 4


@NEEDS_TORCH_2_10
@IGNORE_ERRORS_IN_DEL
@pytest.mark.parametrize("iterable", [False, True], ids=["map", "iterable"])
def test_prefetch_factor_none_is_an_error_at_iteration(iterable: bool) -> None:
    dataset = Shards([1]) if iterable else Numbers()
    error = same_as_torch(lambda kind: raised(lambda: next(iter(kind(dataset, num_workers=1, prefetch_factor=0)))))
    assert error.first == "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"


@NEEDS_TORCH_2_10
def test_timeout_without_workers_is_an_error_at_iteration() -> None:
    error = same_as_torch(lambda kind: raised(lambda: iter(kind(Numbers(), timeout=1))))
    assert error.kind is AssertionError
    assert error.first == "_SingleProcessDataLoaderIter requires timeout == 0"


@pytest.mark.parametrize("num_workers", [1.5, 1.0])
def test_non_integer_num_workers_is_an_error_before_iteration(num_workers: float) -> None:
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):  # torch waits until then, and does not name it
        next(iter(DataLoader(Numbers(), num_workers=num_workers)))  # type: ignore[arg-type]  # the error is the test
    with pytest.raises(TypeError, match=f'num_workers must be an integer of at least 0 or "auto"; got {num_workers} of type float'):
        ShmLoader(Numbers(), num_workers=num_workers)  # type: ignore[call-overload]  # the error is the test


@KINDS
def test_setting_an_invalid_context_is_an_error(kind: Any) -> None:
    loader = kind(Numbers(), num_workers=1)
    with pytest.raises(ValueError, match="should specify a valid start method"):
        loader.multiprocessing_context = "boil"
    with pytest.raises(TypeError, match="should be a valid context object"):
        loader.multiprocessing_context = 1
    loader.num_workers = 0
    with pytest.raises(ValueError, match="can only be used with multi-process loading"):
        loader.multiprocessing_context = "fork"


@KINDS
def test_context_given_by_name_is_returned_as_an_object(kind: Any) -> None:
    loader = kind(Numbers(4), num_workers=1, multiprocessing_context="fork")
    assert isinstance(loader.multiprocessing_context, multiprocessing.context.ForkContext)
    assert len(batches(loader)) == 4
    given = multiprocessing.get_context("fork")
    loader = kind(Numbers(4), num_workers=1, multiprocessing_context=given)
    assert given is loader.multiprocessing_context
    assert len(batches(loader)) == 4


def test_torchs_own_context_is_accepted() -> None:
    context = torch.multiprocessing.get_context("fork")
    assert same_as_torch(lambda kind: batches(kind(Numbers(3), num_workers=1, multiprocessing_context=context))) == [[0], [1], [2]]


def test_attributes_added_by_the_user_are_kept() -> None:
    def program(kind: Any) -> Any:
        loader = kind(Failing(ValueError("no")))
        loader.color = "red"
        return loader.color, loader.dataset.n

    assert same_as_torch(program) == ("red", 8)


FIXED = {
    "shuffle": True,
    "seed": 4,
    "seed_samples": False,
    "uneven": "drop",
    "ring_bytes": 1 << 20,
    "max_restarts": 3,
    "on_error": "skip",
    "max_bad": 3,
    "sample_timeout_s": 3,
    "ragged": "pad",
    "snapshot_every_n_steps": 4,
    "threads_per_worker": 2,
    "backend": "thread",
    "share": "node",
    "audit": "logs",
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", FIXED)
def test_argument_that_would_be_ignored_cannot_be_set_later(name: str, seed: int | None) -> None:
    """Otherwise a loader shows a value that no part of it follows. This holds for copies, too."""
    with ShmLoader(Numbers(4), 2, seed=seed) as loader, copy.copy(loader) as twin:
        for each in (loader, twin):
            with pytest.raises(
                ValueError, match=rf"^{name} cannot be set to {FIXED[name]!r} after .* make a new one with this {name}"
            ):
                setattr(each, name, FIXED[name])
        assert len(list(loader)) == 2


@pytest.mark.parametrize("name", ["num_workers", "prefetch_factor", "worker_init_fn"])
def test_attribute_set_in_seed_mode_acts_from_the_next_pass_on(name: str) -> None:
    value = {"num_workers": 3, "prefetch_factor": 4, "worker_init_fn": as_list}[name]
    with ShmLoader(Numbers(8), 2, seed=1, num_workers=2) as loader:
        first = batches(loader)
        slots = loader.stats()["num_slots"]
        setattr(loader, name, value)
        assert batches(loader) == first
        assert loader.stats()["num_slots"] == {"num_workers": 8, "prefetch_factor": 10}.get(name, slots)


@pytest.mark.parametrize(("name", "value"), [("batch_size", 4), ("drop_last", True)])
def test_batch_sampler_that_seed_mode_does_not_read_must_not_be_changed(name: str, value: Any) -> None:
    """Torch's loader follows such a change in its next pass; batches of the old size would be wrong without an error."""
    with ShmLoader(Numbers(7), 2, seed=1) as loader:
        assert len(batches(loader)) == 4
        setattr(loader.batch_sampler, name, value)
        words = rf"^batch_sampler.{name} was set to {value}, but with seed= .* make a new loader with {name}={value}$"
        with pytest.raises(ValueError, match=words):
            iter(loader)


def test_batch_sampler_may_be_changed_in_torch_mode() -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(7), 2)
        loader.batch_sampler.batch_size = 4
        return batches(loader)

    assert [len(batch) for batch in same_as_torch(program)] == [4, 3]
