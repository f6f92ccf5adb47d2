"""Objects of the compiled modules are used by several threads at once, in a Python with or without the GIL.

Only a Python without the GIL (3.14t) lets the threads of these tests race; in others they take turns.
"""

from __future__ import annotations

import io
import os
import random
import re
import sys
import sysconfig
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload._core.filler import DONE, WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.permutation import KeyedPermutation
from shmload._core.record_writer import RecordBuffer
from shmload._core.trainer import FILLING, READY, Order, TrainerRing, control_nbytes
from shmload._core.twister import Reseeder
from shmload.worker.reseeding import python_offset

SOURCES = Path(__file__).parents[2] / "src"
IS_FREE = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
AREAS = {"order_capacity": 64, "text_capacity": 64, "layout_capacity": 64}
NUM_THREADS, NUM_CALLS = 4, 300
# Classes whose calls must be atomic, and their calls that are not: they touch no private state, or wait.
GUARDED = {
    "local_ring.pxi": "LocalRing",
    "orders.pxi": "OrderRing",
    "hosting.pxi": "HostRing",
    "trainer.pyx": "TrainerRing",
    "follower.pxi": "FollowerRing",
    "filler.pyx": "WorkerRing",
    "record_writer.pyx": "RecordBuffer",
}
UNGUARDED = {"__cinit__", "__dealloc__", "wait"}


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Calls functions in a thread each, at the same time, and returns their results."""
    barrier, results, errors = threading.Barrier(len(calls)), [None] * len(calls), []

    def run(number: int) -> None:
        barrier.wait(60)
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return results


def ring_of(num_slots: int, num_workers: int) -> tuple[TrainerRing, list[WorkerRing]]:
    """Returns a ring and the ends of its workers, each with a mapping of its own."""
    fd = os.memfd_create("free-threading")
    os.ftruncate(fd, nbytes := control_nbytes(num_slots, num_workers, **AREAS))
    ring = TrainerRing(Mapping(fd, nbytes), num_slots=num_slots, num_workers=num_workers, **AREAS)
    workers = [WorkerRing(Mapping(fd, nbytes), number) for number in range(num_workers)]
    os.close(fd)
    return ring, workers


@pytest.mark.skipif("SHMLOAD_INSTALLED" in os.environ, reason="an installed package has no sources")
@pytest.mark.parametrize("file", GUARDED)
def test_every_call_holds_the_critical_section_of_its_object(file: str) -> None:
    body = re.split(r"^cdef class (\w+).*\n", (SOURCES / file).read_text(), flags=re.MULTILINE)
    methods = re.findall(r"^((?:    @.*\n)*)    (?:cp)?def (\w+)", body[body.index(GUARDED[file]) + 1], re.MULTILINE)
    assert len(methods) > 2
    assert {name for decorators, name in methods if "@cython.critical_section" not in decorators} - UNGUARDED == set()


@pytest.mark.skipif(not IS_FREE, reason="needs a Python without the GIL, such as 3.14t")
def test_import_of_all_compiled_modules_leaves_the_gil_off(output_of: Callable[..., str]) -> None:
    program = """
import importlib, pkgutil, sys
import shmload, shmload._core
names = [module.name for module in pkgutil.iter_modules(shmload._core.__path__)]
for name in names:
    importlib.import_module(f"shmload._core.{name}")
print(len(names) > 20, sys._is_gil_enabled())
"""
    assert output_of(program) == "True False\n"


def test_table_of_a_permutation_is_made_by_several_threads() -> None:
    positions = np.arange(3000)
    for seed in range(20):
        shared, expected = KeyedPermutation(3000, seed=seed, epoch=0), np.empty(3000, np.int64)
        KeyedPermutation(3000, seed=seed, epoch=0).take(positions, expected)
        outs = [np.empty(3000, np.int64) for _ in range(NUM_THREADS)]
        calls = [partial(shared.take, positions, out) for out in outs[:2]]
        together(*calls, *(partial(shared.inverse, expected, out) for out in outs[2:]))
        assert all((out == expected).all() for out in outs[:2])
        assert all((out == positions).all() for out in outs[2:])


def test_records_of_several_threads_are_whole() -> None:
    buffer, alone = RecordBuffer(), RecordBuffer()
    records = [bytes([number]) * (100 + number) for number in range(NUM_THREADS)]
    together(*(lambda record=record: [buffer.append(record) for _ in range(NUM_CALLS)] for record in records))
    written, one = io.BytesIO(), io.BytesIO()
    buffer.write_to(written)
    for record in records:
        alone.append(record)
    alone.write_to(one)
    at, frames, starts = 0, [], np.cumsum([0, *(len(record) + 16 for record in records)])
    while at < len(written.getvalue()):
        nbytes = 16 + int.from_bytes(written.getvalue()[at : at + 8], "little")
        frames.append(written.getvalue()[at : at + nbytes])
        at += nbytes
    assert len(frames) == NUM_THREADS * NUM_CALLS
    assert set(frames) == {one.getvalue()[begin:end] for begin, end in pairwise(starts)}


def test_slots_are_taken_while_other_threads_count_them() -> None:
    ring, _ = ring_of(num_slots=8, num_workers=1)
    is_done = threading.Event()

    def take_and_free() -> None:
        for _ in range(3 * NUM_CALLS):
            slots = [ring.hold() for _ in range(8)]
            assert sorted(slots) == list(range(8))
            for slot in slots:
                ring.free(slot)
        is_done.set()

    def count() -> None:
        while not is_done.is_set():
            assert 0 <= ring.num_free <= 8
            assert ring.num_leased == 0
            ring.counters()

    together(take_and_free, count, count)


def test_samples_of_all_threads_have_numbers_of_their_own() -> None:
    ring, workers = ring_of(num_slots=NUM_THREADS, num_workers=NUM_THREADS)
    for step in range(NUM_THREADS):
        order = Order(0, step, np.arange(4), worker=step)
        assert ring.post(order, is_packed=True) == 1
    assert all(worker.claim() for worker in workers)

    def begin(worker: WorkerRing) -> list[int]:
        numbers = []
        for number in range(NUM_CALLS):
            worker.begin_row(number % 4, number)
            numbers.append(worker.begun)
        return numbers

    found = together(*(lambda worker=worker: begin(worker) for worker in workers))
    assert len(set().union(*found)) == NUM_THREADS * NUM_CALLS


def test_claim_of_a_thread_ends_or_is_detached() -> None:
    """A thread finishes its chunk at the moment at which the trainer leaves it behind."""
    for _ in range(50):
        ring, (worker,) = ring_of(num_slots=1, num_workers=1)
        order = Order(0, 0, np.arange(4))
        assert ring.post(order, is_packed=True) == 1
        assert worker.claim()
        _, is_detached = together(lambda worker=worker: worker.finish(DONE), worker.detach)
        assert worker.is_closing == is_detached
        assert ring.look(order.slot) == (FILLING if is_detached else READY)
        assert ring.recover(0) == (order.slot if is_detached else -1)


@pytest.mark.skipif(python_offset() == 0, reason="the words of Python's generator are not found in this interpreter")
def test_generator_is_seeded_while_another_thread_draws_from_it() -> None:
    generator, is_done = random.Random(), threading.Event()
    reseeder = Reseeder(1)
    reseeder.watch(generator, None, sys.modules)
    reseeder.random_at = id(generator) + python_offset()

    def seed() -> None:
        for index in range(3 * NUM_CALLS):
            reseeder.begin(7, 0, index, None, 0)
        is_done.set()

    def draw() -> None:
        while not is_done.is_set():
            assert 0 <= generator.random() < 1

    together(seed, draw, draw)
    reseeder.begin(7, 0, 1, None, 0)
    drawn = generator.random()
    reseeder.begin(7, 0, 1, None, 0)
    assert generator.random() == drawn
