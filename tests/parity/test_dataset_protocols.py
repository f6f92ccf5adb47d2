"""Whatever a dataset returns is collated as torch's DataLoader without workers collates it.

The cases combine dataset protocols, kinds of samples, collate functions, modes and numbers of workers. In seed mode torch's
loader gets the batches of indices that the seed determines. All combinations are read without workers. With workers, the cases
take turns with the collate functions, so that each protocol and each kind of sample meets each function; the random crossings draw
the other combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from shmload import SampleError, ShmLoader
from tests.parity.test_against_torch import equal

pytestmark = pytest.mark.filterwarnings("ignore")  # advice on workers and held batches, which other tests check
slow = pytest.mark.slow(reason="hundreds of loaders, some of which start workers")
N, BATCH_SIZE, SEED = 10, 4, 3


class Box:
    """A sample that torch's collate refuses unless a function is registered for it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


class Batch:
    """A batch in a type of the dataset's own, like TensorDict: it has rows and something more."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __getitem__(self, row: int) -> Any:
        return self.samples[row]

    def __len__(self) -> int:
        return len(self.samples)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and equal(other.samples, self.samples)

    __hash__ = None  # type: ignore[assignment]


SAMPLES: dict[str, Callable[[int], Any]] = {
    "int": lambda i: i,
    "float": lambda i: i / 2,
    "array": lambda i: np.full(3, i, np.float32),
    "tensor": lambda i: torch.full((2,), i),
    "text": lambda i: f"sample {i}",
    "dict": lambda i: {"x": np.full(2, i), "y": i / 2, "name": f"{i}"},
    "numbers": lambda i: {"x": np.full(2, i), "y": i / 2},
    # two pairs of fields whose paths are the same text
    "paths": lambda i: {"a.b": np.int64(i), "a": {"b": torch.full((2, 3), i + 9).t()}, 1: np.float32(i), "1": np.float32(-i)},
    "pair": lambda i: (torch.full((2,), i), i),
    "named": lambda i: (f"{i}", {"x": i}),
}
WORDS = {"text", "dict", "named"}
GETITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda samples: samples,
    "fewer": lambda samples: samples[1:],
    "more": lambda samples: [*samples, samples[0]],
    "empty": lambda samples: [],
    "none": lambda samples: None,
    "tuple": tuple,
    "tensor": lambda samples: torch.stack([torch.as_tensor(sample) for sample in samples]),
    "array": np.stack,
    "objects": lambda samples: np.array([*samples, None], object)[:-1],
    "dict": lambda samples: {"x": samples},
    "object": Batch,
    "generator": iter,
}


class SingleSamples:
    """A dataset that reads sample by sample."""

    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class WithGetItems(SingleSamples):
    """A dataset with `__getitems__`."""

    def __init__(self, sample: Callable[[int], Any], make: Callable[[list[Any]], Any]) -> None:
        super().__init__(sample)
        self.make = make

    def __getitems__(self, indices: list[int]) -> Any:
        return self.make([self.sample(index) for index in indices])


class DividedIterable(IterableDataset[Any]):
    """An iterable dataset that is divided among workers."""

    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample = sample

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.sample, range(first, N, step))


def dataset_of(protocol: str, sample: str) -> Any:
    if protocol == "one":
        return SingleSamples(SAMPLES[sample])
    if protocol == "iterable":
        return DividedIterable(SAMPLES[sample])
    return WithGetItems(SAMPLES[sample], GETITEMS[protocol])


def identity(batch: Any) -> Any:
    return batch


def custom(batch: Any) -> Any:
    return {"of": type(batch).__name__, "n": len(batch), "first": batch[0]}


COLLATE: dict[str, Any] = {"default": None, "identity": identity, "custom": custom}


def registered(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a function for torch's registry; its result also shows the type in which it got the values."""
    return lambda batch, *, collate_fn_map: (type(batch).__name__, change(batch))


FUNCTIONS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "int": (int, registered(lambda batch: torch.tensor(list(batch), dtype=torch.int32))),
    "float": (float, registered(lambda batch: torch.tensor(list(batch), dtype=torch.float32))),
    "array": (np.ndarray, registered(lambda batch: torch.from_numpy(np.stack(list(batch))) + 1)),
    "tensor": (torch.Tensor, lambda batch, *, collate_fn_map: torch.stack(tuple(batch)) + 1),
    "text": (str, registered(" ".join)),
    "dict": (dict, registered(list)),
    "tuple": (tuple, registered(list)),
    "object": (object, registered(len)),
    "own class": (Box, registered(len)),
}


def outcomes(loader: Any) -> list[Any]:
    """Returns each batch, or the type of its error."""
    found: list[Any] = []
    iterator = iter(loader)
    for _ in range(N):
        try:
            found.append(next(iterator))
        except StopIteration:
            break
        except Exception as error:
            found.append(type(error))
    return found


def check(dataset: Any, num_workers: int, mode: str, **options: Any) -> None:
    """Compares ShmLoader with torch's loader, which has no workers, or as many if the dataset is iterable and divided among them."""
    if mode == "seed":
        with ShmLoader(range(N), options["batch_size"], shuffle=True, seed=SEED, collate_fn=identity) as loader:
            order = list(loader)
        collate_fn = options.get("collate_fn")
        if options["batch_size"] is None:
            expected = outcomes(DataLoader(dataset, batch_size=None, sampler=order, collate_fn=collate_fn))
        else:
            expected = outcomes(DataLoader(dataset, batch_sampler=order, collate_fn=collate_fn))
        options |= {"seed": SEED, "shuffle": True}
    else:
        workers = num_workers if isinstance(dataset, IterableDataset) else 0
        expected = outcomes(DataLoader(dataset, num_workers=workers, **options))
    with ShmLoader(dataset, num_workers=num_workers, **options) as loader:
        got = outcomes(loader)
    if num_workers and any(isinstance(batch, GeneratorType) for batch in expected):
        assert set(got) == {SampleError}  # a generator cannot leave the process that created it
    else:
        assert len(expected) == len(got), (expected, got)
        for one_expected, one_got in zip(expected, got, strict=True):
            assert equal(one_expected, one_got), (one_expected, one_got)


def rows(protocols: Any, samples: Any) -> list[tuple[str, str, str]]:
    """Returns the possible combinations with a mode; an iterable dataset has no indices that a seed could order."""
    return [
        (protocol, sample, mode)
        for protocol, sample, mode in itertools.product(protocols, samples, ("torch", "seed"))
        if not (protocol in ("tensor", "array") and sample in {*WORDS, "numbers", "paths", "pair"})
        and not (protocol == "objects" and sample not in ("int", "float", "text"))
        and not (protocol == "iterable" and mode == "seed")
    ]


QUICK = [("fewer", "int"), ("more", "numbers"), ("tuple", "text"), ("tensor", "tensor"), ("object", "array"), ("none", "int")]
modes = pytest.mark.parametrize("mode", ["torch", "seed"])


@modes
@pytest.mark.parametrize(("protocol", "sample"), QUICK)
def test_what_a_dataset_returns_is_collated_as_by_torch(protocol: str, sample: str, mode: str) -> None:
    for collate_fn in COLLATE.values():
        check(dataset_of(protocol, sample), 1, mode, batch_size=BATCH_SIZE, collate_fn=collate_fn)


PROTOCOLS = ("one", "iterable", *GETITEMS)
SINGLE = ("one", "iterable", "list")  # without batches, `__getitems__` is not called: one of these protocols stands for all


def in_turn(protocol: str, sample: str, mode: str) -> str:
    """Returns the name of the collate function with which a case is read by workers."""
    return [*COLLATE][(PROTOCOLS.index(protocol) + [*SAMPLES].index(sample) + (mode == "seed")) % len(COLLATE)]


@slow
@pytest.mark.parametrize(("protocol", "sample", "mode"), rows(PROTOCOLS, SAMPLES))
def test_every_protocol_is_collated_as_by_torch(protocol: str, sample: str, mode: str) -> None:
    dataset = dataset_of(protocol, sample)
    for name, collate_fn in COLLATE.items():
        for num_workers in (0, 2) if name == in_turn(protocol, sample, mode) else (0,):
            check(dataset, num_workers, mode, batch_size=BATCH_SIZE, collate_fn=collate_fn)
    for num_workers, collate_fn in itertools.product((0, 2) if protocol in SINGLE else (0,), (None, identity)):
        check(dataset, num_workers, mode, batch_size=None, collate_fn=collate_fn)


@pytest.mark.parametrize("name", COLLATE)
def test_workers_read_every_protocol_and_every_kind_of_sample_with_each_collate_function(name: str) -> None:
    read = [row for row in rows(PROTOCOLS, SAMPLES) if in_turn(*row) == name]
    assert {protocol for protocol, _, _ in read} == set(PROTOCOLS)
    assert {sample for _, sample, _ in read} == set(SAMPLES)


@modes
@pytest.mark.parametrize(
    ("function", "sample"), [("int", "int"), ("float", "numbers"), ("array", "array"), ("tensor", "pair"), ("tensor", "array")]
)
def test_registered_function_collates_builtin_types(function: str, sample: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, registered_function = FUNCTIONS[function]
    monkeypatch.setitem(default_collate_fn_map, kind, registered_function)
    for num_workers in (0, 1):
        check(SingleSamples(SAMPLES[sample]), num_workers, mode, batch_size=BATCH_SIZE)


@modes
def test_registered_function_collates_rows_of_a_tensor_dataset(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, *FUNCTIONS["tensor"])
    for num_workers in (0, 1):
        check(TensorDataset(torch.arange(2 * N).reshape(N, 2)), num_workers, mode, batch_size=BATCH_SIZE)


CONTAINED = {  # sample -> the functions of FUNCTIONS that are for types in it
    "int": {"int"},
    "float": {"float"},
    "array": {"array"},
    "tensor": {"tensor"},
    "text": {"text"},
    "dict": {"dict", "array", "float", "text"},
    "numbers": {"dict", "array", "float"},
    "paths": {"dict", "tensor"},
    "pair": {"tuple", "tensor", "int"},
    "named": {"tuple", "text", "dict", "int"},
}


@slow
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("protocol", "sample", "mode"), rows(["one", "iterable", "tuple", "tensor"], SAMPLES))
def test_every_registered_function_is_used(
    protocol: str, sample: str, function: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts workers where the function is for a type that is collated or, registered for `object`, for all other types."""
    kind, registered_function = FUNCTIONS[function]
    monkeypatch.setitem(default_collate_fn_map, kind, registered_function)
    is_called = function in {"object", protocol, *CONTAINED[sample]}
    for num_workers in (0, 2) if is_called else (0,):
        check(dataset_of(protocol, sample), num_workers, mode, batch_size=BATCH_SIZE)
