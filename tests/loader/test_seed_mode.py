"""Seed mode: a batch depends only on the seed, the epoch and its number."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, RandomSampler, Subset, random_split

from shmload import ShmLoader, StateMismatch
from tests.loader.seeded_data import InBatches, InPlace, Noisy, PartialRows, Point, Ragged

slow = pytest.mark.slow(reason="workers start as new interpreters, which import everything again")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers
DATASETS = {"rows": Noisy, "packed": Ragged, "read_into": InPlace, "read_batch_into": InBatches}


def plain(batch: Any) -> Any:
    """Returns the batch as comparable values."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), batch.tolist()
    if isinstance(batch, dict):
        return {k: plain(v) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch).__name__, [plain(v) for v in batch]
    return batch


def epochs(loader: ShmLoader[Any], count: int = 2) -> list[list[Any]]:
    return [[plain(batch) for batch in loader] for _ in range(count)]


def loader_of(kind: str = "rows", **options: Any) -> ShmLoader[Any]:
    return ShmLoader(DATASETS[kind](), **{"batch_size": 7, "shuffle": True, "seed": 5, **options})


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {kind: epochs(loader_of(kind)) for kind in DATASETS}


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 2},
        {"num_workers": 4},
        {"num_workers": 2, "prefetch_factor": 1},
        {"num_workers": 3, "prefetch_factor": 5},
        pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, marks=slow),
        pytest.param({"num_workers": 2, "multiprocessing_context": "forkserver"}, marks=slow),
    ],
    ids=str,
)
def test_batches_do_not_depend_on_workers_or_start_method(kind: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    with loader_of(kind, **options) as loader:
        assert expected[kind] == epochs(loader)


@pytest.mark.parametrize("kind", DATASETS)
def test_every_epoch_has_every_sample_once_in_a_new_order(kind: str, expected: dict[str, Any]) -> None:
    first, second = expected[kind]
    assert first != second
    if kind == "rows":
        for epoch in (first, second):
            assert sorted(i for batch in epoch for i in batch["index"][1]) == list(range(50))


def test_order_and_noise_depend_on_the_seed(expected: dict[str, Any]) -> None:
    with loader_of(seed=6) as loader:
        assert expected["rows"] != epochs(loader)


def test_generators_of_the_trainer_are_left_alone() -> None:
    for num_workers in (0, 2):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        with loader_of(num_workers=num_workers) as loader:
            epochs(loader)
        assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_break_ends_an_epoch_and_the_next_one_is_whole(num_workers: int, expected: dict[str, Any]) -> None:
    with loader_of(num_workers=num_workers) as loader:
        for batch in loader:
            assert expected["rows"][0][0] == plain(batch)
            break
        assert [expected["rows"][1]] == epochs(loader, 1)


def test_prefetched_batches_survive_the_end_of_an_epoch() -> None:
    with ShmLoader(Noisy(), 7, seed=1, num_workers=1) as loader:
        for epoch in range(3):
            assert sum(1 for _ in loader) == 8
            engine = loader._builder.last
            assert (engine.front.epoch, engine.front.step) == (epoch + 1, 0)
            assert engine._ring.counters()["generation"] == 0  # nothing was abandoned


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_concurrent_iterators_have_their_own_epochs(num_workers: int, expected: dict[str, Any]) -> None:
    with loader_of(num_workers=num_workers) as loader:
        both = [[plain(a), plain(b)] for a, b in zip(loader, loader, strict=True)]
    assert expected["rows"] == [list(epoch) for epoch in zip(*both, strict=True)]


@pytest.mark.parametrize("stop", range(9))
def test_resume_continues_with_exactly_the_rest(stop: int, expected: dict[str, Any]) -> None:
    with loader_of(num_workers=2) as loader:
        stream = iter(loader)
        for _ in range(stop):
            next(stream, None)
        state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) <= 1024
    with loader_of(num_workers=1) as resumed:
        resumed.load_state_dict(state)
        assert state == resumed.state_dict()
        got = [plain(batch) for batch in resumed]
    wanted = expected["rows"][0][stop:] if stop < 8 else expected["rows"][1]
    assert wanted == got


def test_state_of_another_run_is_refused_with_the_differences() -> None:
    state = loader_of().state_dict()
    with pytest.raises(StateMismatch, match="seed"):
        loader_of(seed=6).load_state_dict(state)
    with pytest.raises(StateMismatch, match="global_batch"):
        loader_of(batch_size=8).load_state_dict(state)


def test_ranks_divide_the_batches_of_a_single_rank(expected: dict[str, Any]) -> None:
    parts = [epochs(loader_of(batch_size=1, rank=r, world_size=7, num_workers=1), 1)[0] for r in range(7)]
    for step, whole in enumerate(expected["rows"][0][:7]):
        assert whole["index"][1] == [part[step]["index"][1][0] for part in parts]


def test_padding_is_reported() -> None:
    loader = ShmLoader(list(range(10)), batch_size=3, seed=1, rank=1, world_size=2, num_workers=1)
    assert loader.valid is None
    assert [(len(batch), loader.valid) for batch in loader] == [(3, 3), (2, 2)]
    uneven = ShmLoader(list(range(9)), batch_size=2, seed=1, rank=1, world_size=2, num_workers=0)
    assert [(len(batch), uneven.valid) for batch in uneven] == [(2, 2), (2, 2), (1, 0)]


def test_set_epoch_gives_that_epoch(expected: dict[str, Any]) -> None:
    with loader_of(num_workers=2) as loader:
        loader.set_epoch(1)
        assert [expected["rows"][1]] == epochs(loader, 1)
        loader.set_epoch(0)
        assert expected["rows"] == epochs(loader)


def test_user_sampler_sets_the_order_and_the_seed_sets_the_noise(expected: dict[str, Any]) -> None:
    noise = dict(rows_of(expected["rows"][0]))
    with loader_of(shuffle=None, sampler=list(range(49, -1, -1)), num_workers=2) as loader:
        got = [plain(batch) for batch in loader]
    rows = list(rows_of(got))
    assert list(range(49, -1, -1)) == [i for i, _ in rows]
    assert [noise[i] for i, _ in rows] == [row for _, row in rows]


class SetByEpoch:
    """A sampler whose order is set before each epoch, as that of torch's DistributedSampler."""

    epoch = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % 4 for index in range(4)])


def test_user_sampler_is_not_read_before_its_epoch_begins() -> None:
    sampler = SetByEpoch()
    with ShmLoader(range(4), 2, sampler=sampler, seed=5, num_workers=1, prefetch_factor=4) as loader:
        found = []
        for sampler.epoch in (1, 3):
            found += [batch.tolist() for batch in loader]
    assert found == [[1, 2], [3, 0], [3, 0], [1, 2]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_concurrent_passes_over_a_sampler_have_their_own_orders(num_workers: int) -> None:
    dataset, ahead = list(range(12)), {"prefetch_factor": 8} if num_workers else {}
    with ShmLoader(dataset, 2, sampler=RandomSampler(dataset), seed=5, num_workers=num_workers, **ahead) as loader:  # type: ignore[arg-type]  # a number
        passes = [[batch.tolist() for batch in batches] for batches in zip(loader, loader, loader, strict=True)]
        assert loader.state_dict()["epoch"] == 3
    orders = [[i for batch in batches for i in batch] for batches in zip(*passes, strict=True)]
    assert [sorted(order) for order in orders] == [dataset] * 3
    assert orders[0] != orders[1] != orders[2]


def test_sampler_continues_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = list(range(12))
    with ShmLoader(dataset, 2, sampler=RandomSampler(dataset), seed=5, num_workers=1) as loader:
        iterator = iter(loader)
        found = next(iterator).tolist()
        with monkeypatch.context() as patch:
            patch.setattr(loader._passes, "_fill", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
        for batch in iterator:
            found += batch.tolist()
    assert sorted(found) == dataset


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


class Unsized:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_sampler_without_a_length_has_a_state() -> None:
    loaders: list[Any] = [ShmLoader(range(6), 2, sampler=Unsized(), seed=5) for _ in range(2)]
    assert next(iter(loaders[0])).tolist() == [0, 1]
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert [batch.tolist() for batch in loaders[1]] == [[2, 3], [4, 5]]
    assert loaders[1].state_dict()["epoch"] == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_empty_batch_of_a_batch_sampler_is_delivered(num_workers: int) -> None:
    with ShmLoader(range(3), batch_sampler=[[0, 1], [], [2]], collate_fn=list, seed=5, num_workers=num_workers) as loader:
        assert list(loader) == [[0, 1], [], [2]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_that_a_batch_sampler_yields_as_iterators_are_read_once(num_workers: int) -> None:
    with ShmLoader(range(3), batch_sampler=[map(int, "01"), iter([2])], seed=5, num_workers=num_workers) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2]]


class OneBuffer:
    """A batch sampler that yields one list or array in every batch. It empties the list before it fills it again."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, 24, 4):
            batch = np.arange(first, first + 4)
            if isinstance(self.buffer, list):
                self.buffer.extend(batch.tolist())
            else:
                self.buffer[:] = batch
            yield self.buffer
            if isinstance(self.buffer, list):
                self.buffer.clear()


@pytest.mark.parametrize("kind", [list, np.zeros])
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "backend": "thread"}], ids=str)
@pytest.mark.parametrize("seed", [None, 5])
def test_batch_sampler_may_use_one_list_for_all_batches(kind: Any, options: dict[str, Any], seed: int | None) -> None:
    def loader() -> ShmLoader[Any]:
        buffer: Any = [] if kind is list else np.zeros(4, np.int64)
        return ShmLoader(range(24), batch_sampler=OneBuffer(buffer), seed=seed, **options)

    with loader() as saved:
        batches = iter(saved)
        found = [next(batches).tolist()]
        state = saved.state_dict()
        found += [batch.tolist() for batch in batches]
    assert found == [list(range(first, first + 4)) for first in range(0, 24, 4)]
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == found[1:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loaded_state_replaces_pending_orders_of_another_draw(num_workers: int) -> None:
    first, second = (ShmLoader(range(12), 2, sampler=RandomSampler(range(12)), seed=5, num_workers=n) for n in (0, num_workers))
    with first, second:
        batches = iter(first)
        next(batches)
        state = first.state_dict()
        rest = [batch.tolist() for batch in batches]
        next(iter(second))
        second.load_state_dict(state)
        assert [batch.tolist() for batch in second] == rest


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collate_fn_set_between_passes_is_used_by_the_next(num_workers: int) -> None:
    with ShmLoader(range(4), 2, seed=5, num_workers=num_workers, collate_fn=list) as loader:
        assert [*loader] == [[0, 1], [2, 3]]
        loader.collate_fn = sum  # type: ignore[assignment]  # mypy takes it for a method
        assert [*loader] == [1, 5]


def test_empty_dataset_gives_an_empty_epoch_with_workers() -> None:
    with ShmLoader([], 2, seed=5, num_workers=1) as loader:
        assert epochs(loader) == [[], []]


class Bad:
    """A dataset of six samples, two of which cannot be read."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index in (2, 3):
            raise ValueError("a bad sample")
        return index


@pytest.mark.parametrize("options", [{}, {"sampler": range(6)}], ids=["in order", "a sampler"])
def test_next_batch_follows_a_lost_one(options: dict[str, Any]) -> None:
    iterator = iter(ShmLoader(Bad(), 2, seed=5, **options))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(ValueError, match="a bad sample"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[4, 5]]


def rows_of(batches: list[Any]) -> Any:
    for batch in batches:
        for row, index in enumerate(batch["index"][1]):
            yield index, {k: v[1][row] for k, v in batch.items()}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_wrappers_forward_decoding_in_place(num_workers: int) -> None:
    base = InPlace()
    subset = Subset(base, [9, 8, 7, 30])
    [batch] = ShmLoader(subset, batch_size=4, seed=1, num_workers=num_workers)
    assert batch["label"].tolist() == [9, 8, 7, 30]
    assert batch["brain"][:, 0].tolist() == [4.5, 4.0, 3.5, 15.0]
    joined = ConcatDataset([InPlace(3), Subset(InBatchesAsRows(), [5, 6])])
    [batch] = ShmLoader(joined, batch_size=5, seed=1, num_workers=num_workers)
    assert batch["label"].tolist() == [0, 1, 2, 5, 6]
    part, _ = random_split(base, [10, 40], torch.Generator().manual_seed(1))
    [batch] = ShmLoader(part, batch_size=10, seed=1, num_workers=num_workers)
    assert list(part.indices) == batch["label"].tolist()


class InBatchesAsRows(InPlace):
    read_into = None

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["label"] = indices
        for name in ("image", "brain"):
            out[name][...] = 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_type_is_kept(num_workers: int) -> None:
    batch = next(iter(ShmLoader(InBatches(), batch_size=4, seed=1, num_workers=num_workers)))
    assert isinstance(batch, Point)
    assert batch.label.tolist() == [0, 1, 2, 3]
    assert batch.image[3].eq(3).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_zero_filling_schema_clears_rows_first(num_workers: int) -> None:
    with ShmLoader(PartialRows(), batch_size=5, seed=1, num_workers=num_workers) as loader:
        for _ in range(2):
            for step, batch in enumerate(loader):
                assert [step * 5 + i + 1 for i in range(5)] == batch["image"][:, 0, 0].tolist()
                assert int(batch["image"].sum()) == int(batch["image"][:, 0, 0].sum())


def test_repr_shows_the_read_path() -> None:
    assert "read by read_into" in repr(loader_of("read_into"))
    assert "read by read_batch_into" in repr(loader_of("read_batch_into"))
    with loader_of(num_workers=1) as loader:
        next(iter(loader))
        assert "seed 5" in repr(loader)
        assert "own: float64[3]" in repr(loader)


def test_stats_count_delivered_batches() -> None:
    with loader_of(num_workers=2) as loader:
        epochs(loader, 1)
        stats = loader.stats()
    assert (stats["batches"], stats["samples"]) == (8, 50)
    assert stats["nbytes"] > 0
    assert len(stats["workers"]) == 2


def test_error_before_the_first_batch_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset may open files when its protocol is inspected."""
    expected = epochs(loader_of(), 1)[0]

    def refuse(*_: Any) -> Any:
        raise OSError("not mounted yet")

    loader = loader_of()
    batches = iter(loader)
    with monkeypatch.context() as patch:
        patch.setattr("shmload.modes.seed_mode.InlineReader", refuse)
        with pytest.raises(OSError, match="not mounted yet"):
            next(batches)
    assert [plain(batch) for batch in batches] == expected


class LockTakenFirst:
    """A lock that another thread takes first, to read the epoch to its last batch in the meantime."""

    def __init__(self, lock: Any, batches: Any) -> None:
        self._lock, self._batches, self._is_first = lock, batches, True

    def __enter__(self) -> None:
        if self._is_first:
            self._is_first = False
            other = Thread(target=lambda: [next(self._batches) for _ in range(len(self._batches) - 1)])
            other.start()
            other.join()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_end_of_a_pass_is_recorded_whichever_thread_reaches_it(tmp_path: Path) -> None:
    with loader_of(audit=str(tmp_path)) as loader:
        batches = iter(loader)
        next(batches)
        batches._stream.iterator_lock.lock = LockTakenFirst(batches._stream.iterator_lock.lock, batches)
        with pytest.raises(StopIteration):
            next(batches)
    (path,) = tmp_path.iterdir()
    records = [json.loads(line[line.index("{") :]) for line in path.read_text().splitlines()]
    (end,) = [record for record in records if record.get("kind") == "end"]
    assert end["step"] == len(loader)
