"""A worker dies at each named point, again and again: the stream does not show it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from shmload import ShmLoader, WorkerDied
from tests.faults.faults_kit import COLLATE, DATASETS, Charges, Rows, Victims, batches, digest
from tests.faults.points import WORKER_POINTS

pytestmark = [
    pytest.mark.slow(reason="workers die again and again, and are replaced"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
IN_THE_STREAM = ("before_claim", "after_claim", "mid_decode", "before_finish", "after_finish", "before_post")
WHILE_LAYING_OUT = ("before_layout", "while_asking_layout", "waiting_layout")
TIMES = 10
NUMBERS = [signal.SIGKILL] * TIMES + [signal.SIGSEGV]
PAUSE = 4  # batches between two charges: more than are under way, so that no sample is hit twice


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
    """The undisturbed stream, epoch after epoch for as long as anybody asks."""

    def stream() -> Iterator[str]:
        with loader_of(kind, num_batches, 0) as quiet:
            while True:
                yield from batches(quiet, 1)

    return stream


def test_every_point_of_a_worker_is_among_those_tested_here() -> None:
    elsewhere = {"opening_memory", "leaving"}  # the matrix has them
    assert set(WORKER_POINTS) == {"start", *IN_THE_STREAM, *WHILE_LAYING_OUT, "waiting_grant"} | elsewhere


@pytest.mark.parametrize("kind", ["rows", "texts"])
@pytest.mark.parametrize("point", IN_THE_STREAM)
def test_a_death_in_the_stream_does_not_show_in_it(point: str, kind: str, charges: Charges) -> None:
    expected = expected_of(kind, 30)()
    numbers = list(NUMBERS)
    quiet_for = 0
    with loader_of(kind, 30) as loader:
        while numbers or charges.num_waiting or loader.stats()["num_restarts"] < len(NUMBERS):
            for batch in loader:
                assert next(expected) == digest(batch)
                quiet_for = 0 if charges.num_waiting else quiet_for + 1
                if numbers and quiet_for >= PAUSE:
                    charges.arm(point, numbers.pop())
                    quiet_for = 0
        stats = loader.stats()
    assert charges.num_spent == len(NUMBERS)
    assert stats["num_restarts"] == len(NUMBERS)
    assert stats["num_taken_back"] == (len(NUMBERS) if point in ("after_claim", "mid_decode", "before_finish") else 0)


def test_a_death_before_a_worker_has_announced_itself_does_not_show_in_the_stream(charges: Charges) -> None:
    expected = expected_of("rows", 30)()
    numbers = list(NUMBERS)
    charges.arm("start", signal.SIGKILL)  # of the very first workers one
    with loader_of("rows", 30) as loader:
        while numbers or charges.num_waiting:
            for batch in loader:
                assert next(expected) == digest(batch)
                if numbers and not charges.num_waiting:
                    charges.arm("start", numbers.pop())
                    victims = Victims(loader._builder.last)
                    worker = next((w for w in (0, 1) if loader._builder.last._ring.worker(w)["pid"]), None)
                    if worker is not None:
                        victims.kill(worker)
    assert charges.num_spent == len(NUMBERS) + 1


@pytest.mark.parametrize("point", WHILE_LAYING_OUT)
def test_a_death_while_the_layout_is_settled_does_not_show_in_the_stream(point: str, charges: Charges) -> None:
    expected = expected_of("rows", 6)
    for number in NUMBERS:
        charges.arm(point, number)
        with loader_of("rows", 6) as loader:
            for one, batch in zip(expected(), loader, strict=False):
                assert one == digest(batch)
            assert loader.stats()["num_restarts"] == 1
    assert charges.num_spent == len(NUMBERS)


def test_a_sample_given_up_over_the_layout_does_not_keep_the_others_waiting(charges: Charges) -> None:
    expected = expected_of("rows", 6)
    for _ in range(5):
        charges.arm("while_asking_layout", signal.SIGKILL)
        charges.arm("while_asking_layout", signal.SIGKILL)  # perhaps over the same sample, which is given up then
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
    assert charges.num_spent == 10


def test_with_nothing_else_to_do_the_others_ask_for_the_layout_themselves(charges: Charges) -> None:
    for _ in range(5):
        charges.arm("while_asking_layout", signal.SIGKILL)
        charges.arm("while_asking_layout", signal.SIGKILL)
        with ShmLoader(Rows(2), batch_sampler=[[0, 1]], seed=3, num_workers=2) as loader:
            stream = iter(loader)
            try:
                next(stream)
            except WorkerDied as error:
                assert "ended its worker twice" in str(error)  # noqa: PT017  # either is right
            with pytest.raises(StopIteration):
                next(stream)
    assert charges.num_spent == 10


@pytest.mark.parametrize("point", ["waiting_grant", "before_finish"])
def test_a_death_while_its_slot_grows_does_not_show_in_the_stream(point: str, charges: Charges) -> None:
    num_batches = 14
    expected = expected_of("growing", num_batches)
    numbers = list(NUMBERS)
    while numbers or charges.num_waiting:
        quiet_for = 0 if charges.num_waiting else PAUSE  # one that waits is spent on the first batches
        with loader_of("growing", num_batches, shuffle=False) as loader:
            for one, batch in zip(expected(), loader, strict=False):
                assert one == digest(batch)
                quiet_for = 0 if charges.num_waiting else quiet_for + 1
                if numbers and quiet_for >= PAUSE:
                    charges.arm(point, numbers.pop())
                    quiet_for = 0
    assert charges.num_spent == len(NUMBERS)


@pytest.fixture
def armed_environment(charges: Charges, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms the points of workers that inherit no memory."""
    monkeypatch.setenv("SHMLOAD_FAULTS", str(charges.folder))


@pytest.mark.usefixtures("armed_environment")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_death_in_the_stream_does_not_show_under_other_start_methods(method: str, charges: Charges) -> None:
    expected = expected_of("rows", 40)()
    numbers = {"start": signal.SIGKILL, "after_claim": signal.SIGKILL, "mid_decode": signal.SIGSEGV}  # last first
    quiet_for, num_killed = 0, 0
    with loader_of("rows", 40, multiprocessing_context=method) as loader:
        while numbers or charges.num_waiting:
            for batch in loader:
                assert next(expected) == digest(batch)
                quiet_for = 0 if charges.num_waiting else quiet_for + 1
                if numbers and quiet_for >= PAUSE:
                    point, number = numbers.popitem()
                    charges.arm(point, number)
                    if point == "start":
                        Victims(loader._builder.last).kill(0)
                        num_killed += 1
                    quiet_for = 0
        for step, _ in enumerate(loader):
            if step == PAUSE:
                break
        restarts = loader.stats()["num_restarts"]
    assert charges.num_spent == 3
    assert num_killed + 2 <= restarts <= num_killed + 3  # the last may not have been noticed
