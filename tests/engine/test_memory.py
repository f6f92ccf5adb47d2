"""Memory of a ring: promised when the ring is made, reserved before it is written to, and returned after a pass."""

from __future__ import annotations

import gc
import multiprocessing
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload import RingTooSmall, ShmLoader, debug
from shmload.shm import free_memory, segment
from tests.shm.mount_kit import in_mount_namespace, needs_unshare, of_size

MIB = 1 << 20
DEADLINE_S = 60


class Large:
    """Samples of 1 MiB; those from `first_gated` on wait for the gate."""

    def __init__(self, first_gated: int = 1 << 30, gate: Any = None) -> None:
        self.first_gated, self.gate = first_gated, gate

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index >= self.first_gated and not self.gate.wait(DEADLINE_S):
            raise TimeoutError("the gate stayed closed")
        return np.full(MIB, index, np.uint8)


def memory_of(loader: ShmLoader[Any]) -> Any:
    engine: Any = loader._builder.last
    return engine._memory


def payloads() -> list[str]:
    """Returns the mappings of rings in this process."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "-payload-" in line]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("seed", [None, 1])
def test_ring_is_unmapped_with_its_last_batch_without_garbage_collection(seed: int | None, no_collector: None) -> None:
    before = len(payloads())
    for _ in range(2):  # passes, each with its own workers and ring
        loader = ShmLoader(Large(), 4, num_workers=1, seed=seed, persistent_workers=False)
        batches = iter(loader)
        batch = next(batches)
        assert len(payloads()) == before + 1
        del batches
        loader.close()
        assert len(payloads()) == before + 1
        assert batch[:, -1].tolist() == [0, 1, 2, 3]
        del batch
        assert len(payloads()) == before


def test_memory_is_reserved_by_written_rows_and_while_the_trainer_waits() -> None:
    gate = multiprocessing.get_context("fork").Event()
    with ShmLoader(Large(8, gate), 4, num_workers=1, seed=1, multiprocessing_context="fork") as loader:
        batches = iter(loader)
        next(batches)
        memory = memory_of(loader)
        assert memory.nbytes == 16 * MIB
        assert (
            segment.unreserved_bytes() >= 4 * MIB
        )  # the last slot is that of the first batch, which is released when the third is requested
        next(batches)

        def open_when_reserved() -> None:
            while memory.is_sparse:
                pass
            gate.set()

        watching = threading.Thread(target=open_when_reserved, daemon=True)
        watching.start()
        assert next(batches)[:, -1].tolist() == [8, 9, 10, 11]
        watching.join(DEADLINE_S)
        assert segment.unreserved_bytes() == 0


def test_ring_with_poisoned_slots_is_reserved_at_once() -> None:
    debug.enable()
    try:
        with ShmLoader(Large(), 4, num_workers=1, seed=1) as loader:
            next(iter(loader))
            assert not memory_of(loader).is_sparse
    finally:
        debug.enable(False)


def test_ring_is_reserved_at_once_if_the_kernel_cannot_populate_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmload.engine.ring_memory.CAN_POPULATE", False)
    with ShmLoader(Large(), 4, num_workers=1, seed=1) as loader:
        next(iter(loader))
        assert not memory_of(loader).is_sparse
        assert segment.unreserved_bytes() == 0


PROGRAM = """
import os, sys
import numpy as np
from shmload import RingTooSmall, ShmLoader
from shmload.engine import ring_memory

MIB = 1 << 20

class Large:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return np.full(MIB, index, np.uint8)

def fill():
    with open("/dev/shm/other", "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass
"""


def in_64_mib(code: str) -> list[str]:
    done = in_mount_namespace(of_size("64m"), "-c", PROGRAM + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_unshare
@pytest.mark.slow(reason="starts an interpreter with torch")
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("who", ["a worker", "the trainer"])
def test_memory_taken_by_others_is_an_error_and_not_a_sigbus(who: str, policy: str) -> None:
    lines = in_64_mib(f"""
    ring_memory.SPARSE_KIND = "shm"  # whose end can be brought about here, as that of the machine's memory cannot
    loader = ShmLoader(Large(), 8, num_workers=1, seed=1, multiprocessing_context="fork", on_error={policy!r})
    batches = iter(loader)
    kept = [next(batches)]
    memory = loader._builder.last._memory
    if {who!r} == "a worker":
        memory.reserve_more = lambda: None
    fill()
    try:
        for batch in batches:
            kept.append(batch)
        print("all came")
    except RingTooSmall as error:
        print(type(error).__name__, *str(error).split())
    print([batch[0, 0].item() for batch in kept] == list(range(0, 8 * len(kept), 8)))
    print(loader.stats()["num_restarts"], loader.stats()["num_bad_samples"])
    """)
    assert "RingTooSmall" in lines[0]
    assert "were free when the ring was created" in lines[0]
    assert "Free memory" in lines[0]
    assert lines[1:] == ["True", "0 0"]


@needs_unshare
@pytest.mark.slow(reason="starts an interpreter with torch")
def test_large_ring_uses_only_reserved_memory_of_dev_shm() -> None:
    lines = in_64_mib("""
    loaders = [ShmLoader(Large(), size, num_workers=1, seed=1, multiprocessing_context="fork") for size in (10, 1)]
    batches = [iter(loader) for loader in loaders]
    held = [next(batch) for batch in batches]
    sizes = {name.split("-")[-2]: os.stat(f"/dev/shm/{name}") for name in os.listdir("/dev/shm") if "payload" in name}
    print([(size.st_size >> 20, size.st_blocks * 512 >> 20) for size in sizes.values()])
    fill()
    print([sum(1 for _ in batch) for batch in batches])
    """)
    assert lines == ["[(4, 4)]", "[6, 63]"]


def test_memory_promised_to_one_ring_is_not_free_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "available_bytes", lambda root: 64 * MIB)
    gate = multiprocessing.get_context("fork").Event()
    made: dict[str, Any] = {"num_workers": 1, "seed": 1, "multiprocessing_context": "fork"}
    with ShmLoader(Large(10, gate), 10, **made) as first, ShmLoader(Large(), 10, **made) as second:
        next(iter(first))
        with pytest.raises(RingTooSmall, match="the ring needs 41943040 bytes"):
            next(iter(second))
        gate.set()


def test_large_ring_without_memfds_is_named_and_reserved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmload.engine.ring_memory.memfds_work", lambda: False)
    with ShmLoader(Large(), 4, num_workers=1, seed=1) as loader:
        next(iter(loader))
        (line,) = payloads()
        assert "/dev/shm/" in line
        assert not memory_of(loader).is_sparse


class LongSampler(list[int]):
    """A sampler that yields more than its length."""

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("seed", [1, None])
@pytest.mark.parametrize("batch_size", [10**9, (1 << 31) - 1])
def test_batch_size_beyond_the_dataset_reserves_no_unused_memory(batch_size: int, seed: int | None) -> None:
    dataset = [np.full(3, index) for index in range(5)]
    with ShmLoader(dataset, batch_size, num_workers=1, seed=seed) as loader:
        assert [batch[:, 0].tolist() for batch in loader] == [[0, 1, 2, 3, 4]]


def test_batch_larger_than_the_samplers_length_is_complete() -> None:
    num_rows = 100_000
    with ShmLoader(range(num_rows), num_rows, sampler=LongSampler(range(num_rows)), num_workers=1) as loader:
        assert [(len(batch), int(batch.sum())) for batch in loader] == [(num_rows, sum(range(num_rows)))]
