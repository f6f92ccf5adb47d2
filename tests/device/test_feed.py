"""device=: batches are complete and in order whatever order the device works in, and every slot is returned."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload import CopyFailed, ShmLoader
from shmload.device.sending import sent
from tests.device.device_kit import Mixed, Rows, rows_of
from tests.simulated_device.device import SimulatedDevice
from tests.simulated_device.device_log import Logged

slow = pytest.mark.slow(reason="starts a worker and sends a complete epoch to the device, for each loader")
Make = Callable[..., ShmLoader[Any]]
ADVERSARIAL = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def random_device(data: st.DataObject) -> SimulatedDevice:
    """Returns a device with a random order of work.

    The order comes from a single draw, because hypothesis needs a fixed order of draws, and the host waits at varying times.
    """
    return SimulatedDevice(Random(data.draw(st.integers(0, 1000))).randrange)


def check_all_slots_returned(loader: ShmLoader[Any], device: SimulatedDevice) -> None:
    """Checks that no slot is lost, nothing stays registered after close, and copies have read only registered memory."""
    engine = loader._builder.last
    assert engine is not None
    device.run()
    ring = engine._ring
    engine.abandon()
    engine._pending_copies.look()
    while engine._pending_copies.wait() or ring.drain():
        pass
    assert (ring.pending_copies, ring.num_leased, ring.num_free) == ([], 0, ring.num_slots)
    loader.close()
    assert device.registered == {}
    assert device.violations == []


@pytest.mark.slow(reason="hypothesis starts a loader with a worker for each example")
@given(data=st.data())
@ADVERSARIAL
def test_batches_are_correct_in_any_order_of_copies(data: st.DataObject, make: Make) -> None:
    device = random_device(data)
    loader = make(device)
    iterator, found, held = iter(loader), [], []
    for _ in range(16):
        batch = next(iterator)
        found.append((device.read(batch["x"]), device.read(batch["label"])))
        if data.draw(st.booleans()):
            held.append(batch)
        for number in data.draw(st.lists(st.integers(0, 1), max_size=4)):
            device.step(number)
    check_all_slots_returned(loader, device)
    for step, (x, label) in enumerate(found):
        assert torch.equal(rows_of(2 * step), x[0])
        assert label[0].tolist() == [2 * step, 2 * step + 1]


@slow
@pytest.mark.parametrize("first", [0, -1])
@pytest.mark.parametrize("seed", [0, None])
def test_loader_waits_for_an_idle_device_when_no_slot_is_free(seed: int | None, first: int, make: Make) -> None:
    device = SimulatedDevice(lambda count: first % count)  # either the consumer's stream makes progress, or all others do
    loader = make(device, seed=seed)
    found = [device.read(batch["x"]) for batch in loader]
    device.run()
    assert [torch.equal(rows_of(2 * step), x[0]) for step, x in enumerate(found)] == [True] * 24


@pytest.mark.parametrize("seed", [0, pytest.param(None, marks=slow)])
def test_after_batch_gets_tensors_on_the_device(seed: int | None, make: Make) -> None:
    device = SimulatedDevice()
    loader = make(device, seed=seed, after_batch=lambda batch: device.read(batch["x"]))
    found = list(loader)
    device.run()
    assert [torch.equal(rows_of(2 * step), x[0]) for step, x in enumerate(found)] == [True] * 24
    check_all_slots_returned(loader, device)


@slow
def test_state_is_that_of_the_last_yielded_batch_and_not_of_those_sent_ahead(make: Make) -> None:
    def states(device: Any) -> list[Any]:
        loader = make(device)
        return [loader.state_dict() for _ in loader]

    assert states(None) == states(SimulatedDevice())


def test_abandoned_pass_leaves_nothing_and_the_next_begins_at_its_start(make: Make) -> None:
    device = SimulatedDevice()
    loader = make(device)
    for _ in loader:
        break
    found = device.read(next(iter(loader))["x"])
    check_all_slots_returned(loader, device)
    assert torch.equal(rows_of(0), found[0])


def test_consumers_stream_waits_for_every_batch_and_keeps_its_memory(make: Make) -> None:
    device = SimulatedDevice()
    logged = Logged(device)
    next(iter(make(logged)))
    events = [entry for entry in logged.log if entry[0] in ("wait_on_stream", "keep_for")]
    side = next(entry[1] for entry in logged.log if entry[0] == "side_stream")
    main = events[0][1]
    assert side != main
    copies = [entry for entry in logged.log if entry[0] == "copy"]
    assert {entry[3] for entry in copies} == {side}
    assert [entry[:3] for entry in events[1:]] == [("keep_for", (2, 16), main), ("keep_for", (2,), main)]


def test_structures_are_sent_and_other_values_stay_on_the_host(make: Make) -> None:
    device = SimulatedDevice()
    loader = make(device, Mixed(48), ragged={"x": "list"}, batch_size=3)
    batch = next(iter(loader))
    device.run()
    assert [row.tolist() for row in batch["x"]] == [[0], [1, 1], [2, 2, 2]]
    assert len({row.untyped_storage().data_ptr() for row in batch["x"]}) == 1  # one copy, viewed again
    assert batch["text"] == ["sample 0", "sample 1", "sample 2"]
    assert batch["pair"][0].tolist() == [0, 1, 2]
    assert batch["pair"][1].tolist() == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    loader.close()


def collated_mapping(samples: list[Any]) -> Any:
    return OrderedDict(rows=torch.stack([torch.as_tensor(sample["x"]) for sample in samples]), text="as it is")


def test_tensors_in_mappings_are_sent(make: Make) -> None:
    device = SimulatedDevice()
    logged = Logged(device)
    loader = make(logged, collate_fn=collated_mapping)
    batch = next(iter(loader))
    found = device.read(batch["rows"])
    device.run()
    assert type(batch) is OrderedDict
    assert "copy" in {entry[0] for entry in logged.log}
    assert torch.equal(found[0], rows_of(0))
    assert batch["text"] == "as it is"
    loader.close()


def collated_sparse(samples: list[Any]) -> Any:
    dense = torch.stack([torch.as_tensor(sample["x"]) for sample in samples])
    twice = torch.sparse_coo_tensor([[0, 0], [1, 1]], dense[:2, 0], (2, 3), check_invariants=False)
    return {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "twice": twice}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_sparse_tensors_are_sent_by_their_parts(num_workers: int, make: Make) -> None:
    device = SimulatedDevice()
    options: dict[str, Any] = {} if num_workers else {"multiprocessing_context": None}
    loader = make(device, collate_fn=collated_sparse, num_workers=num_workers, **options)
    batch = next(itertools.islice(loader, 1, None))  # of samples 2 and 3
    device.run()
    assert {name: tensor.layout for name, tensor in batch.items()} == {
        "coo": torch.sparse_coo,
        "csr": torch.sparse_csr,
        "twice": torch.sparse_coo,
    }
    assert torch.equal(batch["coo"].to_dense(), rows_of(2))
    assert torch.equal(batch["csr"].to_dense(), rows_of(2))
    assert (batch["coo"].is_coalesced(), batch["twice"].is_coalesced()) == (True, False)
    assert batch["twice"].to_dense().tolist() == [[0, 5, 0], [0, 0, 0]]
    parts = [batch["coo"].values(), batch["csr"].crow_indices(), batch["twice"]._indices()]
    assert all(device.stream_for(part) is not None for part in parts)  # it was made by the device
    loader.record_stream(batch, device.side_stream())
    loader.close()


def collated_signs(samples: list[Any]) -> Any:
    numbers = torch.view_as_complex(torch.arange(8.0).view(4, 2))
    return {"part": numbers.conj()[:1], "adjoint": numbers.view(2, 2).mH, "negative": numbers.conj().imag}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_views_that_change_a_sign_are_sent_with_it(num_workers: int, make: Make) -> None:
    device = SimulatedDevice()
    options: dict[str, Any] = {} if num_workers else {"multiprocessing_context": None}
    loader = make(device, collate_fn=collated_signs, num_workers=num_workers, **options)
    batch = next(iter(loader))
    device.run()
    for name, expected in collated_signs([]).items():
        assert torch.equal(expected.resolve_conj().resolve_neg(), batch[name].resolve_conj().resolve_neg()), name
    loader.close()


def collated_array(samples: list[Any]) -> Any:
    return np.stack([sample["x"] for sample in samples])


def test_array_stays_on_the_host_and_keeps_its_slot(make: Make) -> None:
    device = SimulatedDevice()
    loader = make(device, collate_fn=collated_array)
    batches: Iterator[Any] = iter(loader)
    kept = next(batches)
    for _ in range(12):
        next(batches)
    assert isinstance(kept, np.ndarray)
    assert torch.equal(rows_of(0), torch.from_numpy(kept))


def test_batches_are_sent_without_workers(poisoned: None) -> None:
    for seed in (0, None):
        device = SimulatedDevice()
        found = [device.read(batch["x"]) for batch in ShmLoader(Rows(6), 2, seed=seed, device=device)]
        device.run()
        assert [torch.equal(rows_of(2 * step), x[0]) for step, x in enumerate(found)] == [True] * 3


# ------------------------------------------------------------ failures


def test_failed_copy_is_an_error_in_its_place_and_the_next_batch_follows(make: Make) -> None:
    device = SimulatedDevice()
    loader = make(device)
    iterator = iter(loader)
    next(iterator)
    device.fail("copy", after=1)  # the second field of a batch, whose first is being copied
    found = []
    with pytest.raises(CopyFailed) as caught:
        found.extend(device.read(batch["x"]) for batch in iterator)
    step = len(found) + 1
    assert str(caught.value) == (
        f"batch {step} of epoch 0 could not be copied to simulated device: the simulated device was told to fail at copy. If the device is out of "
        "memory, lower batch_size"
    )
    found.append(device.read(next(iterator)["x"]))
    del caught
    check_all_slots_returned(loader, device)
    expected = [*range(1, step), step + 1]
    assert [torch.equal(rows_of(2 * at), x[0]) for at, x in zip(expected, found, strict=True)] == [True] * len(found)


def test_failure_of_a_running_copy_is_reported_later_and_loses_no_slot(make: Make) -> None:
    device = SimulatedDevice()
    loader = make(device)
    iterator = iter(loader)
    device.fail("work")
    next(iterator)
    device.run()
    with pytest.raises(CopyFailed, match="simulated device failed at earlier work, perhaps a copy of a batch"):
        for _ in range(8):
            next(iterator)
            device.run()
    check_all_slots_returned(loader, device)


@pytest.mark.parametrize("call", ["record", "is_done"])
def test_slot_without_an_event_is_returned_after_waiting_for_the_device(call: str, make: Make) -> None:
    device = SimulatedDevice()
    loader = make(device)
    iterator = iter(loader)
    next(iterator)
    device.fail(call)
    num_errors = 0
    for _ in range(20):
        try:
            next(iterator)
        except CopyFailed:
            num_errors += 1
    assert num_errors <= 1
    engine = loader._builder.last
    assert engine is not None
    loader.close()
    assert (engine._ring.pending_copies, device.registered, device.violations) == ([], {}, [])


# ------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        (
            "cpu",
            ValueError,
            "batches can be sent to CUDA devices only, got device='cpu'. Leave device out for batches in host memory",
        ),
        ("gpu0", ValueError, 'device must be a CUDA device such as "cuda" or "cuda:1", or None, got \'gpu0\''),
        (0, TypeError, 'device must be "cuda", "cuda:1", a torch.device or None, got 0'),
    ],
)
def test_device_that_is_not_cuda_is_an_error(device: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        ShmLoader([1], device=device)
    assert str(caught.value) == text


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("seed", [0, None])
def test_missing_device_is_an_error_of_the_first_pass(num_workers: int, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loader = ShmLoader(Rows(4), num_workers=num_workers, seed=seed, device="cuda:1")
    text = (
        r"device='cuda:1' needs a GPU and a torch with CUDA: torch.cuda.is_available\(\) is False here. Leave device out for batches "
        "in host memory"
    )
    with pytest.raises(RuntimeError, match=text):
        next(iter(loader))


def test_audit_with_a_device_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="audit and device cannot be combined: the audit records a digest of bytes on the host"):
        ShmLoader([1], device="cuda", audit=tmp_path)


def test_holders_of_batches_on_a_device_are_recorded(make: Make) -> None:
    loader = make(SimulatedDevice())
    next(iter(loader))
    assert loader._builder.last.holders is not None
    assert loader.holders() == []


def test_error_of_a_custom_type_is_raised_in_place_of_its_batch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()
    loader = make(device)
    iterator = iter(loader)
    next(iterator)
    calls = iter(range(100))

    def fails_once(*given: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise ValueError("a batch of this kind is refused")
        return sent(*given, **options)

    monkeypatch.setattr("shmload.engine.device_feed.sent", fails_once)
    found = []
    with pytest.raises(CopyFailed, match="a batch of this kind is refused"):
        found.extend(device.read(batch["x"]) for batch in iterator)
    step = len(found) + 1
    found.append(device.read(next(iterator)["x"]))
    check_all_slots_returned(loader, device)
    expected = [*range(1, step), step + 1]
    assert [torch.equal(rows_of(2 * at), x[0]) for at, x in zip(expected, found, strict=True)] == [True] * len(found)
