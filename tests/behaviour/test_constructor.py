"""The constructor accepts, keeps and rejects the same arguments as torch's."""

from __future__ import annotations

import inspect
import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import KINDS, ErrorSummary, Numbers, Shards, Sized, as_list, raised, same_as_torch
from tests.behaviour.conftest import set_cores

INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "negative workers": ({"num_workers": -1}, "num_workers option should be non-negative"),
    "negative timeout": ({"timeout": -1}, "timeout option should be non-negative"),
    "negative prefetch": ({"prefetch_factor": -1, "num_workers": 1}, "prefetch_factor option should be non-negative"),
    "prefetch without workers": ({"prefetch_factor": 2}, "prefetch_factor option could only be specified in"),
    "prefetch 0 without workers": ({"prefetch_factor": 0}, "prefetch_factor option could only be specified in"),
    "persistent without workers": ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
    "sampler and shuffle": ({"sampler": [0], "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
    "batches and a size": ({"batch_sampler": [[0]], "batch_size": 2}, "batch_sampler option is mutually exclusive"),
    "batches and size None": ({"batch_sampler": [[0]], "batch_size": None}, "batch_sampler option is mutually"),
    "batches and shuffle": ({"batch_sampler": [[0]], "shuffle": True}, "batch_sampler option is mutually exclusive"),
    "batches and sampler": ({"batch_sampler": [[0]], "sampler": [0]}, "batch_sampler option is mutually exclusive"),
    "batches and drop_last": ({"batch_sampler": [[0]], "drop_last": True}, "batch_sampler option is mutually"),
    "no batches to drop": ({"batch_size": None, "drop_last": True}, "batch_size=None option disables auto-batching"),
    "unknown context": ({"multiprocessing_context": "boil", "num_workers": 1}, "multiprocessing_context option"),
    "context without workers": ({"multiprocessing_context": "fork"}, "multiprocessing_context can only be used with"),
    "an int as context": ({"multiprocessing_context": 3, "num_workers": 1}, "multiprocessing_context option should be"),
    "a module as context": ({"multiprocessing_context": multiprocessing, "num_workers": 1}, "multiprocessing_context"),
    "size 0": ({"batch_size": 0}, "batch_size should be a positive integer value"),
    "negative size": ({"batch_size": -2}, "batch_size should be a positive integer value"),
    "a float as size": ({"batch_size": 2.0}, "batch_size should be a positive integer value"),
    "a bool as size": ({"batch_size": True}, "batch_size should be a positive integer value"),
    "an int as drop_last": ({"drop_last": 1}, "drop_last should be a boolean value"),
    "text as workers": ({"num_workers": "2"}, "'<' not supported"),
    "workers None": ({"num_workers": None}, "'<' not supported"),
    "text as timeout": ({"timeout": "2"}, "'<' not supported"),
    "timeout None": ({"timeout": None}, "'<' not supported"),
}


@pytest.mark.parametrize(("options", "words"), INVALID.values(), ids=INVALID)
def test_error_for_arguments_that_torch_rejects_is_torchs(options: dict[str, Any], words: str) -> None:
    error = same_as_torch(lambda kind: raised(lambda: kind(Numbers(), **options)))
    assert (error is None) == (words == "")
    assert error is None or error.first.startswith(words)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": 1}, {"sampler": [0]}, {"batch_sampler": [[0]]}])
def test_iterable_dataset_with_a_sampler_is_an_error(options: dict[str, Any]) -> None:
    error = same_as_torch(lambda kind: raised(lambda: kind(Shards([1]), **options)))
    assert isinstance(error, ErrorSummary)
    assert error.kind is ValueError
    assert error.first.startswith(f"DataLoader with IterableDataset: expected unspecified {next(iter(options))} option")


def test_iterable_dataset_accepts_shuffle_false() -> None:
    assert same_as_torch(lambda kind: list(kind(Shards([1]), shuffle=False))) == [[1]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dataset", [None, 3, []], ids=repr)
def test_empty_dataset_fails_when_torchs_does(dataset: Any, shuffle: bool) -> None:
    same_as_torch(lambda kind: raised(lambda: list(kind(dataset, shuffle=shuffle))))


@KINDS
def test_fourteenth_positional_argument_is_an_error(kind: Any) -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        kind(Numbers(), 1, None, None, None, 0, None, False, False, 0, None, None, None, 2)


def test_names_order_kinds_and_defaults_of_arguments_are_torchs() -> None:
    torchs = inspect.signature(DataLoader).parameters.values()
    ours = list(inspect.signature(ShmLoader).parameters.values())[: len(torchs)]
    assert [(p.name, p.kind, p.default) for p in torchs] == [(p.name, p.kind, p.default) for p in ours]


def test_every_positional_argument_becomes_its_attribute() -> None:
    sampler, init, context = [0, 1], print, multiprocessing.get_context("fork")
    given = (Numbers(), 2, None, sampler, None, 1, as_list, False, True, 5, init, context, torch.Generator())
    loader, torchs = ShmLoader(*given), DataLoader(*given)
    names = list(inspect.signature(DataLoader).parameters)
    for name, value in zip(names, given, strict=False):
        if name not in ("shuffle", "batch_sampler"):  # torch does not keep the first, and converts the second
            assert value is getattr(torchs, name) is getattr(loader, name), name
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert vars(torchs).keys() <= vars(loader).keys()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 1, "prefetch_factor": 5, "persistent_workers": True, "in_order": False},
        {"batch_size": None},
        {"batch_sampler": [[1, 2]]},
        {"shuffle": True, "drop_last": True, "batch_size": 3},
        {"pin_memory": True, "pin_memory_device": "cuda"},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ],
    ids=str,
)
def test_attributes_after_construction_equal_torchs(options: dict[str, Any]) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(), **options)
        named = inspect.signature(DataLoader).parameters.keys() - {"dataset", "generator", "shuffle"}
        return {
            name: value if isinstance(value := getattr(loader, name), (int, str, type(None), list)) else type(value)
            for name in sorted(named)
        } | {"sampler type": type(loader.sampler), "collate": getattr(loader.collate_fn, "__qualname__", None)}

    same_as_torch(program)


def test_sampler_is_not_read_before_iteration() -> None:
    class Watched(SequentialSampler):
        num_asked = 0

        def __iter__(self) -> Any:
            Watched.num_asked += 1
            return super().__iter__()

    ShmLoader(Numbers(), sampler=Watched(Numbers()), num_workers=2)
    assert Watched.num_asked == 0


def test_loader_is_a_generic_dataloader() -> None:
    assert issubclass(ShmLoader, DataLoader)
    assert isinstance(ShmLoader(Numbers()), DataLoader)
    assert isinstance(ShmLoader[int](Numbers()), ShmLoader)
    assert ShmLoader[int].__origin__ is ShmLoader


@pytest.mark.parametrize("dataset", [Numbers(), Shards([1]), Sized(1, [1])], ids=["map", "iterable", "sized"])
def test_truth_value_of_a_loader_is_torchs(dataset: Any) -> None:
    def program(kind: Any) -> Any:
        loader = kind(dataset)
        return raised(lambda: bool(loader)) or bool(loader)

    same_as_torch(program)


def test_more_workers_than_cores_give_torchs_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cores(monkeypatch, 1)

    def program(kind: Any) -> Any:
        loader = kind(Numbers(4), num_workers=2, batch_size=2)
        return list(loader)

    assert same_as_torch(program, num_warnings=2) == [[0, 1], [2, 3]]
    with pytest.warns(UserWarning, match="will create 2 worker processes in total. Our suggested max number of worker"):
        ShmLoader(Numbers(), num_workers=2)
