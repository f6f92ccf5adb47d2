"""200 workers are killed with SIGKILL at random moments, and the streams stay identical."""

from __future__ import annotations

import random

import pytest

from shmload import ShmLoader
from tests.faults.faults_kit import COLLATE, DATASETS, WorkerKiller, batches, digest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers

PLANS = [  # start method, dataset, number of kills, workers, batches per epoch
    ("fork", "rows", 80, 3, 60),
    ("fork", "texts", 60, 3, 50),
    ("fork", "in place", 50, 2, 40),
    ("forkserver", "rows", 10, 2, 40),
]
BATCH = 12
MAX_EPOCHS = 60  # it takes 3 on an idle machine; on a busy one a worker is seldom found at work


def loader_of(kind: str, num_batches: int, work: int, num_workers: int, method: str = "fork") -> ShmLoader:
    return ShmLoader(
        DATASETS[kind](num_batches * BATCH, work),
        batch_size=BATCH,
        shuffle=True,
        seed=11,
        num_workers=num_workers,
        collate_fn=COLLATE.get(kind),
        multiprocessing_context=method if num_workers else None,
        prefetch_factor=2 if num_workers else None,
    )


@pytest.mark.slow(reason="200 workers are killed and replaced")
def test_streams_are_bit_identical_after_two_hundred_killed_workers(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(5)
    kills, holding, taken_back = 0, 0, 0
    for method, kind, wanted, num_workers, num_batches in PLANS:
        with loader_of(kind, num_batches, 700, num_workers, method) as loader:
            got: list[list[str]] = []
            killer = None
            is_last = False
            while not is_last:
                is_last = killer is not None and killer.num_kills == wanted  # nothing is killed in the last epoch
                got.append([])
                for batch in loader:
                    got[-1].append(digest(batch))
                    killer = killer or WorkerKiller(loader._builder.last)
                    if killer.num_kills < wanted:
                        killer.kill_one(rng)
                assert len(got) < MAX_EPOCHS
            assert killer is not None
            kills += killer.num_kills
            holding += killer.num_holding
            taken_back += loader.stats()["num_taken_back"]
        with loader_of(kind, num_batches, 0, 0) as quiet:
            assert [list(batches(quiet, 1)) for _ in got] == got
    with capsys.disabled():
        print(f"\n{kills} workers killed, {holding} of them held rows, {taken_back} claims taken back")
    assert kills >= 200
    assert taken_back >= 150
    assert taken_back == holding
