"""Actors that share the trainer's /dev/shm write straight into the ring. If one is killed during a row, no other worker gets the
row until it can no longer write to it.
"""

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
from tests.ray.cluster_kit import SHARED_MEMORY, Cluster, assert_same, copied_batches, kill_worker, on, started
from tests.ray.ray_datasets import Changing, Deadly, InPlace, Rows, Texts
from tests.ray.stuck_datasets import HalfWritten

slow = pytest.mark.slow(reason="starts actors on a Ray cluster, some of which are killed amid a row")
SEEDED: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 2}
BEGIN_S = 60.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """Yields a cluster on this machine, as a user starts it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip('Ray is not installed: pip install "shmload[ray]"')
    with started(memory=SHARED_MEMORY) as cluster:
        yield cluster


@pytest.fixture
def shared_memory_cluster(shared: Cluster) -> Iterator[Cluster]:
    """Yields the cluster, and checks afterwards that the test left no actor."""
    yield shared
    assert shared.ask("wait_for_none", 60.0) == []


class LoaderWithHaltedActor:
    """A loader one of whose actors is halted in the middle of a row."""

    def __init__(
        self, folder: Path, cluster: Cluster, dataset: HalfWritten, connect_timeout_s: float = 60.0, **options: Any
    ) -> None:
        self.folder, self.cluster = folder, cluster
        given = {**SEEDED, "prefetch_factor": 8, **options}
        self.loader = ShmLoader(dataset, **given, **on(cluster, connect_timeout_s=connect_timeout_s))
        self.batches: Any = iter(self.loader)

    def __enter__(self) -> LoaderWithHaltedActor:
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
        """Takes the remaining batches without copying, then lets the halted actor continue if it still exists."""
        self.got += self.batches
        self.let_go_on()

    def let_go_on(self) -> None:
        (self.folder / "go_on").touch()
        self.send(signal.SIGCONT)

    def assert_right(self, *indices: int) -> None:
        """Asserts that the batches have these first samples, and that no ended actor has overwritten its row."""
        self.loader.close()
        assert self.cluster.ask("wait_for_none", 60.0) == []
        assert [int(batch["index"][0]) for batch in self.got] == list(indices)
        for batch in self.got:
            assert (batch["image"] == batch["index"].view(-1, 1, 1)).all()
        assert not (self.folder / "spoilt").exists()


def kill_actor(halted: LoaderWithHaltedActor) -> None:
    halted.send(signal.SIGKILL)


def kill_stopped_actor(halted: LoaderWithHaltedActor) -> None:
    halted.send(signal.SIGSTOP)
    halted.send(signal.SIGKILL)


def kill_agent(halted: LoaderWithHaltedActor) -> None:
    kill_worker(halted.loader, 0)


def kill_agent_with_a_stopped_actor(halted: LoaderWithHaltedActor) -> None:
    halted.send(signal.SIGSTOP)
    kill_worker(halted.loader, 0)


@slow
@pytest.mark.parametrize("end", [kill_actor, kill_stopped_actor, kill_agent, kill_agent_with_a_stopped_actor])
def test_rows_are_reassigned_once_their_writer_has_ended(
    end: Callable[[LoaderWithHaltedActor], None], shared_memory_cluster: Cluster, tmp_path: Path
) -> None:
    with LoaderWithHaltedActor(tmp_path, shared_memory_cluster, HalfWritten(str(tmp_path)), sample_timeout_s=60.0) as halted:
        end(halted)
        halted.take()
        halted.assert_right(*range(0, 32, 4))


@pytest.mark.slow(reason="kills a node of a Ray cluster amid a row, and starts another")
def test_rows_of_an_actor_whose_node_is_killed_are_read_again(shared_memory_cluster: Cluster, tmp_path: Path) -> None:
    with LoaderWithHaltedActor(tmp_path, shared_memory_cluster, HalfWritten(str(tmp_path), is_away=True)) as halted:
        shared_memory_cluster.ask("kill_node")
        halted.take()
        shared_memory_cluster.ask("add_node")
        halted.assert_right(*range(0, 32, 4))


@pytest.mark.slow(reason="starts a Ray cluster of its own, all of whose raylets are killed amid a row")
def test_actors_whose_raylet_died_end_with_their_agent(shared: Cluster, tmp_path: Path) -> None:
    with (
        started(memory=SHARED_MEMORY) as own,
        LoaderWithHaltedActor(tmp_path, own, HalfWritten(str(tmp_path)), connect_timeout_s=2.0) as halted,
        pytest.raises(ClusterUnreachable),
    ):
        own.ask("kill_raylets")
        halted.take()
    assert all((batch["image"] == batch["index"].view(-1, 1, 1)).all() for batch in halted.got)
    assert not (tmp_path / "spoilt").exists()


@slow
def test_late_stopped_actor_overwrites_nothing_when_it_continues(shared_memory_cluster: Cluster, tmp_path: Path) -> None:
    options = {"num_workers": 1, "sample_timeout_s": 0.5}
    with LoaderWithHaltedActor(tmp_path, shared_memory_cluster, HalfWritten(str(tmp_path)), **options) as halted:
        halted.send(signal.SIGSTOP)
        halted.send(signal.SIGCONT)
        halted.got.append(next(halted.batches))
        with pytest.raises(SampleTimeout, match=r"sample 8 of epoch 0 \(row 0 of batch 2\) took longer"):
            next(halted.batches)
        halted.take()
        halted.assert_right(0, 4, *range(12, 32, 4))


@slow
def test_in_torch_mode_the_error_is_raised_once_the_writer_has_ended(shared_memory_cluster: Cluster, tmp_path: Path) -> None:
    with LoaderWithHaltedActor(tmp_path, shared_memory_cluster, HalfWritten(str(tmp_path)), seed=None, num_workers=1) as halted:
        halted.got.append(next(halted.batches))
        halted.send(signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the Ray actor of DataLoader worker 0 has died"):
            next(halted.batches)
        halted.let_go_on()
        halted.assert_right(0, 4)


@slow
def test_batches_stay_valid_if_the_loader_is_closed_while_an_actor_writes(shared_memory_cluster: Cluster, tmp_path: Path) -> None:
    with LoaderWithHaltedActor(tmp_path, shared_memory_cluster, HalfWritten(str(tmp_path))) as halted:
        halted.send(signal.SIGSTOP)
        halted.loader.close()
        halted.let_go_on()
        assert shared_memory_cluster.ask("wait_for_none", 60.0) == []
        assert (halted.got[0]["image"] == halted.got[0]["index"].view(-1, 1, 1)).all()


@slow
@pytest.mark.parametrize("dataset", [Rows(), InPlace(), Changing(), Texts()], ids=lambda dataset: type(dataset).__name__)
def test_batches_equal_the_local_ones_and_fixed_rows_are_not_sent(dataset: Any, shared_memory_cluster: Cluster) -> None:
    options = {**SEEDED, "shuffle": True}
    with ShmLoader(dataset, **options, **on(shared_memory_cluster)) as far, ShmLoader(dataset, **SEEDED, shuffle=True) as local:
        for _ in range(2):
            assert_same(copied_batches(local), copied_batches(far))
        sent = far.stats()["cluster"]
    assert sent["nbytes_fetched"] > 0
    if type(dataset) is InPlace:  # the other datasets' first batches, or all of them, are packed
        assert sent["nbytes_remote"] == 0


@slow
def test_replacements_of_actors_killed_by_a_sample_write_into_the_ring(shared_memory_cluster: Cluster, tmp_path: Path) -> None:
    deadly, options = Deadly(str(tmp_path), {5: 1, 40: 2}), {**SEEDED, "shuffle": True}
    with ShmLoader(deadly, **options, **on(shared_memory_cluster)) as far, ShmLoader(Rows(), **options) as local:
        assert_same(copied_batches(local), copied_batches(far))
    assert len(list(tmp_path.iterdir())) == 3
