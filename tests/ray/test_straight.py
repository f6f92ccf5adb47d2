"""Actors that share the trainer's /dev/shm write straight into the ring: whoever is ended amid a row, nobody gets it before its writer
cannot write to it any more."""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from shmload import ClusterUnreachable, SampleTimeout, ShmLoader
from tests.ray.cluster_kit import SHARED_MEMORY, Cluster, assert_same, kept, kill_worker, on, started
from tests.ray.ray_datasets import Changing, Deadly, InPlace, Rows, Texts
from tests.ray.stuck_datasets import HalfWritten

slow = pytest.mark.slow(reason="starts actors on a Ray cluster, some of which are killed amid a row")
SEEDED: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 2}
BEGIN_S = 30.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """A cluster on this machine, as a user has it who starts one there."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip('Ray is not installed: pip install "shmload[ray]"')
    with started(memory=SHARED_MEMORY) as cluster:
        yield cluster


@pytest.fixture
def beside(shared: Cluster) -> Iterator[Cluster]:
    """The cluster, in which a test leaves no actor."""
    yield shared
    assert shared.ask("wait_for_none", 20.0) == []


class Halted:
    """A loader one of whose actors stands still in the middle of a row."""

    def __init__(
        self, folder: Path, cluster: Cluster, dataset: HalfWritten, connect_timeout_s: float = 60.0, **options: Any
    ) -> None:
        self.folder, self.cluster = folder, cluster
        given = {**SEEDED, "prefetch_factor": 8, **options}
        self.loader = ShmLoader(dataset, **given, **on(cluster, connect_timeout_s=connect_timeout_s))
        self.batches: Any = iter(self.loader)

    def __enter__(self) -> Halted:
        self.got = [next(self.batches)]
        deadline, pause = monotonic() + BEGIN_S, threading.Event()
        while not (self.folder / "pid").exists():
            if monotonic() > deadline:
                self.loader.close()
                raise TimeoutError
            pause.wait(0.01)
        self._pid = int((self.folder / "pid").read_text())
        return self

    def __exit__(self, *error: object) -> None:
        self.loader.close()

    def send(self, number: int) -> None:
        self.cluster.ask("send_signal", self._pid, number)

    def take(self) -> None:
        """Takes the rest, as it lies in the ring; whoever stood still may go on then, if it is still there."""
        self.got += self.batches
        self.let_go_on()

    def let_go_on(self) -> None:
        (self.folder / "go_on").touch()
        self.send(signal.SIGCONT)

    def assert_right(self, *indices: int) -> None:
        """The batches are those of these first samples, and whoever was ended has not come to spoil its row."""
        self.loader.close()
        assert self.cluster.ask("wait_for_none", 20.0) == []
        assert [int(batch["index"][0]) for batch in self.got] == list(indices)
        for batch in self.got:
            assert (batch["image"] == batch["index"].view(-1, 1, 1)).all()
        assert not (self.folder / "spoilt").exists()


def of_actor(halted: Halted) -> None:
    halted.send(signal.SIGKILL)


def of_stopped_actor(halted: Halted) -> None:
    halted.send(signal.SIGSTOP)
    halted.send(signal.SIGKILL)


def of_agent(halted: Halted) -> None:
    kill_worker(halted.loader, 0)


def of_agent_with_a_stopped_actor(halted: Halted) -> None:
    halted.send(signal.SIGSTOP)
    kill_worker(halted.loader, 0)


@slow
@pytest.mark.parametrize("end", [of_actor, of_stopped_actor, of_agent, of_agent_with_a_stopped_actor])
def test_rows_are_handed_on_when_their_writer_has_ended(end: Callable[[Halted], None], beside: Cluster, tmp_path: Path) -> None:
    with Halted(tmp_path, beside, HalfWritten(str(tmp_path)), sample_timeout_s=60.0) as halted:
        end(halted)
        halted.take()
        halted.assert_right(*range(0, 32, 4))


@pytest.mark.slow(reason="kills a node of a Ray cluster amid a row, and starts another")
def test_rows_of_an_actor_whose_node_is_killed_are_done_again(beside: Cluster, tmp_path: Path) -> None:
    with Halted(tmp_path, beside, HalfWritten(str(tmp_path), is_away=True)) as halted:
        beside.ask("kill_node")
        halted.take()
        beside.ask("add_node")
        halted.assert_right(*range(0, 32, 4))


@pytest.mark.slow(reason="starts a Ray cluster of its own, all of whose raylets are killed amid a row")
def test_actors_that_ray_has_left_alone_end_with_their_agent(shared: Cluster, tmp_path: Path) -> None:
    with (
        started(memory=SHARED_MEMORY) as own,
        Halted(tmp_path, own, HalfWritten(str(tmp_path)), connect_timeout_s=2.0) as halted,
        pytest.raises(ClusterUnreachable),
    ):
        own.ask("kill_raylets")
        halted.take()
    assert all((batch["image"] == batch["index"].view(-1, 1, 1)).all() for batch in halted.got)
    assert not (tmp_path / "spoilt").exists()


@slow
def test_a_stopped_actor_that_is_late_when_it_goes_on_spoils_nothing(beside: Cluster, tmp_path: Path) -> None:
    options = {"num_workers": 1, "sample_timeout_s": 0.5}
    with Halted(tmp_path, beside, HalfWritten(str(tmp_path)), **options) as halted:
        halted.send(signal.SIGSTOP)
        halted.send(signal.SIGCONT)
        halted.got.append(next(halted.batches))
        with pytest.raises(SampleTimeout, match=r"sample 8 of epoch 0 \(row 0 of batch 2\) took longer"):
            next(halted.batches)
        halted.take()
        halted.assert_right(0, 4, *range(12, 32, 4))


@slow
def test_in_torch_mode_the_error_comes_when_the_writer_has_ended(beside: Cluster, tmp_path: Path) -> None:
    with Halted(tmp_path, beside, HalfWritten(str(tmp_path)), seed=None, num_workers=1) as halted:
        halted.got.append(next(halted.batches))
        halted.send(signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the Ray actor of DataLoader worker 0 has died"):
            next(halted.batches)
        halted.let_go_on()
        halted.assert_right(0, 4)


@slow
def test_a_loader_is_closed_while_an_actor_writes_and_what_it_gave_stays(beside: Cluster, tmp_path: Path) -> None:
    with Halted(tmp_path, beside, HalfWritten(str(tmp_path))) as halted:
        halted.send(signal.SIGSTOP)
        halted.loader.close()
        halted.let_go_on()
        assert beside.ask("wait_for_none", 20.0) == []
        assert (halted.got[0]["image"] == halted.got[0]["index"].view(-1, 1, 1)).all()


@slow
@pytest.mark.parametrize("dataset", [Rows(), InPlace(), Changing(), Texts()], ids=lambda dataset: type(dataset).__name__)
def test_batches_are_the_local_ones_and_no_node_sends_any_of_fixed_rows(dataset: Any, beside: Cluster) -> None:
    options = {**SEEDED, "shuffle": True}
    with ShmLoader(dataset, **options, **on(beside)) as far, ShmLoader(dataset, **SEEDED, shuffle=True) as local:
        for _ in range(2):
            assert_same(kept(local), kept(far))
        sent = far.stats()["cluster"]
    assert sent["nbytes_fetched"] > 0
    if type(dataset) is InPlace:  # of the others the first batches, or all, are packed
        assert sent["nbytes_remote"] == 0


@slow
def test_actors_that_end_over_a_sample_are_replaced_by_some_that_write_into_the_ring(beside: Cluster, tmp_path: Path) -> None:
    deadly, options = Deadly(str(tmp_path), {5: 1, 40: 2}), {**SEEDED, "shuffle": True}
    with ShmLoader(deadly, **options, **on(beside)) as far, ShmLoader(Rows(), **options) as local:
        assert_same(kept(local), kept(far))
    assert len(list(tmp_path.iterdir())) == 3
