"""A program that keeps batches, however many and however long, gets right data; the ring neither stalls nor reuses what is held."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import random
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

from shmload import ShmLoader
from shmload.engine.parts import CopyOut
from tests.matrix.versions import TORCH

N, BATCH_SIZE = 240, 4


class Numbers:
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": np.full((3, 5), i, np.float32), "label": i}


class OnlyInWorker:
    """Cannot be unpickled in the process that made it: stands for a class the trainer lacks."""

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
    """The loader's iterator, its ring poisoned from the first batch on."""
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


def are_all_right(batches: list[Any]) -> bool:
    return len(batches) == N // BATCH_SIZE and all(is_batch(k, b) for k, b in enumerate(batches))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_list_of_the_loader_is_right_and_warns_once_naming_the_slots(seed: int | None) -> None:
    with loader_over_numbers(seed=seed) as loader:
        iterator = poisoned(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = list(iterator)
        num_slots = loader._builder.last.num_slots
        assert are_all_right(batches)
        assert [str(w.message).split(":")[0] for w in caught] == [
            f"{num_slots - 1} batches are still in use, all but one of the {num_slots} slots of the ring"
        ]
        assert caught[0].filename == __file__
        assert loader.stats()["num_copied_out"] == N // BATCH_SIZE - (num_slots - 1)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_warning_that_is_an_error_comes_behind_its_batch_and_nothing_is_lost(seed: int | None) -> None:
    with loader_over_numbers(seed=seed) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        iterator, batches, errors = poisoned(loader), [], []
        while len(batches) < N // BATCH_SIZE:
            try:
                batches.append(next(iterator))
            except UserWarning as error:
                errors.append(error)  # with its traceback: whatever that holds is held
        assert are_all_right(batches)
        assert [str(error).partition(" batches")[0] for error in errors] == [str(loader._builder.last.num_slots - 1)]


@pytest.mark.filterwarnings("ignore:.*batches are still in use")
def test_a_list_of_packed_batches_is_right() -> None:
    with loader_over_numbers(collate_fn=collate_pair) as loader:
        batches = list(poisoned(loader))
        assert are_all_right([b[0] for b in batches])
        assert are_all_right([{"x": torch.from_numpy(b[2]["array"]), "label": b[0]["label"]} for b in batches])
        assert {b[1] for b in batches} == {"text"}


@pytest.mark.filterwarnings("ignore:.*batches are still in use")
def test_copies_stop_when_batches_are_dropped() -> None:
    with loader_over_numbers(num_workers=1) as loader:
        iterator = poisoned(loader)
        held = [next(iterator) for _ in range(8)]
        copied_out = loader.stats()["num_copied_out"]
        assert copied_out == 8 - 3
        held.clear()
        for _ in range(8):
            next(iterator)
        assert loader.stats()["num_copied_out"] == copied_out


def test_batches_within_the_ring_are_neither_copied_nor_warned_of() -> None:
    with loader_over_numbers(prefetch_factor=4) as loader:
        iterator = poisoned(loader)
        held = [next(iterator) for _ in range(8)]
        assert loader.stats()["num_copied_out"] == 0
        assert all(is_batch(k, b) for k, b in enumerate(held))


def test_slots_return_out_of_order() -> None:
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


def test_a_batch_held_for_ever_does_not_stall() -> None:
    with loader_over_numbers(persistent_workers=True) as loader:
        iterator = poisoned(loader)
        view = next(iterator)["x"][1:].numpy()
        assert sum(1 for _ in iterator) == N // BATCH_SIZE - 1
        for _ in range(2):
            assert are_all_right([{k: v.clone() for k, v in batch.items()} for batch in loader])
        assert view[:, 0, 0].tolist() == [1, 2, 3]
        assert ring_of(loader).num_leased == 1
        assert loader.stats()["num_copied_out"] == 0


def test_cycles_are_collected_before_anything_is_copied() -> None:
    gc.disable()
    try:
        with loader_over_numbers() as loader:
            for step, batch in enumerate(poisoned(loader)):
                assert is_batch(step, batch)
                batch["self"] = batch
                del batch
            assert loader.stats()["num_copied_out"] == 0
    finally:
        gc.enable()


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
    for _ in range(2):  # other loaders' memory may come to lie where the old one's would have been
        with loader_over_numbers(prefetch_factor=4) as other:
            for batch in poisoned(other):
                batch["x"].fill_(-1)
    gc.collect()
    assert all(is_batch(k, b) for k, b in enumerate(held))
    held[0]["x"].fill_(-1)
    assert all(is_batch(k, b) for k, b in enumerate(held) if k)


def test_memory_is_unmapped_with_the_last_batch_of_a_closed_loader() -> None:
    loader = loader_over_numbers()
    held = [next(iter(loader))]
    stem = loader._builder.last._parts.group.stem
    loader.close()
    del loader
    gc.collect()
    assert maps_of(stem) == 1
    held.clear()
    assert maps_of(stem) == 0


def maps_of(stem: str) -> int:
    with open("/proc/self/maps") as maps:
        return sum(stem in line for line in maps)


def test_a_batch_that_cannot_be_unpickled_is_lost_and_the_next_one_comes() -> None:
    with loader_over_numbers(num_workers=1, collate_fn=collate_refused_first) as loader:
        iterator = poisoned(loader)
        with pytest.raises(ImportError, match="not here"):
            next(iterator)
        assert [next(iterator), next(iterator)] == [BATCH_SIZE, 2 * BATCH_SIZE]
        gc.collect()
        assert ring_of(loader).num_leased == 0


# ---------------------------------------------------------------- what moves a batch elsewhere copies it


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


MOVES: dict[str, Callable[[Any], Any]] = {
    "clone": lambda b: {k: v.clone() for k, v in b.items()},
    "deepcopy": copy.deepcopy,
    "pickle": lambda b: pickle.loads(pickle.dumps(b)),
    "save": _saved,
    "share_memory_": _shared,
    "queue": _queued,
}


@pytest.mark.parametrize("name", MOVES)
def test_what_leaves_the_process_is_copied_and_lets_the_slot_go(name: str) -> None:
    with loader_over_numbers(persistent_workers=True) as loader:
        iterator = poisoned(loader)
        batch = next(iterator)
        moved = MOVES[name](batch)
        del batch
        if TORCH < (2, 10):
            gc.collect()  # its pickler stands in a cycle with the storage
        assert ring_of(loader).num_leased == 0
        for _ in iterator:
            pass
        assert is_batch(0, moved)


# ---------------------------------------------------------------- the process's end

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


@pytest.mark.slow(reason="a program in a process of its own, which imports torch")
@pytest.mark.parametrize("options", ["seed=0", "persistent_workers=True"])
@pytest.mark.parametrize("last", ["pass", "loader.close()", "del loader, iterator", "sys.exit(0)"])
def test_a_program_that_ends_with_live_batches_ends_quietly(options: str, last: str) -> None:
    program = PROGRAM.format(options=options, last=last)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow(reason="reads hundreds of batches, each of which is copied out of the ring")
@pytest.mark.filterwarnings("ignore:.*batches are still in use")
@pytest.mark.parametrize("seed", [None, 3])
def test_hundreds_of_batches_are_held_under_a_low_limit_of_descriptors(seed: int | None) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    with ShmLoader(list(range(900)), 2, num_workers=2, seed=seed) as loader:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 40, limits[1]))
        try:
            batches = list(loader)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [batch.tolist() for batch in batches] == [[i, i + 1] for i in range(0, 900, 2)]


def test_the_collector_is_asked_once_while_a_program_holds_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    ring: Any = SimpleNamespace(num_leased=8, num_lendable=8, count_copied_out=lambda: None)
    collections: list[int] = []
    monkeypatch.setattr("shmload.engine.parts.gc.collect", lambda: collections.append(ring.num_leased))
    copy_out = CopyOut(ring)
    with pytest.warns(UserWarning, match="7 batches are still in use, all but one of the 8 slots of the ring"):
        assert [copy_out.must_copy(str) for _ in range(3)] == [True, True, True]
    assert collections == [8]
