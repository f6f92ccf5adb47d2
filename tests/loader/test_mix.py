"""A Mix read by a loader: shares, ends, ranks, states, and what cannot be mixed."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import chain
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shmload import Mix, ShmLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers


class Numbers:
    """The numbers from `first` on, `size` of them."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.first + index


class InPlace(Numbers):
    schema: ClassVar = {"x": "int64"}

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = self[index]


def mix_of(kind: type[Numbers] = Numbers, **options: Any) -> Mix:
    return Mix([(kind(0, 120), 0.6), (kind(1000, 60), 0.3), (kind(2000, 15), 0.1)], **options)


def loader_of(mix: Mix, batch_size: int = 10, **options: Any) -> ShmLoader[Any]:
    return ShmLoader(mix, batch_size, **{"shuffle": True, "seed": 7, **options})


def values(batches: Any) -> list[list[int]]:
    return [(batch["x"] if isinstance(batch, dict) else batch).tolist() for batch in batches]


@pytest.mark.parametrize("kind", [Numbers, InPlace])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_do_not_depend_on_workers(kind: type[Numbers], num_workers: int) -> None:
    with loader_of(mix_of(kind)) as loader, loader_of(mix_of(kind), num_workers=num_workers) as other:
        expected = [values(loader), values(loader)]
        assert expected == [values(other), values(other)]
    assert expected[0] != expected[1]
    shares = Counter(value // 1000 for batch in expected[0] for value in batch)
    assert (shares[0], shares[1], shares[2]) == (90, 45, 15)  # until the smallest member is exhausted


def test_every_batch_has_its_shares() -> None:
    with loader_of(mix_of(stop="repeat"), 10) as loader:
        for _, batch in zip(range(40), loader, strict=False):
            shares = Counter(value // 1000 for value in batch.tolist())
            assert all(abs(shares[member] - share) <= 1 for member, share in enumerate((6, 3, 1)))


@pytest.mark.slow(reason="kills two workers, which are replaced")
def test_killed_worker_changes_nothing() -> None:
    with loader_of(mix_of()) as loader:
        expected = values(loader)
    with loader_of(mix_of(), num_workers=2) as loader:
        iterator = iter(loader)
        got = values([next(iterator) for _ in range(3)])
        for process in loader._builder.last.pool.processes:  # the pool is not None after the first batch
            process.kill()
        assert expected == got + values(iterator)


@pytest.mark.parametrize("stop", ["first", "all", "repeat"])
def test_stop_rule_ends_the_epoch(stop: Any) -> None:
    with loader_of(mix_of(stop=stop)) as loader:
        if stop == "repeat":
            with pytest.raises(TypeError, match='a Mix with stop="repeat" never ends'):
                len(loader)
            assert sum(1 for _ in zip(range(100), loader, strict=False)) == 100
            return
        seen = [value for batch in values(loader) for value in batch]
        assert len(loader) == {"first": 15, "all": 20}[stop]
        if stop == "first":
            assert len(set(seen)) == len(seen)
        else:
            assert set(seen) == {int(value) for value in DataLoader(mix_of())}


@pytest.mark.parametrize("worlds", [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_state_resumes_on_any_world_size(worlds: tuple[int, int]) -> None:
    def ranks(world_size: int) -> list[ShmLoader[Any]]:
        return [loader_of(mix_of(stop="all"), 12 // world_size, rank=rank, world_size=world_size) for rank in range(world_size)]

    def merged(iterators: list[Any]) -> list[list[int]]:
        return [sorted(chain.from_iterable(values(parts))) for parts in zip(*iterators, strict=True)]

    expected = merged([iter(loader) for loader in ranks(1)])
    saving = ranks(worlds[0])
    iterators = [iter(loader) for loader in saving]
    for _ in range(7):
        for iterator in iterators:
            next(iterator)
    state = json.loads(json.dumps(saving[0].state_dict()))
    assert sum(state["counters"]) == state["position"] == 84
    assert len(json.dumps(state)) < 1024
    resumed = ranks(worlds[1])
    for loader in resumed:
        loader.load_state_dict(state)
    assert expected[7:-1] == merged([iter(loader) for loader in resumed])[:-1]  # the last is padded to equal ranks


def test_weights_change_at_a_step() -> None:
    mix = Mix([(Numbers(0, 5000), 1), (Numbers(10_000, 5000), 0)], stop="repeat", curriculum={5: [1, 1], 10: [0, 1]})
    with loader_of(mix, 10) as loader:
        shares = [sum(value >= 10_000 for value in batch) for batch in values(b for _, b in zip(range(15), loader, strict=False))]
    assert shares == [0] * 5 + [5] * 5 + [10] * 5


def test_nested_mix_is_flattened() -> None:
    inner = Mix([(Numbers(1000, 600), 2), (Numbers(2000, 600), 1)])
    mix = Mix([(Numbers(0, 600), 1), (inner, 3)])
    assert mix.weights == [1, 2, 1]
    with loader_of(mix, 8) as loader:
        assert Counter(value // 1000 for value in values([next(iter(loader))])[0]) == {0: 2, 1: 4, 2: 2}


def test_member_of_names_the_member_of_a_sample() -> None:
    mix = mix_of()
    with loader_of(mix) as loader:
        for batch in loader:
            assert [value // 1000 for value in batch.tolist()] == [mix.member_of(i) for i in loader.last_indices]  # type: ignore[union-attr]  # not None once a batch has come


def test_orders_are_not_sent_to_workers() -> None:
    mix = mix_of()
    with loader_of(mix) as loader:
        next(iter(loader))
    sent = pickle.dumps(mix)
    assert len(sent) < 1500
    assert list(mix) == list(pickle.loads(sent))


def test_unshuffled_members_are_read_in_their_order() -> None:
    with loader_of(mix_of(), shuffle=False) as loader:
        seen = [value for batch in values(loader) for value in batch]
    assert [value for value in seen if value < 1000] == list(range(90))


def test_torch_reads_a_mix_as_its_members_end_to_end() -> None:
    expected = [*range(120), *range(1000, 1060), *range(2000, 2015)]
    assert expected == [int(value) for value in DataLoader(mix_of())]
    assert expected == [int(value) for value in ShmLoader(mix_of(), sampler=range(195))]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


A, B = Numbers(0, 10), Numbers(10, 10)


@pytest.mark.parametrize(
    ("members", "options", "error", "words"),
    [
        ([], {}, ValueError, "at least one"),
        ([A], {}, TypeError, "pairs of a map-style dataset and its weight; member 0"),
        ([(A, 1), (Stream(), 1)], {}, TypeError, "member 1 of the Mix, of type Stream, has no length"),
        ([(A, -1)], {}, ValueError, "finite weights of 0 or more; got -1"),
        ([(A, float("nan"))], {}, ValueError, "got nan"),
        ([(A, float("inf"))], {}, ValueError, "got inf"),
        ([(A, "1")], {}, ValueError, "got '1'"),
        ([(A, 0), (B, 0)], {}, ValueError, "a weight above 0; all 2 are 0"),
        ([(A, 1), (Numbers(0, 0), 1)], {}, ValueError, "member 1 of the mixture has a weight, but no samples"),
        ([(A, 1)], {"stop": "last"}, ValueError, 'stop is "first", "all" or "repeat"; got \'last\''),
        ([(A, 1)], {"curriculum": {0: [1]}}, ValueError, "the weights from a step on, and steps count from 1; got 0"),
        ([(A, 1)], {"curriculum": {3: [1, 1]}}, ValueError, "step 3 of the curriculum needs 1 weights"),
        ([(A, 1), (B, 1)], {"stop": "all", "curriculum": {1: [0, 1]}}, ValueError, "which member 0 never will"),
        ([(A, 1), (Mix([(B, 1)], curriculum={5: [2]}), 1)], {}, ValueError, "member 1 is a Mix with a curriculum"),
    ],
)
def test_invalid_mix_is_refused_with_the_reason(
    members: list[Any], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Mix(members, **options)


def test_member_without_a_length_is_named() -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(TypeError, match="member 0 of the Mix, of type Endless, has no length"):
        Mix([(Endless(), 1)])  # type: ignore[list-item]  # must be refused


def test_torch_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="Mix defines its own order, which only seed mode uses"):
        ShmLoader(mix_of())


def test_growing_member_makes_a_longer_epoch() -> None:
    growing = Numbers(0, 10)
    mix = Mix([(growing, 1)], stop="all")
    with loader_of(mix, 5) as loader:
        assert sum(map(len, loader)) == 10
        growing.size = 20
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(20))
