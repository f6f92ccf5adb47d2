"""A batch is cut into chunks by the work that it is: time that workers spend waiting for a processor is no work."""

from __future__ import annotations

import os

import numpy as np
import pytest

from shmload._core.filler import DONE, WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.trainer import TrainerRing, control_nbytes

AREAS = {"order_capacity": 256, "text_capacity": 64, "layout_capacity": 64}
NUM_ROWS, NUM_WORKERS = 16, 4


def busy_ring(seconds: float, num_cpus: int) -> TrainerRing:
    """Returns a ring whose worker 0 has filled two batches of NUM_ROWS rows, and was busy for a given time."""
    nbytes = control_nbytes(2, NUM_WORKERS, **AREAS)
    fd = os.memfd_create("chunks")
    try:
        os.truncate(fd, nbytes)
        control = Mapping(fd, nbytes)
    finally:
        os.close(fd)
    ring = TrainerRing(control, num_slots=2, num_workers=NUM_WORKERS, num_cpus=num_cpus, **AREAS)
    worker = WorkerRing(control, 0)
    worker.announce()
    for step in range(2):
        ring.publish(ring.hold(), epoch=0, step=step, indices=np.arange(NUM_ROWS), nrows=NUM_ROWS)
        assert worker.claim()
        worker.finish(DONE)
    measured_ns, wanted_ns = worker.pace_of(0)[1], int(seconds * 1e9)
    words = memoryview(control).cast("B").cast("Q")
    for at in np.flatnonzero(np.array(words) == measured_ns).tolist():  # other words may hold the same number
        words[at] = wanted_ns
        if worker.pace_of(0)[1] == wanted_ns:
            break
        words[at] = measured_ns
    assert worker.pace_of(0) == (2, wanted_ns)
    return ring


@pytest.mark.parametrize(("num_cpus", "num_chunks"), [(0, 8), (8, 8), (4, 8), (2, 4), (1, 2)])
def test_time_of_workers_that_share_processors_counts_by_their_share(num_cpus: int, num_chunks: int) -> None:
    work_of_batch_s = 8 * 0.3e-3  # eight chunks of the least work
    ring = busy_ring(2 * work_of_batch_s, num_cpus)
    assert ring.num_chunks(NUM_ROWS) == num_chunks


def test_work_below_the_least_of_a_chunk_is_not_divided() -> None:
    assert busy_ring(2 * 0.2e-3, 0).num_chunks(NUM_ROWS) == 1
