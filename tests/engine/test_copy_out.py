"""A program that keeps any number of batches for any time gets correct data, and the ring neither blocks nor reuses their slots."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import random
import resource
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

from shmload import ShmLoader
from shmload.engine import copy_out as copy_out_module
from shmload.engine.copy_out import CollectionBudget
from tests.matrix.versions import TORCH

N, BATCH_SIZE = 240, 4


class Numbers:
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": np.full((3, 5), i, np.float32), "label": i}


class OnlyInWorker:
    """An object that cannot be unpickled in the trainer, as if it lacked the class."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        return refuse_in, (os.getppid(), self.pid)


def refuse_in(pid: int, value: int) -> int:
    if os.getpid() == pid:
        raise ImportError("not here")
    return value


def collate_pair(samples: list[Any]) -> Any:
    batch = torch.utils.data.default_collate(samples)
    return (batch, "text", {"array": batch["x"].numpy()})


def collate_refused_first(samples: list[Any]) -> Any:
    first = samples[0]["label"]
    return OnlyInWorker(os.getpid()) if first == 0 else first


def loader_over_numbers(**options: Any) -> ShmLoader[Any]:
    return ShmLoader(Numbers(), **({"batch_size": BATCH_SIZE, "num_workers": 2} | options))


def poisoned(loader: ShmLoader[Any]) -> Any:
    """Returns the loader's iterator, with the ring poisoned from the first batch on."""
    iterator = iter(loader)
    if loader.seed is not None:
        loader._passes._made_engine()  # seed mode starts its workers with the first batch
    ring_of(loader).poison = True
    return iterator


def ring_of(loader: ShmLoader[Any]) -> Any:
    return loader._builder.last._ring


def is_batch(step: int, batch: dict[str, Any]) -> bool:
    labels = torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
    return torch.equal(labels, batch["label"]) and bool(torch.all(batch["x"] == labels.view(-1, 1, 1)))


def are_all_batches(batches: list[Any]) -> bool:
    return len(batches) == N // BATCH_SIZE and all(is_batch(k, b) for k, b in enumerate(batches))


def kept_by(seed: int | None) -> int:
    """Returns how many batches stay in the six slots of two workers; in torch mode each worker needs a slot for itself."""
    return 4 if seed is None else 5


@pytest.mark.parametrize("seed", [None, 3])
def test_list_of_a_loader_is_correct_and_warns_once(seed: int | None) -> None:
    with loader_over_numbers(seed=seed) as loader:
        iterator = poisoned(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = list(iterator)
        assert are_all_batches(batches)
        assert [str(w.message).split(":")[0] for w in caught] == [
            f"{kept_by(seed)} batches are still in use, and the workers need the other slots of the ring"
        ]
        assert "or keep a copy (`y.clone()`) of the parts that you need" in str(caught[0].message)
        assert caught[0].filename == __file__
        assert loader.stats()["num_copied_out"] == N // BATCH_SIZE - kept_by(seed)


@pytest.mark.parametrize("seed", [None, 3])
def test_warning_turned_into_an_error_loses_no_batch(seed: int | None) -> None:
    with loader_over_numbers(seed=seed) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        iterator, batches, errors = poisoned(loader), [], []
        while len(batches) < N // BATCH_SIZE:
            try:
                batches.append(next(iterator))
            except UserWarning as error:
                errors.append(error)  # its traceback keeps everything that it refers to
        assert are_all_batches(batches)
        assert [str(error).partition(" batches")[0] for error in errors] == [str(kept_by(seed))]


@pytest.mark.filterwarnings("ignore:.*batches are still in use")
def test_list_of_packed_batches_is_correct() -> None:
    with loader_over_numbers(collate_fn=collate_pair) as loader:
        batches = list(poisoned(loader))
        assert are_all_batches([b[0] for b in batches])
        assert are_all_batches([{"x": torch.from_numpy(b[2]["array"]), "label": b[0]["label"]} for b in batches])
        assert {b[1] for b in batches} == {"text"}


@pytest.mark.filterwarnings("ignore:.*batches are still in use")
def test_copying_stops_when_batches_are_released() -> None:
    with loader_over_numbers(num_workers=1) as loader:
        iterator = poisoned(loader)
        held = [next(iterator) for _ in range(8)]
        copied_out = loader.stats()["num_copied_out"]
        assert copied_out == 8 - 3
        held.clear()
        for _ in range(8):
            next(iterator)
        assert loader.stats()["num_copied_out"] == copied_out


def test_batches_that_fit_into_the_ring_are_neither_copied_nor_warned_about() -> None:
    with loader_over_numbers(prefetch_factor=4) as loader:
        iterator = poisoned(loader)
        held = [next(iterator) for _ in range(8)]
        assert loader.stats()["num_copied_out"] == 0
        assert all(is_batch(k, b) for k, b in enumerate(held))


def test_slots_are_returned_in_any_order() -> None:
    order, steps = random.Random(0), range(N // BATCH_SIZE)
    with loader_over_numbers(prefetch_factor=4) as loader:
        iterator, held = poisoned(loader), {}
        for step in steps:
            held[step] = next(iterator)
            while len(held) > order.randrange(8):
                assert is_batch(*held.popitem() if order.random() < 0.3 else _pop_one(held, order))
            assert ring_of(loader).num_leased == len(held)
        assert loader.stats()["num_copied_out"] == 0


def _pop_one(held: dict[int, Any], order: random.Random) -> tuple[int, Any]:
    step = order.choice(list(held))
    return step, held.pop(step)


def test_batch_kept_forever_does_not_block() -> None:
    with loader_over_numbers(persistent_workers=True) as loader:
        iterator = poisoned(loader)
        view = next(iterator)["x"][1:].numpy()
        assert sum(1 for _ in iterator) == N // BATCH_SIZE - 1
        for _ in range(2):
            assert are_all_batches([{k: v.clone() for k, v in batch.items()} for batch in loader])
        assert view[:, 0, 0].tolist() == [1, 2, 3]
        assert ring_of(loader).num_leased == 1
        assert loader.stats()["num_copied_out"] == 0


def test_batches_in_reference_cycles_release_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_out_module, "_budget", CollectionBudget())  # other loaders of this process have spent their budget
    with loader_over_numbers() as loader:
        iterator = poisoned(loader)
        gc.collect()  # later objects are young
        for step in range(6):
            batch = next(iterator)
            assert is_batch(step, batch)
            batch["self"] = batch
            del batch
        assert loader.stats()["num_copied_out"] == 0
        assert ring_of(loader).num_leased < 4


@pytest.mark.parametrize("end", ["close", "delete"])
@pytest.mark.parametrize("seed", [None, 3])
def test_batches_outlive_their_loader(end: str, seed: int | None) -> None:
    loader = loader_over_numbers(seed=seed, prefetch_factor=4)
    iterator = poisoned(loader)
    held = [next(iterator) for _ in range(6)]
    if end == "close":
        loader.close()
    del loader, iterator
    gc.collect()
    for _ in range(2):  # other loaders' memory may be mapped where the old one was
        with loader_over_numbers(prefetch_factor=4) as other:
            for batch in poisoned(other):
                batch["x"].fill_(-1)
    gc.collect()
    assert all(is_batch(k, b) for k, b in enumerate(held))
    held[0]["x"].fill_(-1)
    assert all(is_batch(k, b) for k, b in enumerate(held) if k)


def test_memory_of_a_closed_loader_is_unmapped_with_its_last_batch() -> None:
    loader = loader_over_numbers()
    held = [next(iter(loader))]
    stem = loader._builder.last._ring_parts.group.stem
    loader.close()
    del loader
    gc.collect()
    assert maps_of(stem) == 1
    held.clear()
    assert maps_of(stem) == 0


def maps_of(stem: str) -> int:
    with open("/proc/self/maps") as maps:
        return sum(stem in line for line in maps)


def test_batch_that_cannot_be_unpickled_is_an_error_and_the_next_one_follows() -> None:
    with loader_over_numbers(num_workers=1, collate_fn=collate_refused_first) as loader:
        iterator = poisoned(loader)
        with pytest.raises(ImportError, match="not here"):
            next(iterator)
        assert [next(iterator), next(iterator)] == [BATCH_SIZE, 2 * BATCH_SIZE]
        gc.collect()
        assert ring_of(loader).num_leased == 0


# ---------------------------------------------------------------- batches moved elsewhere are copied


def _saved(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream)


def _shared(value: Any) -> Any:
    for tensor in value.values():
        tensor.share_memory_()
    return value


def _queued(value: Any) -> Any:
    queue = torch.multiprocessing.get_context("spawn").Queue()
    queue.put(value)
    got = queue.get()
    queue.close()
    queue.join_thread()
    return got


SERIALIZATIONS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda b: {k: v.clone() for k, v in b.items()},
    "deepcopy": copy.deepcopy,
    "pickle": lambda b: pickle.loads(pickle.dumps(b)),
    "save": _saved,
    "share_memory_": _shared,
    "queue": _queued,
}


@pytest.mark.parametrize("name", SERIALIZATIONS)
def test_serialized_batch_is_copied_and_releases_its_slot(name: str) -> None:
    with loader_over_numbers(persistent_workers=True) as loader:
        iterator = poisoned(loader)
        batch = next(iterator)
        moved = SERIALIZATIONS[name](batch)
        del batch
        if TORCH < (2, 10):
            gc.collect()  # its pickler is in a reference cycle with the storage
        assert ring_of(loader).num_leased == 0
        for _ in iterator:
            pass
        assert is_batch(0, moved)


# ---------------------------------------------------------------- end of the process

PROGRAM = """
import sys, threading, torch
from shmload import ShmLoader

class Numbers:
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((5,), i)

if __name__ == "__main__":
    loader = ShmLoader(Numbers(), batch_size=4, num_workers=2, {options})
    iterator = iter(loader)
    held = [next(iterator) for _ in range(3)]
    held[0].itself = held[0]
    array = held[1].numpy()
    class AtEnd:
        def __init__(self, tensor): self.tensor = tensor
        def __del__(self): assert self.tensor.tolist() == [[i] * 5 for i in range(8, 12)]
    keeper = sys.keeper = AtEnd(held[2])
    {last}
"""


@pytest.mark.slow(reason="runs a program that imports torch")
@pytest.mark.parametrize("options", ["seed=0", "persistent_workers=True"])
@pytest.mark.parametrize("last", ["pass", "loader.close()", "del loader, iterator", "sys.exit(0)"])
def test_program_with_live_batches_exits_without_errors(options: str, last: str, output_of: Callable[..., str]) -> None:
    program = PROGRAM.format(options=options, last=last)
    assert output_of(program, strict=False, deadline_s=120, warm=True) == ""


@pytest.mark.slow(reason="reads hundreds of batches, which are copied out of the ring")
@pytest.mark.filterwarnings("ignore:.*batches are still in use")
@pytest.mark.parametrize("seed", [None, 3])
def test_hundreds_of_kept_batches_need_few_descriptors(seed: int | None) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    with ShmLoader(list(range(900)), 2, num_workers=2, seed=seed) as loader:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 40, limits[1]))
        try:
            batches = list(loader)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [batch.tolist() for batch in batches] == [[i, i + 1] for i in range(0, 900, 2)]


class Collector:
    """A simulated garbage collector. Its collections take time on a clock that only it and the test advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, young_s: float, full_s: float, frees: int | None = None) -> None:
        self.now_s, self._takes, self._frees = 0.0, {1: young_s, 2: full_s}, frees
        self.calls: list[int] = []
        self.has_freed = False
        self.spent_s = 0.0
        monkeypatch.setattr(copy_out_module.gc, "collect", self._collect)
        monkeypatch.setattr(copy_out_module.gc, "get_count", lambda: (int(young_s / copy_out_module.OBJECT_S), 0, 0))
        monkeypatch.setattr(copy_out_module.sys, "getallocatedblocks", lambda: int(full_s / copy_out_module.OBJECT_S))
        self.budget = CollectionBudget(lambda: self.now_s)

    def _collect(self, generation: int) -> None:
        self.calls.append(generation)
        self.now_s += self._takes[generation]
        self.spent_s += self._takes[generation]
        self.has_freed = generation == self._frees

    def asked(self) -> bool:
        self.has_freed = False
        return self.budget.collect(lambda: self.has_freed)


@pytest.mark.parametrize(("young_s", "full_s"), [(0.0003, 0.04), (0.0009, 0.4), (0.01, 4.0)])
def test_useless_collections_take_less_than_one_percent_of_the_time(
    monkeypatch: pytest.MonkeyPatch, young_s: float, full_s: float
) -> None:
    collector = Collector(monkeypatch, young_s=young_s, full_s=full_s)
    for _ in range(100_000):
        assert not collector.asked()
        assert collector.spent_s <= copy_out_module.FIRST_S + collector.now_s / 100
        collector.now_s += 0.001
    assert collector.calls


def test_objects_are_not_counted_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ten million objects, counting them takes longer than torch's loader takes for a small batch."""
    collector = Collector(monkeypatch, young_s=0.0003, full_s=4.0)
    counts = []
    monkeypatch.setattr(copy_out_module.sys, "getallocatedblocks", lambda: counts.append(0) or int(4.0 / copy_out_module.OBJECT_S))
    for _ in range(1000):
        collector.asked()
        collector.now_s += 1.0
    assert 2 in collector.calls
    assert len(counts) == 2


def test_old_garbage_is_freed_once_a_full_collection_is_affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector(monkeypatch, young_s=0.0003, full_s=0.04, frees=2)
    num_asked = 1
    while not collector.asked():
        num_asked += 1
        collector.now_s += 0.01
    assert collector.calls[-1] == 2
    assert 8 < collector.now_s < 9  # 40 ms are 0.5% of 8 s


def test_young_garbage_is_freed_at_once_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector(monkeypatch, young_s=0.0001, full_s=0.04, frees=1)
    for _ in range(5):
        assert collector.asked()
        collector.now_s += 0.1
    assert collector.calls == [1] * 5


def test_nothing_is_collected_if_the_program_disabled_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector(monkeypatch, young_s=0.0001, full_s=0.0001, frees=1)
    monkeypatch.setattr(copy_out_module.gc, "isenabled", lambda: False)
    assert not collector.asked()
    assert not collector.calls


@pytest.mark.filterwarnings("ignore:.*batches are still in use")
@pytest.mark.parametrize("num_kept", [3, 6, 9, 20])
def test_kept_batches_leave_each_worker_a_slot(num_kept: int) -> None:
    with loader_over_numbers(batch_size=1) as loader:
        iterator, kept = poisoned(loader), deque[Any](maxlen=num_kept)
        for _ in range(24):
            kept.append(next(iterator))
            assert loader._builder.last.num_slots - ring_of(loader).num_leased >= 2
