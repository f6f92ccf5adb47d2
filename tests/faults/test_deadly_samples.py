"""A sample that kills every worker that reads it is skipped, with an error in its place; and deaths are noticed quickly."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from shmload import ShmLoader, WorkerDied
from shmload.engine import engine
from tests.faults.faults_kit import DEADLINE_S, Rows, WorkerKiller, as_list, digest, kill_and_wait

pytestmark = [
    pytest.mark.slow(reason="workers die repeatedly and are replaced"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Deadly(Rows):
    """A dataset in which some samples always kill their worker."""

    def __init__(self, n: int, deadly: set[int]) -> None:
        super().__init__(n)
        self.deadly = deadly

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("collate_fn", [None, as_list])
@pytest.mark.parametrize("deadly", [{17}, {0}, {16, 18, 19}, {3, 30, 47}])
def test_deadly_sample_is_an_error_in_its_place_and_the_stream_continues(deadly: set[int], collate_fn: Any) -> None:
    with ShmLoader(Rows(48), batch_size=4, seed=2, collate_fn=collate_fn) as quiet:
        expected = [digest(batch) for batch in quiet]
    lost = {}
    with ShmLoader(Deadly(48, deadly), batch_size=4, seed=2, num_workers=2, collate_fn=collate_fn) as loader:
        stream = iter(loader)
        for step, one in enumerate(expected):
            try:
                batch = next(stream)
            except WorkerDied as error:
                lost[step] = str(error)
            else:
                assert one == digest(batch)
        with pytest.raises(StopIteration):
            next(stream)
    assert {index // 4 for index in deadly} == set(lost)
    for step, text in lost.items():
        named = [index for index in deadly if index // 4 == step and f"sample {index} of epoch 0" in text]
        assert named
        assert "ended its worker twice" in text
        assert "SIGKILL" in text


def test_deaths_are_counted_and_reported_per_epoch() -> None:
    class EverySecondEpoch(Rows):
        def __getitem__(self, index: int) -> Any:
            from shmload import sample_info

            if index == 5 and sample_info().epoch == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    with ShmLoader(EverySecondEpoch(16), batch_size=4, seed=2, num_workers=2) as loader:
        assert len(list(loader)) == 4
        with pytest.raises(WorkerDied, match="sample 5 of epoch 1"):
            list(loader)
        loader.set_epoch(2)
        assert len(list(loader)) == 4


def test_more_deaths_than_max_restarts_stop_the_loader() -> None:
    with ShmLoader(Rows(400, 200), batch_size=4, seed=2, num_workers=2, max_restarts=2) as loader:
        num_kills = 0
        with pytest.raises(WorkerDied, match="exited unexpectedly") as info:
            for _ in loader:
                WorkerKiller(loader._builder.last).kill(num_kills % 2)
                num_kills += 1
        assert "killed by signal: Killed" in str(info.value.__cause__)
        assert loader.stats()["num_restarts"] == 2
        with pytest.raises(WorkerDied):
            next(iter(loader))


def test_workers_that_cannot_start_are_not_restarted_forever() -> None:
    def leave(worker_id: int) -> None:
        os._exit(7)

    with (
        ShmLoader(Rows(40), batch_size=4, seed=2, num_workers=2, worker_init_fn=leave) as loader,
        pytest.raises(WorkerDied, match="exited with code 7"),
    ):
        next(iter(loader))


def test_waiting_trainer_notices_a_death_at_its_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks once after the death, and checks are at most one wait of 0.02 s apart."""
    with ShmLoader(Rows(4000, 500), batch_size=40, seed=2, num_workers=2, max_restarts=0) as loader:
        stream = iter(loader)
        next(stream)
        made = loader._builder.last
        waits: list[float] = []
        ring = made._ready.wait

        def wait(timeout_s: float) -> bool:
            waits.append(timeout_s)
            if len(waits) == 1:
                kill_and_wait(made.pool.pids[0])
                return False
            return ring(timeout_s)

        monkeypatch.setattr(made._ready, "wait", wait)
        with pytest.raises(WorkerDied):
            for _ in stream:
                pass
    assert waits == [engine.WAIT_S]
    assert engine.WAIT_S <= 0.1
    assert engine.DEATH_LOOK_S <= 0.1


def test_death_is_noticed_while_batches_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notices the death at the next due check, without a single wait."""
    with ShmLoader(Rows(400), batch_size=4, seed=2, num_workers=2, prefetch_factor=8, max_restarts=0) as loader:
        stream = iter(loader)
        next(stream)
        made = loader._builder.last
        looks: list[None] = []
        monkeypatch.setattr(made, "_handle_deaths", lambda see=made._handle_deaths: (looks.append(None), see()))
        kill_and_wait(made.pool.pids[0])
        made._ring.look_again(0.0)
        with pytest.raises(WorkerDied):
            next(stream)
        assert len(looks) == 1


def test_death_is_noticed_well_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the trainer wait for a batch that cannot come, for each of twenty deaths."""
    from time import monotonic

    took = []
    with ShmLoader(Rows(8000, 2000), batch_size=20, seed=2, num_workers=2) as loader:
        stream = iter(loader)
        next(stream)
        made = loader._builder.last
        for _ in range(20):
            before = loader.stats()["num_restarts"]
            while made._ring.held_by(0) is None:
                next(stream)
            died = monotonic()
            WorkerKiller(made).kill(0)
            while loader.stats()["num_restarts"] == before:
                next(stream)
            took.append(monotonic() - died)
    assert max(took) < DEADLINE_S
