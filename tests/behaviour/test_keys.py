"""The dataset gets exactly what a sampler yields: types, identity of batches, order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import WORKERS, Numbers, as_list, batches, outcomes, raised, same_as_torch


class Keys(Numbers):
    """A dataset whose samples are the type and value of their key."""

    def __getitem__(self, key: Any) -> Any:
        return type(key).__name__, str(key)


class KeyBatches(Keys):
    """The same for whole batches."""

    def __getitems__(self, keys: Any) -> Any:
        return [(type(keys).__name__, type(key).__name__, str(key)) for key in keys]


TUPLE = (1, "a")
SAMPLERS: dict[str, Any] = {
    "int": [3, 1, 2],
    "text": ["a", "bc", ""],
    "mixed": [1, "a", None],
    "tuple": [TUPLE, (2, "b")],
    "large": [2**63, -(2**70), 5],
    "float": [1.0, 2.5],
    "slice": [slice(0, 2), slice(2, 4)],
    "dict": [{"a": 1}, {"b": 2}],
    "range": range(4),
    "bytes": [b"a", b"b"],
}
INT_LIKE_KEYS = {  # keys that behave like ints
    "bool": [True, False],
    "numpy int": list(np.arange(3)),
    "numpy array": np.arange(3),
    "numpy int32": list(np.arange(3, dtype=np.int32)),
    "tensor": torch.arange(3),
    "0-d tensors": [torch.tensor(2), torch.tensor(0)],
}


def differs(reason: str) -> Any:
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize(("name", "num_workers"), [(name, 0) for name in SAMPLERS] + [(name, 2) for name in SAMPLERS])
def test_keys_of_a_sampler_reach_the_dataset(name: str, batch_size: int | None, num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Keys(), sampler=SAMPLERS[name], batch_size=batch_size, num_workers=num_workers, collate_fn=as_list)
        return outcomes(iter(loader))

    same_as_torch(program)


@WORKERS
@pytest.mark.parametrize("name", INT_LIKE_KEYS)
def test_int_like_keys_keep_their_type(name: str, num_workers: int) -> None:
    def program(kind: Any) -> Any:
        return batches(kind(Keys(), sampler=INT_LIKE_KEYS[name], batch_size=2, num_workers=num_workers, collate_fn=as_list))

    same_as_torch(program)


BATCHES: dict[str, Any] = {
    "lists": [[1, 2], [3]],
    "tuples": [(1, 2), (3,)],
    "texts": ["ab", "c"],
    "ranges": [range(2), range(2, 5)],
    "empty": [[], [1]],
    "arrays": [np.arange(2), np.arange(3)],
    "tensors": [torch.arange(2)],
    "dicts": [{"a": 1, "b": 2}],
    "sets": [{5}],
    "ragged": [[1], [1, 2, 3, 4, 5, 6, 7, 8, 9], [], [2, 2]],
    "a size for each": [[(1, 224), (2, 224)], [(3, 96)]],
}


@pytest.mark.parametrize(("name", "num_workers"), [(name, 0) for name in BATCHES] + [(name, 2) for name in BATCHES])
def test_batches_of_a_batch_sampler_reach_the_dataset_key_by_key(name: str, num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Keys(), batch_sampler=BATCHES[name], num_workers=num_workers, collate_fn=as_list)
        return len(loader), outcomes(iter(loader))

    same_as_torch(program)


@pytest.mark.parametrize(("name", "num_workers"), [(name, 0) for name in BATCHES] + [(name, 2) for name in BATCHES])
def test_getitems_gets_the_batch_of_the_batch_sampler(name: str, num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(KeyBatches(), batch_sampler=BATCHES[name], num_workers=num_workers)
        return outcomes(iter(loader))

    same_as_torch(program)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_getitems_is_also_called_with_a_collate_fn(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(KeyBatches(), batch_size=2, num_workers=num_workers, collate_fn=as_list)
        return outcomes(iter(loader))

    assert same_as_torch(program)[0] == [("list", "int", "0"), ("list", "int", "1")]


@WORKERS
def test_error_for_an_empty_batch_is_torchs(num_workers: int) -> None:
    same_as_torch(lambda kind: outcomes(iter(kind(Numbers(), batch_sampler=[[0], [], [1]], num_workers=num_workers))))


class Columns(Numbers):
    """Returns a batch's keys, and their container's type, from `__getitems__`."""

    def __getitems__(self, keys: Any) -> Any:
        return {"keys": [int(key) for key in keys], "type": type(keys).__name__}


@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}, {"seed": 3}], ids=["torch", "skip", "seed"])
@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
@WORKERS
def test_getitems_makes_the_empty_batches_too(num_workers: int, kind: Any, options: dict[str, Any]) -> None:
    sampler: Any = [kind(keys) for keys in ([], [0, 1], [], [2])]

    def program(loader: Any) -> Any:
        given = options if loader is ShmLoader else {}
        return outcomes(iter(loader(Columns(), batch_sampler=sampler, num_workers=num_workers, collate_fn=as_list, **given)))

    expected = program(DataLoader)
    assert [batch["keys"] for batch in expected] == [[], [0, 1], [], [2]]
    assert program(ShmLoader) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["torch", "seed"])
def test_empty_batch_of_getitems_without_collate_fn_is_torchs_error(options: dict[str, Any], num_workers: int) -> None:
    class Lists(Numbers):
        def __getitems__(self, keys: Any) -> Any:
            return [torch.tensor(key) for key in keys]

    with ShmLoader(Lists(), batch_sampler=[[0, 1], [], [2]], num_workers=num_workers, **options) as loader:
        first, error, last = outcomes(iter(loader))
    assert (first, error.kind, last) == ([0, 1], IndexError, [2])


class Slices(Numbers):
    """Has no use for single keys, like a dataset whose batches are parts of a table."""

    def __getitems__(self, keys: slice) -> list[int]:
        return list(range(self.n)[keys])


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("num_workers", "backend"), [(0, "process"), (1, "process"), (2, "process"), (2, "thread")])
def test_slices_of_a_batch_sampler_reach_getitems(num_workers: int, backend: str, seed: int | None) -> None:
    slices: Any = [slice(0, 3), slice(3, 4), slice(4, 8)]

    def program(kind: Any) -> Any:
        given = {"seed": seed, "backend": backend} if kind is ShmLoader else {}
        return batches(kind(Slices(8), batch_sampler=slices, num_workers=num_workers, **given))

    assert program(ShmLoader) == program(DataLoader) == [[0, 1, 2], [3], [4, 5, 6, 7]]


# in seed mode, an array of a sampler's keys is not one of indices that the loader has made
ARRAYS = {name: np.array([3, 1, 2]).astype(name) for name in ("int64", "int32", "uint8", "float64", ">i8", "object", "U2")}


@pytest.mark.parametrize("kind", [Keys, KeyBatches])
@pytest.mark.parametrize(("num_workers", "backend"), [(0, "process"), (1, "process"), (2, "thread")])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_a_batch_sampler_reach_the_dataset_in_seed_mode(name: str, num_workers: int, backend: Any, kind: Any) -> None:
    given: Any = [ARRAYS[name], ARRAYS[name][:2]]
    expected = outcomes(iter(DataLoader(kind(), batch_sampler=given, collate_fn=as_list)))
    with ShmLoader(kind(), batch_sampler=given, collate_fn=as_list, num_workers=num_workers, seed=3, backend=backend) as loader:
        assert outcomes(iter(loader)) == expected


@WORKERS
def test_generator_as_sampler_is_exhausted(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(), sampler=(i for i in range(5)), batch_size=2, num_workers=num_workers)
        return batches(loader), batches(loader)

    assert same_as_torch(program) == ([[0, 1], [2, 3], [4]], [])


@WORKERS
def test_loader_of_a_sampler_without_length_has_none(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(), sampler=iter(range(5)), batch_size=2, num_workers=num_workers)
        return raised(lambda: len(loader)), batches(loader)

    assert same_as_torch(program)[0].kind is TypeError


class NoLength:
    """A dataset without a length."""

    def __getitem__(self, index: int) -> int:
        if index > 4:
            raise IndexError(index)
        return index


@WORKERS
@pytest.mark.parametrize("shuffle", [False, True])
def test_dataset_without_length_fails_when_torchs_does(num_workers: int, shuffle: bool) -> None:
    same_as_torch(lambda kind: raised(lambda: next(iter(kind(NoLength(), num_workers=num_workers, shuffle=shuffle)))))
    same_as_torch(lambda kind: outcomes(iter(kind(NoLength(), sampler=range(7), num_workers=num_workers))))


@WORKERS
def test_dict_of_ints_can_be_a_dataset(num_workers: int) -> None:
    dataset = {i: 10 * i for i in range(5)}
    assert same_as_torch(lambda kind: batches(kind(dataset, batch_size=2, num_workers=num_workers)))[1] == [20, 30]
    same_as_torch(lambda kind: outcomes(iter(kind({"a": 1}, num_workers=num_workers))))


@pytest.mark.parametrize(
    ("how", "num_workers"), [(how, num_workers) for how in ("none", "short", "long", "tuple", "raises") for num_workers in (0, 2)]
)
def test_getitems_that_returns_something_else_is_handled_as_by_torch(how: str, num_workers: int) -> None:
    class AnyResult(Numbers):
        def __getitems__(self, keys: Any) -> Any:
            if how == "raises":
                raise KeyError("batch")
            return {"none": None, "short": keys[1:], "long": [*keys, 0], "tuple": tuple(keys)}[how]

    def program(kind: Any) -> Any:
        return outcomes(iter(kind(AnyResult(6), batch_size=2, num_workers=num_workers)))

    same_as_torch(program)


@WORKERS
def test_getitems_set_to_none_is_not_called(num_workers: int) -> None:
    class Disabled(Numbers):
        __getitems__ = None

    assert same_as_torch(lambda kind: batches(kind(Disabled(3), batch_size=2, num_workers=num_workers))) == [[0, 1], [2]]


@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}, {"backend": "thread"}])
@pytest.mark.parametrize("order", [SequentialSampler, RandomSampler])
def test_batch_sampler_as_sampler_gives_the_dataset_lists(order: Any, options: dict[str, Any]) -> None:
    def program(kind: Any) -> Any:
        torch.manual_seed(0)
        own = {} if kind is DataLoader else options
        return batches(kind(Keys(), batch_size=None, sampler=BatchSampler(order(range(5)), 2, False), num_workers=2, **own))

    assert [name for name, _ in same_as_torch(program)] == ["list"] * 3


@WORKERS
def test_batch_sampler_as_sampler_gives_the_dataset_lists_in_seed_mode(num_workers: int) -> None:
    sampler = BatchSampler(SequentialSampler(range(5)), 2, False)
    with ShmLoader(Keys(), batch_size=None, sampler=sampler, num_workers=num_workers, seed=3) as loader:
        assert list(loader) == [["list", "[0, 1]"], ["list", "[2, 3]"], ["list", "[4]"]]


@WORKERS
def test_getitems_is_not_called_without_batches(num_workers: int) -> None:
    class Refusing(Numbers):
        def __getitems__(self, keys: Any) -> Any:
            raise AssertionError("called")

    assert same_as_torch(lambda kind: batches(kind(Refusing(3), batch_size=None, num_workers=num_workers))) == [0, 1, 2]


@WORKERS
def test_samplers_subclassed_or_changed_by_the_user_are_used(num_workers: int) -> None:
    class Backwards(SequentialSampler):
        def __iter__(self) -> Any:
            return iter(range(len(self) - 1, -1, -1))

    class Halves(BatchSampler):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch[: len(batch) // 2]

    def program(kind: Any) -> Any:
        changed = RandomSampler(Numbers(7))
        loader = kind(Numbers(7), sampler=changed, batch_size=3, num_workers=num_workers)
        changed.generator = torch.Generator().manual_seed(8)
        loader.batch_sampler.drop_last = True
        return (
            batches(kind(Numbers(7), sampler=Backwards(Numbers(7)), batch_size=3, num_workers=num_workers)),
            batches(kind(Numbers(9), batch_sampler=Halves(range(8), 4, False), num_workers=num_workers)),
            batches(loader),
        )

    same_as_torch(program)
