"""pin_memory=True: the ring is registered, and a slot is reused only after the copies from it."""

from __future__ import annotations

import ctypes
import gc
import threading
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload import ShmLoader
from shmload._core.trainer import Lease, live_leases
from tests.device.device_kit import Rows, rows_of
from tests.simulated_device.device import SimulatedDevice

Make = Callable[..., ShmLoader[Any]]


def pinned(make: Make, **options: Any) -> ShmLoader[Any]:
    return make(None, pin_memory=True, **options)


def read_on(loader: ShmLoader[Any], iterator: Any, count: int = 14) -> None:
    """Reads batches until every free slot has been reused."""
    for _ in range(count):
        next(iterator)


@pytest.mark.slow(reason="hypothesis starts a loader with a worker for each example")
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_late_copy_reads_its_own_batch(data: st.DataObject, make: Make, pinning: SimulatedDevice) -> None:
    pinning._choose = Random(data.draw(st.integers(0, 1000))).randrange
    pinning.streams[1:] = []
    others = set(pinning.registered)  # of examples that hypothesis aborted
    with pinned(make) as loader:
        side, iterator, copies, held = pinning.side_stream(), iter(loader), [], []
        for step in range(20):
            batch = next(iterator)
            assert torch.equal(rows_of(2 * step), batch["x"])
            how = data.draw(st.sampled_from(["current", "named", "not"]))
            if how == "current":
                copies.append((step, pinning.copy(batch["x"])))
            elif how == "named":
                with pinning.using(side):
                    copies.append((step, pinning.copy(batch["x"])))
                loader.record_stream(batch, side)
            if len(held) < 3 and data.draw(st.booleans()):
                held.append(batch)
            if held and data.draw(st.booleans()):
                del held[data.draw(st.integers(0, len(held) - 1))]
            del batch
            for number in data.draw(st.lists(st.integers(0, 1), max_size=3)):
                pinning.step(number)
        held.clear()
        pinning.run()
        for step, copy in copies:
            assert torch.equal(rows_of(2 * step), copy), step
    assert set(pinning.registered) <= others
    assert pinning.violations == []


def test_late_copy_on_an_unrecorded_stream_reads_a_later_batch(make: Make, pinning: SimulatedDevice) -> None:
    iterator = iter(pinned(make))
    side = pinning.side_stream()
    batch = next(iterator)
    with pinning.using(side):
        late = pinning.copy(batch["x"])
    del batch
    while pinning.main.can_step:
        pinning.main.waiting.popleft()[1]()
    next(iterator)
    pinning.run()
    assert not torch.equal(rows_of(0), late)


def test_slot_waits_for_a_copy_on_a_recorded_stream(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    iterator = iter(loader)
    side = pinning.side_stream()
    batch = next(iterator)
    with pinning.using(side):
        late = pinning.copy(batch["x"])
    loader.record_stream(batch, side)
    del batch
    while pinning.main.can_step:
        pinning.main.waiting.popleft()[1]()
    next(iterator)
    pinning.run()
    assert torch.equal(rows_of(0), late)


def test_slot_waits_for_a_copy_on_the_stream_of_delivery(make: Make, pinning: SimulatedDevice) -> None:
    iterator = iter(pinned(make))
    side = pinning.side_stream()
    batch = next(iterator)
    late = pinning.copy(batch["x"])
    with pinning.using(side):
        del batch
    while side.can_step:
        side.waiting.popleft()[1]()
    next(iterator)
    pinning.run()
    assert torch.equal(rows_of(0), late)


def test_batch_is_poisoned_only_after_copies_from_it(make: Make, pinning: SimulatedDevice) -> None:
    iterator = iter(pinned(make))
    batch = next(iterator)
    late = pinning.copy(batch["x"])
    del batch
    next(iterator)
    pinning.run()
    assert torch.equal(rows_of(0), late)


def test_loader_does_not_wait_while_another_slot_is_free(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    iterator = iter(loader)
    pinning.fail("wait")
    next(iterator)
    next(iterator)
    assert len(loader._builder.last._ring.pending_copies) == 2
    assert "wait" in pinning._failing
    pinning._failing.clear()


def test_batch_that_dies_in_another_thread_waits_for_that_threads_stream(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    iterator = iter(loader)
    side, held = pinning.side_stream(), [next(iterator)]
    found: list[torch.Tensor] = []

    def other() -> None:
        with pinning.using(side):
            found.append(pinning.copy(held[0]["x"]))
            held.clear()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    read_on(loader, iterator, 3)
    while pinning.main.can_step:
        pinning.main.waiting.popleft()[1]()
    read_on(loader, iterator)
    pinning.run()
    assert torch.equal(rows_of(0), found[0])


NO_CAPSULE = b"used_dltensor"  # a capsule does not copy its name
DELETER = 56  # offset in a DLManagedTensor, in bytes
UINT8 = (1, 8)  # DLPack's type


def end_in_a_foreign_thread(lease: Lease) -> Callable[[], None]:
    """Leases a slot. Returns a function that ends the lease in a thread unknown to Python."""
    capsule = lease.capsule(0, *UINT8, (1,))
    api, libc = ctypes.pythonapi, ctypes.CDLL(None)
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    managed = api.PyCapsule_GetPointer(capsule, b"dltensor")
    api.PyCapsule_SetName(capsule, NO_CAPSULE)
    deleter = ctypes.c_void_p.from_address(managed + DELETER)
    thread = ctypes.c_void_p()

    def end() -> None:
        assert libc.pthread_create(ctypes.byref(thread), None, deleter, ctypes.c_void_p(managed)) == 0
        assert libc.pthread_join(thread, None) == 0

    return end


def test_batch_that_dies_in_a_foreign_thread_waits_for_the_whole_device(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    iterator = iter(loader)
    batch = next(iterator)
    engine = loader._builder.last
    late = pinning.copy(batch["x"])
    end = end_in_a_foreign_thread(live_leases()[0])
    del batch
    end()
    slot = engine._ring.pending_copies[0]
    assert not engine.releases.has_events(slot)
    pinning.run()
    next(iterator)
    assert slot in engine._ring.pending_copies  # its end is not known yet
    read_on(loader, iterator)
    assert torch.equal(rows_of(0), late)
    loader.close()
    assert pinning.registered == {}


def test_interrupt_during_the_end_of_a_lease_is_not_lost(
    make: Make, pinning: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = pinned(make)
    iterator = iter(loader)
    batch = next(iterator)

    def interrupted(stream: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pinning, "record", interrupted)
        del batch
        for _ in range(1000):
            threading.get_ident()
    read_on(loader, iterator)


def test_current_exception_survives_the_end_of_a_lease(make: Make, pinning: SimulatedDevice) -> None:
    iterator = iter(pinned(make))

    def fails() -> None:
        batch = next(iterator)
        raise LookupError(str(batch["label"].tolist()))

    with pytest.raises(LookupError, match=r"\[0, 1\]"):
        fails()


# ------------------------------------------------------------ registering


def test_every_slot_is_registered_once_and_unregistered_by_close(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    iterator = iter(loader)
    for _ in range(24):
        next(iterator)
    assert len(pinning.registered) == loader._builder.last.num_slots
    loader.close()
    assert pinning.registered == {}


class Growing(Rows):
    """Batches of text of growing size, so that slots must grow."""

    def __getitem__(self, i: int) -> Any:
        return np.full(2000 * (i + 1), i, np.int32)


def test_grown_slot_is_registered_and_its_old_memory_unregistered(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make, dataset=Growing(24), ragged="list", batch_size=1)
    late = []
    for step, batch in enumerate(loader):
        late.append(pinning.copy(batch[0]))
        if step % 3 == 2:
            pinning.step()
    assert loader.stats()["num_grown"] > 1
    del batch
    pinning.run()
    assert [copy.unique().tolist() for copy in late] == [[step] for step in range(24)]
    loader.close()
    assert (pinning.registered, pinning.violations) == ({}, [])


def test_ring_that_cannot_be_pinned_warns_once_and_batches_are_correct(make: Make, pinning: SimulatedDevice) -> None:
    pinning.fail("register", after=2)
    loader = pinned(make)
    with pytest.warns(UserWarning, match="4096 bytes of the ring could not be pinned for simulated device") as caught:
        found = [batch["x"].clone() for batch in loader]
    assert sum("could not be pinned" in str(each.message) for each in caught) == 1
    assert str(caught[0].message).endswith(
        "so copies of batches to the device are slower. Raise the limit on locked memory (ulimit -l), or "
        "lower prefetch_factor, num_workers or batch_size"
    )
    assert caught[0].filename == __file__
    assert [torch.equal(rows_of(2 * step), x) for step, x in enumerate(found)] == [True] * 24
    assert len(pinning.registered) == 2
    loader.close()
    assert pinning.registered == {}


def test_pinning_warning_turned_into_an_error_loses_no_batch(make: Make, pinning: SimulatedDevice) -> None:
    pinning.fail("register")
    iterator = iter(pinned(make))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "CUDA is in use")  # if there is a GPU, and another test has used it
        first = next(iterator)["x"].clone()  # the memory is made during the wait for it
        with pytest.raises(UserWarning, match="could not be pinned"):
            next(iterator)
    assert torch.equal(rows_of(0), first)
    assert torch.equal(rows_of(2), next(iterator)["x"])


# ------------------------------------------------------------ closing


def test_close_waits_for_running_copies(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    late = [pinning.copy(batch["x"]) for batch, _ in zip(loader, range(3), strict=False)]
    loader.close()
    pinning.run()
    assert [torch.equal(rows_of(2 * step), copy) for step, copy in enumerate(late)] == [True] * 3
    assert (pinning.registered, pinning.violations) == ({}, [])


def test_batch_that_outlives_its_loader_stays_registered_until_its_copies_end(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    batch = next(iter(loader))
    loader.close()
    del loader
    gc.collect()
    assert len(pinning.registered) == 1
    late = pinning.copy(batch["x"])
    del batch
    assert torch.equal(rows_of(0), late)
    assert (pinning.registered, pinning.violations) == ({}, [])


def test_memory_released_in_a_foreign_thread_is_unregistered_with_the_next_ring(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    batch = next(iter(loader))
    loader.close()
    end = end_in_a_foreign_thread(live_leases()[0])
    del batch, loader
    end()
    gc.collect()
    assert len(pinning.registered) == 1
    next(iter(pinned(make, num_workers=1, dataset=Rows(2))))
    gc.collect()
    assert pinning.violations == []


def test_close_raises_the_error_of_a_failing_device_and_closes_anyway(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    batches = iter(loader)
    next(batches)
    next(batches)
    pinning.fail("wait")
    with pytest.raises(RuntimeError, match="the simulated device was told to fail at wait"):
        loader.close()
    loader.close()
    assert (pinning.registered, pinning.violations) == ({}, [])


def test_record_stream_of_other_tensors_does_nothing(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    loader.record_stream(torch.zeros(3), pinning.side_stream())
    next(iter(loader))
    loader.record_stream({"x": torch.zeros(3), "text": "a"}, pinning.side_stream())
    assert loader._builder.last.releases._named == {}


def test_invalid_pending_copies_of_a_ring_are_an_error(make: Make, pinning: SimulatedDevice) -> None:
    loader = pinned(make)
    next(iter(loader))
    ring = loader._builder.last._ring
    with pytest.raises(ValueError, match=r"await_copies\(\) must be called once, before the first lease"):
        ring.await_copies(print)
    slot = ring.hold()
    with pytest.raises(ValueError, match=f"slot {slot} has no pending copies: its state is 1"):
        ring.copies_done(slot)
    (pending_copies,) = ring.pending_copies
    with pytest.raises(ValueError, match=f"the trainer cannot free slot {pending_copies}: its state is 6"):
        ring.free(pending_copies)
    ring.free(slot)
