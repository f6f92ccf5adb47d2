"""Workers die at every named point, repeatedly, and the stream stays identical."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from shmload import ShmLoader, WorkerDied
from tests.faults.faults_kit import COLLATE, DATASETS, FaultFolder, Rows, WorkerKiller, batches, digest
from tests.faults.points import WORKER_POINTS

pytestmark = [
    pytest.mark.slow(reason="workers die repeatedly and are replaced"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
STREAM_POINTS = ("before_claim", "after_claim", "mid_decode", "before_finish", "after_finish", "before_post")
LAYOUT_POINTS = ("before_layout", "while_asking_layout", "waiting_layout")
TIMES = 10
NUMBERS = [signal.SIGKILL] * TIMES + [signal.SIGSEGV]
PAUSE = 4  # batches between two faults: more than are in flight, so that no sample is hit twice


def loader_of(kind: str, num_batches: int, num_workers: int = 2, **options: object) -> ShmLoader:
    return ShmLoader(
        DATASETS[kind](num_batches * 4),
        batch_size=4,
        seed=3,
        num_workers=num_workers,
        collate_fn=COLLATE.get(kind),
        prefetch_factor=1 if num_workers else None,
        **options,
    )


def expected_of(kind: str, num_batches: int) -> Callable[[], Iterator[str]]:
    """Returns a function that makes the undisturbed stream, epoch after epoch without end."""

    def stream() -> Iterator[str]:
        with loader_of(kind, num_batches, 0) as quiet:
            while True:
                yield from batches(quiet, 1)

    return stream


def test_every_point_of_a_worker_is_tested() -> None:
    elsewhere = {"opening_memory", "leaving"}  # tested by the matrix
    assert set(WORKER_POINTS) == {"start", *STREAM_POINTS, *LAYOUT_POINTS, "waiting_grant"} | elsewhere


@pytest.mark.parametrize("kind", ["rows", "texts"])
@pytest.mark.parametrize("point", STREAM_POINTS)
def test_stream_is_identical_after_deaths_during_batches(point: str, kind: str, fault_folder: FaultFolder) -> None:
    expected = expected_of(kind, 30)()
    numbers = list(NUMBERS)
    quiet_for = 0
    with loader_of(kind, 30) as loader:
        while numbers or fault_folder.num_armed or loader.stats()["num_restarts"] < len(NUMBERS):
            for batch in loader:
                assert next(expected) == digest(batch)
                quiet_for = 0 if fault_folder.num_armed else quiet_for + 1
                if numbers and quiet_for >= PAUSE:
                    fault_folder.arm(point, numbers.pop())
                    quiet_for = 0
        stats = loader.stats()
    assert fault_folder.num_triggered == len(NUMBERS)
    assert stats["num_restarts"] == len(NUMBERS)
    assert stats["num_taken_back"] == (len(NUMBERS) if point in ("after_claim", "mid_decode", "before_finish") else 0)


def test_stream_is_identical_after_deaths_during_worker_start(fault_folder: FaultFolder) -> None:
    expected = expected_of("rows", 30)()
    numbers = list(NUMBERS)
    fault_folder.arm("start", signal.SIGKILL)  # hits one of the first workers
    quiet_for = 0
    with loader_of("rows", 30) as loader:
        while numbers or fault_folder.num_armed:
            for batch in loader:
                assert next(expected) == digest(batch)
                quiet_for = 0 if fault_folder.num_armed else quiet_for + 1
                if numbers and quiet_for >= PAUSE:
                    fault_folder.arm("start", numbers.pop())
                    killer = WorkerKiller(loader._builder.last)
                    worker = next((w for w in (0, 1) if loader._builder.last._ring.worker(w)["pid"]), None)
                    if worker is not None:
                        killer.kill(worker)
    assert fault_folder.num_triggered == len(NUMBERS) + 1


@pytest.mark.parametrize("point", LAYOUT_POINTS)
def test_stream_is_identical_after_a_death_during_the_layout(point: str, fault_folder: FaultFolder) -> None:
    expected = expected_of("rows", 6)
    for number in NUMBERS:
        fault_folder.arm(point, number)
        with loader_of("rows", 6) as loader:
            for one, batch in zip(expected(), loader, strict=False):
                assert one == digest(batch)
            assert loader.stats()["num_restarts"] == 1
    assert fault_folder.num_triggered == len(NUMBERS)


def test_sample_skipped_during_the_layout_does_not_block_other_workers(fault_folder: FaultFolder) -> None:
    expected = expected_of("rows", 6)
    for _ in range(5):
        fault_folder.arm("while_asking_layout", signal.SIGKILL)
        fault_folder.arm("while_asking_layout", signal.SIGKILL)  # maybe at the same sample, which is then skipped
        lost = []
        with loader_of("rows", 6) as loader:
            stream = iter(loader)
            for step, one in zip(range(6), expected(), strict=False):
                try:
                    batch = next(stream)
                except WorkerDied:
                    lost.append(step)
                else:
                    assert one == digest(batch)
        assert lost in ([], [0])
    assert fault_folder.num_triggered == 10


def test_idle_workers_take_over_the_layout(fault_folder: FaultFolder) -> None:
    for _ in range(5):
        fault_folder.arm("while_asking_layout", signal.SIGKILL)
        fault_folder.arm("while_asking_layout", signal.SIGKILL)
        with ShmLoader(Rows(2), batch_sampler=[[0, 1]], seed=3, num_workers=2) as loader:
            stream = iter(loader)
            try:
                next(stream)
            except WorkerDied as error:
                assert "ended its worker twice" in str(error)  # noqa: PT017  # both outcomes are valid
            with pytest.raises(StopIteration):
                next(stream)
    assert fault_folder.num_triggered == 10


@pytest.mark.parametrize("point", ["waiting_grant", "before_finish"])
def test_stream_is_identical_after_deaths_while_slots_grow(point: str, fault_folder: FaultFolder) -> None:
    num_batches = 14
    expected = expected_of("growing", num_batches)
    numbers = list(NUMBERS)
    while numbers or fault_folder.num_armed:
        quiet_for = 0 if fault_folder.num_armed else PAUSE  # a fault still armed is triggered by the first batches
        with loader_of("growing", num_batches, shuffle=False) as loader:
            for one, batch in zip(expected(), loader, strict=False):
                assert one == digest(batch)
                quiet_for = 0 if fault_folder.num_armed else quiet_for + 1
                if numbers and quiet_for >= PAUSE:
                    fault_folder.arm(point, numbers.pop())
                    quiet_for = 0
    assert fault_folder.num_triggered == len(NUMBERS)


@pytest.fixture
def armed_environment(fault_folder: FaultFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms the points of workers that inherit no memory."""
    monkeypatch.setenv("SHMLOAD_FAULTS", str(fault_folder.folder))


@pytest.mark.usefixtures("armed_environment")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_stream_is_identical_after_deaths_with_other_start_methods(method: str, fault_folder: FaultFolder) -> None:
    expected = expected_of("rows", 40)()
    numbers = {"start": signal.SIGKILL, "after_claim": signal.SIGKILL, "mid_decode": signal.SIGSEGV}  # in reverse order
    quiet_for, num_killed = 0, 0
    with loader_of("rows", 40, multiprocessing_context=method) as loader:
        while numbers or fault_folder.num_armed:
            for batch in loader:
                assert next(expected) == digest(batch)
                quiet_for = 0 if fault_folder.num_armed else quiet_for + 1
                if numbers and quiet_for >= PAUSE:
                    point, number = numbers.popitem()
                    fault_folder.arm(point, number)
                    if point == "start":
                        WorkerKiller(loader._builder.last).kill(0)
                        num_killed += 1
                    quiet_for = 0
        for step, _ in enumerate(loader):
            if step == PAUSE:
                break
        restarts = loader.stats()["num_restarts"]
    assert fault_folder.num_triggered == 3
    assert num_killed + 2 <= restarts <= num_killed + 3  # the last one may not have been noticed yet
