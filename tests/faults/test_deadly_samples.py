"""A sample that ends every worker that reads it is given up, in its turn; and deaths are noticed at once."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from shmload import ShmLoader, WorkerDied
from shmload.engine import engine
from tests.faults.faults_kit import DEADLINE_S, Rows, Victims, digest, kill_and_wait

pytestmark = [
    pytest.mark.slow(reason="workers die again and again, and are replaced"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Deadly(Rows):
    """Some samples end their worker, always."""

    def __init__(self, n: int, deadly: set[int]) -> None:
        super().__init__(n)
        self.deadly = deadly

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def list_of(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("collate_fn", [None, list_of])
@pytest.mark.parametrize("deadly", [{17}, {0}, {16, 18, 19}, {3, 30, 47}])
def test_a_deadly_sample_is_told_in_its_turn_and_the_stream_goes_on(deadly: set[int], collate_fn: Any) -> None:
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


def test_the_epoch_is_named_and_counts_for_itself() -> None:
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


def test_more_deaths_than_max_restarts_end_the_loader() -> None:
    with ShmLoader(Rows(400, 200), batch_size=4, seed=2, num_workers=2, max_restarts=2) as loader:
        num_kills = 0
        with pytest.raises(WorkerDied, match="exited unexpectedly") as info:
            for _ in loader:
                Victims(loader._builder.last).kill(num_kills % 2)
                num_kills += 1
        assert "killed by signal: Killed" in str(info.value.__cause__)
        assert loader.stats()["num_restarts"] == 2
        with pytest.raises(WorkerDied):
            next(iter(loader))


def test_workers_that_cannot_start_are_not_started_for_ever() -> None:
    def leave(worker_id: int) -> None:
        os._exit(7)

    with (
        ShmLoader(Rows(40), batch_size=4, seed=2, num_workers=2, worker_init_fn=leave) as loader,
        pytest.raises(WorkerDied, match="exited with code 7"),
    ):
        next(iter(loader))


def test_a_death_is_noticed_by_the_next_look_of_a_waiting_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one look that follows a death finds it, and looks are no further apart than a wait: 0.02 s."""
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


def test_a_death_is_noticed_while_batches_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it is time to look, without a single wait."""
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


def test_a_death_is_noticed_within_the_bound_of_a_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a trainer that waits for a batch that cannot come, over twenty deaths: far from the overall bound."""
    from time import monotonic

    took = []
    with ShmLoader(Rows(8000, 2000), batch_size=20, seed=2, num_workers=2) as loader:
        stream = iter(loader)
        next(stream)
        made = loader._builder.last
        for _ in range(20):
            before = made._supervisor._num_restarts
            while made._ring.held_by(0) is None:
                next(stream)
            died = monotonic()
            Victims(made).kill(0)
            while made._supervisor._num_restarts == before:
                next(stream)
            took.append(monotonic() - died)
    assert max(took) < DEADLINE_S
