"""Parked slots have no memory: it is reserved when they are put into use, within a budget, and returned afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shmload import RingTooSmall, ShmLoader
from shmload._core.mapping import Mapping, give_back_pages
from shmload._core.trainer import FREE, PARKED, TrainerRing, control_nbytes
from shmload.engine.ring_memory import RingMemory
from shmload.engine.tuning import autotune
from shmload.ray.actor_ring import ActorRing
from shmload.shm.segment_group import SegmentGroup
from tests.engine.tuning_kit import change, engine_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers
SLOT = 1 << 16
AREAS = {"order_capacity": 64, "text_capacity": 64, "layout_capacity": 64}


@pytest.fixture(autouse=True)
def manual_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets only tests change worker pools, and allows four workers on every machine."""
    monkeypatch.setattr(autotune, "WINDOW_S", 1e9)
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", "4")
    monkeypatch.setattr("shmload.engine.tuning.autotune.first_workers", lambda: 1)


class Wide:
    """A dataset of which four rows fill a slot of 64 KiB."""

    schema = {"x": ("uint8", (SLOT // 4,))}

    def __len__(self) -> int:
        return 400

    def read_into(self, index: int, out: Any) -> None:
        out["x"][:] = index % 256


class Texts:
    """Samples of variable size, so that workers request memory for a slot."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> str:
        return f"{index} " * 100


def auto_loader(dataset: Any, **options: Any) -> ShmLoader[Any]:
    return ShmLoader(dataset, **{"batch_size": 4, "seed": 2, "num_workers": "auto", "prefetch_factor": "auto"} | options)


def ring_of(num_slots: int, num_usable: int) -> TrainerRing:
    nbytes = control_nbytes(num_slots, 3, **AREAS)
    fd = os.memfd_create("slots")
    os.ftruncate(fd, nbytes)
    try:
        return TrainerRing(Mapping(fd, nbytes), num_slots=num_slots, num_workers=3, num_usable=num_usable, **AREAS)
    finally:
        os.close(fd)


def test_parked_slots_are_never_taken() -> None:
    ring = ring_of(5, 2)
    assert [ring.state(slot) for slot in range(5)] == [0, 0, 5, 5, 5]
    assert {0, 1} == {ring.hold(), ring.hold()}
    assert ring.hold() == -1
    ring.unpark(3)
    assert ring.num_usable == 3
    assert ring.hold() == 3
    ring.free(3)
    ring.park(3)
    assert (ring.state(3), ring.num_usable, ring.hold()) == (PARKED, 2, -1)


def test_slot_in_the_middle_of_the_free_ones_is_parked() -> None:
    ring = ring_of(4, 4)
    ring.park(2)
    assert {0, 1, 3} == {ring.hold() for _ in range(3)}
    assert ring.hold() == -1


def test_invalid_parking_is_an_error() -> None:
    ring = ring_of(3, 2)
    slot = ring.hold()
    with pytest.raises(ValueError, match=f"slot {slot} cannot be parked unless it is free: its state is 1"):
        ring.park(slot)
    with pytest.raises(ValueError, match="slot 1 is not parked: its state is 0"):
        ring.unpark(1)
    with pytest.raises(ValueError, match=r"a ring must have at least 1 slot and at most .* num_usable=4"):
        ring_of(3, 4)


def test_number_of_wanted_workers_is_limited() -> None:
    ring = ring_of(2, 2)
    assert ring.num_wanted == 3
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"the number of workers must be 1 to 3, got {count}"):
            ring.num_wanted = count


def test_returned_pages_are_free_although_they_stay_mapped() -> None:
    fd = os.memfd_create("pages")
    os.ftruncate(fd, SLOT)
    view = memoryview(Mapping(fd, SLOT))
    view[:] = b"x" * SLOT
    before = os.fstat(fd).st_blocks
    give_back_pages(fd, SLOT)
    assert before > 0 == os.fstat(fd).st_blocks
    assert bytes(view[:3]) == b"\0\0\0"
    os.close(fd)
    with pytest.raises(OSError, match=rf"cannot release {SLOT} bytes \(fallocate\): Bad file descriptor"):
        give_back_pages(fd, SLOT)


def reserved(loader: ShmLoader[Any]) -> tuple[int, int]:
    """Returns the bytes reserved for payload, and the number of slots in use."""
    engine: Any = loader._builder.last
    return engine.worker_set.payload_nbytes, engine._ring.num_usable


@pytest.mark.parametrize("dataset", [Wide(), Texts()], ids=["rows", "texts"])
def test_memory_is_reserved_only_for_slots_in_use(dataset: Any) -> None:
    with auto_loader(dataset) as loader:
        batches = iter(loader)
        next(batches)
        first, num_slots = reserved(loader)
        assert num_slots == 4
        tuned: Any = loader._builder.tuner
        room = partial(engine_of(loader).worker_set.make_room, budget=1 << 40)
        tuned.count_batch = lambda engine: room(tuned.num_ahead) * 0 + tuned.num_ahead  # every batch ends a window
        for num_workers, prefetch, wanted in [(2, 4, 10), (1, 2, 4), (4, 1, 6)]:
            change(loader, num_workers, prefetch)
            for _ in range(24):
                batch = next(batches)  # a slot in flight is parked once it happens to be free
                del batch
            assert (first // 4 * wanted, wanted) == reserved(loader)
        assert loader.stats()["num_slots"] == 34
        assert loader.stats()["slots"]["parked"] == 28


def test_ring_bytes_is_respected_and_slots_that_do_not_fit_stay_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmload.engine.tuning.autotune.first_workers", lambda: 4)
    with auto_loader(Wide(), ring_bytes=6 * SLOT) as loader:
        batches = iter(loader)
        assert [index % 256 for index in range(4)] == next(batches)["x"][:, 0].tolist()
        assert reserved(loader) == (6 * SLOT, 6)
        engine: Any = loader._builder.last
        assert engine.worker_set.room(6 * SLOT) == 4
        assert engine.worker_set.make_room(8, 6 * SLOT) == 4
        assert sum(1 for _ in batches) == 99


def test_fewer_than_four_slots_are_an_error() -> None:
    words = f"the ring needs 4 slots of {SLOT} bytes, {4 * SLOT} in total; ring_bytes={3 * SLOT} has {3 * SLOT} left, enough for 3 slots"
    with auto_loader(Wide(), ring_bytes=3 * SLOT) as loader, pytest.raises(RingTooSmall, match=words):
        next(iter(loader))


@pytest.fixture
def group() -> Iterator[SegmentGroup]:
    made = SegmentGroup()
    yield made
    made.close()


def test_growing_batch_takes_the_memory_of_free_slots(group: SegmentGroup) -> None:
    ring = ring_of(8, 4)
    memory = RingMemory(group, ring, 8 * SLOT, may_park=True)
    memory.make(SLOT)
    assert memory.use(8, 8 * SLOT) == 8
    slot = ring.hold()
    memory.ensure(slot, 3 * SLOT)
    assert (memory.nbytes, ring.num_usable) == (7 * SLOT, 5)  # three returned theirs, and this one has what it had
    assert ring.payload_nbytes(slot) == 3 * SLOT
    memory.ensure(slot, 2 * SLOT)
    assert ring.payload_nbytes(slot) == 3 * SLOT  # it had enough memory
    with pytest.raises(RingTooSmall, match=f"the ring needs 1 slots of {5 * SLOT} bytes"):
        memory.ensure(slot, 5 * SLOT)  # no other slot can be parked, or has enough


def test_growing_slots_leave_half_of_the_memory_free(group: SegmentGroup) -> None:
    ring = ring_of(8, 4)
    memory = RingMemory(group, ring, 12 * SLOT, may_park=True)
    memory.make(SLOT)
    assert memory.room(12 * SLOT) == 12
    memory._has_grown = True
    assert memory.room(12 * SLOT) == 6 == memory.use(8, 12 * SLOT)


def test_added_slots_use_memfds_if_dev_shm_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with auto_loader(Wide()) as loader:
        batches = iter(loader)
        next(batches)
        engine: Any = loader._builder.last
        monkeypatch.setattr("shmload.engine.ring_memory.shm_free_bytes", lambda: 4 * SLOT - 1)
        change(loader, 2, 2)
        assert {"memfd"} == {segment.kind for segment in engine._memory._own.values()}
        assert sum(1 for _ in batches) == 99


def test_slot_in_use_is_never_parked() -> None:
    with auto_loader(Wide()) as loader:
        batches = iter(loader)
        next(batches)
        change(loader, 4, 2)
        held: list[torch.Tensor] = [next(batches)["x"] for _ in range(5)]
        change(loader, 1, 1)
        expected = [4 * number % 256 for number in range(1, 6)]
        assert expected == [int(x[0, 0]) for x in held]
        del held
        change(loader, 1, 1)
        assert np.all([batch["x"][0, 0].item() == 4 * (6 + n) % 256 for n, batch in enumerate(batches)])
        assert FREE not in {engine_of(loader)._ring.state(slot) for slot in range(6, 34)}


def test_leaving_worker_passes_on_the_wake_up(engine_parts: Iterator[Any]) -> None:
    body, bell, ring = engine_parts
    ring.num_wanted = 2
    body.run(0)
    assert bell.value == 1


@pytest.fixture
def engine_parts() -> Any:
    """Yields the loop of worker 2 over a ring, and the doorbell of its pool."""
    from shmload._core.filler import WorkerRing
    from shmload.shm.doorbell import Doorbell
    from shmload.worker.job import Job
    from shmload.worker.loop import WorkerLoop

    nbytes = control_nbytes(2, 3, **AREAS)
    fd = os.memfd_create("body")
    os.ftruncate(fd, nbytes)
    control = Mapping(fd, nbytes)
    os.close(fd)
    ring = TrainerRing(control, num_slots=2, num_workers=3, **AREAS)
    bell = Doorbell._unnamed("/bell")
    job = Job(list(range(3)), None, None, True, 1, False)
    yield (
        WorkerLoop(WorkerRing(control, 2), job, ready=bell, orders=bell, grants=bell, open_memory=lambda path: control),
        bell,
        ring,
    )
    bell.close()


@pytest.mark.parametrize("row", [0, 65_535, 65_536, 69_999])
def test_current_row_of_a_worker_is_known_in_a_large_chunk(row: int) -> None:
    ring = ActorRing(0, text_capacity=64, layout_capacity=64)
    options: dict[str, Any] = {"nrows": 70_000, "is_pickled": False, "is_packed": True}
    ring.order(np.arange(70_000).tobytes(), None, epoch=0, step=0, **options)
    ring.ring.begin_row(row, row)
    assert ring.trainer.held_by(0) == (0, 0, 1, row)
