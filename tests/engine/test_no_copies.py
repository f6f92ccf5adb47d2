"""Requirements E3 and E2: per batch the trainer pickles, copies and starts nothing, and a worker allocates no sample."""

from __future__ import annotations

import marshal
import pickle
import threading
import tracemalloc
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from shmload import ShmLoader
from shmload._core.mapping import Mapping
from shmload._core.trainer import live_leases
from shmload.batch.row_placer import RowPlacer
from shmload.shm.segment import Segment
from shmload.worker.decoding_protocol import in_place_reader_of

SHAPE = (64, 64, 3)
SAMPLE_NBYTES = 64 * 64 * 3
PICKLING = [(pickle, n) for n in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler")] + [
    (marshal, n) for n in ("dumps", "loads", "dump", "load")
]


class Images:
    """A dataset that decodes in place."""

    schema: ClassVar = {"image": ("uint8", SHAPE), "label": ("int64", ())}

    def __len__(self) -> int:
        return 400

    def read_into(self, index: int, out: Any) -> None:
        out["image"].fill(index % 256)
        out["label"] = index


class Copied:
    """A dataset that decodes into its own arrays."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": np.full(SHAPE, index % 256, np.uint8), "label": index}


def started(dataset: Any, **options: Any) -> tuple[ShmLoader[Any], Any]:
    """Yields a loader that has delivered its first batches."""
    loader: ShmLoader[Any] = ShmLoader(dataset, batch_size=4, num_workers=1, **options)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    return loader, iterator


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return call(*args, **kwargs)

        return wrapper

    for module, name in PICKLING:
        monkeypatch.setattr(module, name, counted(f"{module.__name__}.{name}", getattr(module, name)))
    return calls


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("dataset", [Images(), Copied()])
def test_rows_are_delivered_without_pickling(dataset: Any, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, iterator = started(dataset, seed=seed)
    with loader:
        calls = count_calls(monkeypatch)
        for _ in range(50):
            next(iterator)
        monkeypatch.undo()
        assert calls == {}


def test_packed_batch_of_plain_values_unpickles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, iterator = started(Copied(), collate_fn=list)
    with loader:
        calls = count_calls(monkeypatch)
        next(iterator)
        monkeypatch.undo()
        assert calls == {"marshal.loads": 1}


@pytest.mark.parametrize("seed", [None, 0])
def test_trainer_has_no_helper_thread(seed: int | None) -> None:
    before = threading.enumerate()
    loader, _ = started(Copied(), seed=seed)
    with loader:
        assert set(threading.enumerate()) <= set(before)  # threads of earlier tests may end


@pytest.mark.parametrize("dataset", [Images(), Copied()])
def test_yielded_tensors_are_in_the_ring(dataset: Any) -> None:
    loader, iterator = started(dataset)
    with loader:
        batch = next(iterator)
        (lease,) = live_leases()
        for tensor in batch.values():
            assert lease.address <= tensor.data_ptr()
            assert tensor.data_ptr() + tensor.nbytes <= lease.address + lease.nbytes
            assert tensor.data_ptr() % 64 == 0
        assert "-payload-0" in file_mapped_at(lease.address)


def file_mapped_at(address: int) -> str:
    """Returns the file mapped at an address, from /proc."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, end = (int(x, 16) for x in line.split()[0].split("-"))
            if first <= address < end:
                return line.split(maxsplit=5)[-1].strip()
    return ""


def test_delivery_allocates_less_than_a_sample() -> None:
    loader, iterator = started(Images())
    with loader:
        peak = peak_nbytes(lambda: next(iterator))
        assert peak < SAMPLE_NBYTES


def peak_nbytes(call: Any) -> int:
    """Returns the peak memory that Python and numpy allocated during a call."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def decode_rows(dataset: Any, placer: RowPlacer, nrows: int) -> None:
    for row in range(nrows):
        dataset.read_into(row, placer.out(row))


def test_read_into_allocates_no_array_of_sample_size_in_the_worker() -> None:
    images = Images()
    in_place = in_place_reader_of(images)
    assert in_place is not None
    layout = in_place.layout()
    segment = Segment.create("shmload-test-no-copies", layout.nbytes(4))
    try:
        memory = Mapping(segment.fd, layout.nbytes(4))
        placer = RowPlacer(layout, memory, 0, 4)
        peak = peak_nbytes(lambda: decode_rows(images, placer, 4))
        assert peak < SAMPLE_NBYTES / 4
        assert torch.equal(torch.arange(4), torch.from_numpy(placer.out(slice(None))["label"].copy()))
        assert np.array_equal(placer.out(3)["image"], np.full(SHAPE, 3))
    finally:
        segment.close()


def test_peak_includes_an_allocated_sample() -> None:
    assert peak_nbytes(lambda: [Copied()[0]]) >= SAMPLE_NBYTES
