"""A sample's generator begins at the start of its key's stream, whatever used it before."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, IterableDataset

from shmload import ShmLoader
from shmload._core.permutation import sample_key_pair
from shmload._core.twister import LEAST_INDEX, index_of
from shmload.worker import own_generators
from shmload.worker.sample_rng import begin_sample, end_samples, sample_info, sample_rng


@pytest.fixture(autouse=True)
def no_sample() -> Iterator[None]:
    yield
    end_samples()


def generator_of(index: int) -> np.random.Generator:
    begin_sample(7, 3, index, 0, reseed=False)
    return sample_rng()


def fresh(index: int) -> np.random.Generator:
    """Returns the reference generator: a Philox of the sample's own key."""
    return np.random.Generator(np.random.Philox(key=np.array(sample_key_pair(7, 3, index, 0), np.uint64)))


@pytest.mark.parametrize("is_in_memory", [True, False])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # all examples use the same settings
@given(samples=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=20))
def test_sample_rng_draws_what_a_new_generator_would(
    monkeypatch: pytest.MonkeyPatch, is_in_memory: bool, samples: list[tuple[int, int]]
) -> None:
    assert own_generators._knows_philox() or not is_in_memory
    if not is_in_memory:
        monkeypatch.setattr(own_generators, "_knows_philox", lambda: False)
        generator_of(-1)
        kept = sample_rng()  # so that the next one is searched again
    for index, num_draws in samples:
        rng, expected = generator_of(index), fresh(index)
        for _ in range(num_draws):  # each takes 32 bits, so half a word may be left for the next sample
            assert rng.integers(0, 1000, dtype=np.uint32) == expected.integers(0, 1000, dtype=np.uint32)
        assert rng.normal() == expected.normal()
        del rng
    if not is_in_memory:
        del kept


def test_generator_that_was_kept_is_left_alone() -> None:
    kept = [generator_of(index) for index in range(4)]
    assert [rng.random() for rng in kept] == [fresh(index).random() for index in range(4)]


def test_sample_rng_is_the_same_object_within_a_sample() -> None:
    rng = generator_of(1)
    assert sample_rng() is rng


class Drawn:
    """Samples that are a draw from their own generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return float(sample_rng().normal())


@pytest.mark.parametrize("batch_size", [1, 3])
def test_worker_has_a_generator_for_each_sample(batch_size: int) -> None:
    with ShmLoader(Drawn(), batch_size, num_workers=1, seed=7) as loader:
        drawn = [number for _ in range(2) for batch in loader for number in batch.tolist()]
    keys = [sample_key_pair(7, epoch, index, 0) for epoch in range(2) for index in range(12)]
    assert drawn == [np.random.Generator(np.random.Philox(key=np.array(key, np.uint64))).normal() for key in keys]


def test_beginning_a_sample_makes_no_cyclic_garbage() -> None:
    gc.collect()
    gc.disable()
    try:
        for index in range(3):
            begin_sample(1, 0, index, 0, reseed=False)
            sample_rng().random()
        end_samples()
        assert gc.collect() == 0
    finally:
        gc.enable()


class Nested:
    """Samples that draw, read a batch of another loader whose samples draw, and draw again."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, float]:
        first = sample_rng().random()
        (inner,) = ShmLoader(Drawing(3), 3, seed=9)
        return {"first": first, "second": sample_rng().random(), "inner": float(inner["draw"].sum())}


class Drawing:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"draw": sample_rng().random()}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sample_continues_drawing_after_a_nested_loaders_batch(num_workers: int) -> None:
    with ShmLoader(Nested(), 3, seed=4, num_workers=num_workers) as loader:
        samples = [sample for batch in loader for sample in zip(*(column.tolist() for column in batch.values()), strict=True)]
    found = [list(column) for column in zip(*samples, strict=True)]
    rngs = [np.random.Generator(np.random.Philox(key=np.array(sample_key_pair(4, 0, index, 0), np.uint64))) for index in range(6)]
    assert found[0] == [rng.random() for rng in rngs]
    assert found[1] == [rng.random() for rng in rngs]
    assert len(set(found[2])) == 1


class DrawnFromAll(Drawn):
    """Draws from a sample's own generator and from random, numpy and torch; every third sample has another shape."""

    def __getitem__(self, index: int) -> list[float]:
        drawn = [sample_rng().random(), random.random(), float(np.random.rand()), float(torch.rand(()))]
        return drawn * (1 + (index % 3 == 0))


@pytest.mark.parametrize(
    "options", [{"collate_fn": list}, {"ragged": "list"}, {"batch_sampler": [list(range(6)), list(range(6, 12))], "ragged": "list"}]
)
def test_gathered_samples_draw_what_each_draws_alone(options: dict[str, Any]) -> None:
    alone, data = [], DrawnFromAll()
    with ShmLoader(data, None, num_workers=0, seed=7) as loader:
        alone += [[float(number) for number in sample] for sample in loader]
    options = options if "batch_sampler" in options else {"batch_size": 6, **options}
    with ShmLoader(data, num_workers=1, seed=7, **options) as loader:
        gathered = [[float(number) for number in sample] for batch in loader for sample in batch]
    assert gathered == alone


class Told(Drawing):
    """Each sample's index, the index that sample_info() reports, and draws from the sample's generator, one by one."""

    def __getitem__(self, index: int) -> tuple[int, int, float, float]:
        return index, sample_info().index, float(sample_rng().random()), float(sample_rng().random())


class ToldInPlace(Told):
    schema: ClassVar = {"drawn": ("float64", (4,))}

    def read_into(self, index: int, out: Any) -> None:
        out["drawn"] = np.array(Told.__getitem__(self, index))


class ToldTogether(Told):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, int, float, float]]:
        assert type(indices) is list
        return [self[index] for index in indices]


class ToldStream(Told, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((index, -1, float(sample_rng().random()), float(sample_rng().random())) for index in range(self.size))


TOLD = [Told(7), ToldInPlace(7), ToldTogether(7), ToldStream(7)]
INLINE = pytest.mark.parametrize("data", TOLD, ids=lambda data: type(data).__name__)
BATCH_SIZES = pytest.mark.parametrize("batch_size", [3, None])


def rows_of(batches: Any) -> list[Any]:
    return [
        np.stack([np.asarray(column) for column in batch["drawn" if isinstance(batch, dict) else slice(None)]]) for batch in batches
    ]


def rows_after(data: Any, batch_size: int | None, seed: int, state: Any = None) -> list[list[float]]:
    """Returns the columns of each batch in torch mode without workers, after torch.manual_seed."""
    torch.manual_seed(seed)
    loader = ShmLoader(data, batch_size, num_workers=0, shuffle=None if isinstance(data, IterableDataset) else True)
    if state is not None:
        loader.load_state_dict(state)
    return [row.tolist() for row in rows_of(loader)]


@BATCH_SIZES
@INLINE
def test_torch_seeds_sample_rng_without_workers_and_random_is_left_alone(data: Any, batch_size: int | None) -> None:
    before = random.getstate()
    first, again, other = (rows_after(data, batch_size, seed) for seed in (1, 1, 2))
    assert first == again
    assert np.ravel(first[0])[-1] != np.ravel(other[0])[-1]
    assert random.getstate() == before


@INLINE
def test_sample_rng_continues_in_a_resumed_pass_without_workers(data: Any) -> None:
    whole = rows_after(data, 3, 1)
    torch.manual_seed(1)
    loader = ShmLoader(data, 3, num_workers=0, shuffle=None if isinstance(data, IterableDataset) else True)
    next(iter(loader))
    assert rows_after(data, 3, 5, loader.state_dict()) == whole[1:]


def test_sample_rng_leaves_torchs_order_and_stream_as_they_are_without_workers() -> None:
    found = []
    for loader_class in (ShmLoader, torch.utils.data.DataLoader):
        torch.manual_seed(3)
        data = Told(7) if loader_class is ShmLoader else range(7)
        for _ in range(2):
            batches: Any = loader_class(data, batch_size=3, shuffle=True, num_workers=0)
            found.append([batch[0].tolist() if loader_class is ShmLoader else batch.tolist() for batch in batches])
        found.append(torch.get_rng_state().tolist())
    assert found[:3] == found[3:]


@BATCH_SIZES
def test_sample_info_without_workers_is_that_of_the_sample_in_torch_mode(batch_size: int | None) -> None:
    for row in rows_after(Told(7), batch_size, 1):
        assert row[0] == row[1]
    draws = np.concatenate([np.ravel(row[2:]) for row in rows_after(Told(7), batch_size, 1)])
    assert len(set(draws.tolist())) == 14
    with pytest.raises(RuntimeError, match="can be called only while a ShmLoader reads a sample"):
        sample_info()


def test_empty_batch_has_no_sample_in_torch_mode() -> None:
    class Together:
        def __len__(self) -> int:
            return 4

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [sample_info().index]

    with ShmLoader(Together(), batch_sampler=[[3], [], [2, 1]], num_workers=0) as loader:
        assert [batch.tolist() for batch in loader] == [[3], [-1], [2]]


class DrawsOfKeys(Dataset[Any]):
    """Draws from every generator, whatever the key is."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: Any) -> list[float]:
        return [float(torch.rand(())), random.random(), np.random.rand(), sample_rng().random()]


# kinds of keys -> a function of the index
INTEGERS: dict[str, Any] = {
    "int": int,
    "numpy": np.int64,
    "int16": np.int16,
    "tensor": torch.tensor,
    "tensor of one": lambda index: torch.tensor([index]),
    "0-d array": np.array,
}
OTHERS: dict[str, Any] = {
    "text": str,
    "float": float,
    "tuple": lambda index: ("a", index),
    "list": lambda index: [index, index + 1],
    "slice": lambda index: slice(index, index + 2),
    "tensor": lambda index: torch.tensor([index, 7]),
    "large": lambda index: index + (1 << 70),
    "bytes": lambda index: bytes([index]),
}


def drawn_by_keys(make: Any, *, num_workers: int, backend: Any = "process") -> list[list[float]]:
    sampler: Any = [make(index) for index in range(8)]
    with ShmLoader(DrawsOfKeys(), batch_size=3, sampler=sampler, seed=5, num_workers=num_workers, backend=backend) as loader:
        return [draws for batch in loader for draws in np.transpose([column.tolist() for column in batch]).tolist()]


WAYS = pytest.mark.parametrize(("num_workers", "backend"), [(0, "process"), (2, "process"), (2, "thread")])


@WAYS
@pytest.mark.parametrize("name", INTEGERS)
def test_integer_key_of_any_type_draws_what_its_index_draws(name: str, num_workers: int, backend: str) -> None:
    with ShmLoader(DrawsOfKeys(), batch_size=8, seed=5) as loader:
        expected = np.transpose([column.tolist() for column in next(iter(loader))]).tolist()
    assert drawn_by_keys(INTEGERS[name], num_workers=num_workers, backend=backend) == expected


@WAYS
@pytest.mark.parametrize("name", OTHERS)
def test_other_keys_draw_numbers_of_their_own_which_any_worker_draws(name: str, num_workers: int, backend: str) -> None:
    drawn = drawn_by_keys(OTHERS[name], num_workers=num_workers, backend=backend)
    assert all(len(set(column)) == 8 for column in np.transpose(drawn).tolist())
    assert drawn == drawn_by_keys(OTHERS[name], num_workers=0)


def test_key_that_is_a_list_of_indices_draws_numbers_of_its_own() -> None:
    """A batch sampler as the sampler, with batch_size=None, is torch's way to give a dataset whole batches."""
    sampler = BatchSampler(range(8), 3, False)
    for num_workers in (0, 2):
        with ShmLoader(DrawsOfKeys(), batch_size=None, sampler=sampler, seed=5, num_workers=num_workers) as loader:
            drawn = list(loader)
        assert len({tuple(map(float, draws)) for draws in drawn}) == 3


class Info(DrawsOfKeys):
    def __getitem__(self, key: Any) -> list[float]:
        return list(map(float, sample_info()))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sample_info_has_the_index_of_an_integer_key(num_workers: int) -> None:
    sampler: Any = [np.int64(6), "a", torch.tensor(2), (1, 2), None]
    with ShmLoader(Info(), batch_size=5, sampler=sampler, seed=5, num_workers=num_workers) as loader:
        assert next(iter(loader))[1].tolist() == [6, -1, 2, -1, -1]


@pytest.mark.parametrize(
    "pair", [("1", 1.0), (("a", "bc"), ("ab", "c")), (("a", ("b",)), (("a", "b"),)), ("1", ("1",)), (True, 1.0)]
)
def test_hashes_of_keys_differ(pair: tuple[Any, Any]) -> None:
    first, second = map(index_of, pair)
    assert first != second


def test_hash_of_a_key_is_the_same_in_every_process() -> None:
    assert index_of("cat.jpg") == -(1 << 63) + (int.from_bytes(blake2b(b"scat.jpg", digest_size=8).digest(), "big") >> 2)
    assert index_of(("a", 3)) == index_of(["a", 3]) < LEAST_INDEX
