"""The lock of actors that write straight into the ring: which process holds it, for how long, and which waits for it. Without
Ray.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shmload import WorkerDied
from shmload._core.filler import DONE, ERROR
from shmload.errors import RingTooSmall
from shmload.processes.child import Child
from shmload.ray import actor_set, life_lock, ray_pool, worker_actor
from shmload.ray.actor_set import ActorSet, Call
from shmload.ray.agent_config import AgentConfig
from shmload.ray.messages import ActorSetting, Slot
from shmload.ray.ray_pool import RayPool
from shmload.shm.segment import Segment
from shmload.worker.failure import Failure
from shmload.worker.pool import Death
from tests.ray.ray_datasets import InPlace
from tests.ray.test_decoder import AREA, LINK, decoder, fields, part

BYTE = 1 << 40
NBYTES = 1 << 20


@pytest.fixture
def control() -> Iterator[Segment]:
    made = Segment.create(f"shmload-{os.getuid()}-00000000beef-{os.getpid()}-control", NBYTES)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def ray_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_lock, "GRACE_S", 0.0)


@contextmanager
def holder(segment: Segment, byte: int = BYTE, *, forks: bool = False) -> Iterator[int]:
    """Runs a process that holds the lock until the block ends, and optionally a child of it that lives longer."""
    life_lock.let_live(segment.fd, byte)
    said, says = os.pipe()
    lives, ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ends)
        is_held = life_lock.hold(segment.path, byte)
        if forks and os.fork():
            os.write(says, b"1" if is_held else b"0")
            signal.pause()
        if not forks:
            os.write(says, b"1" if is_held else b"0")
        os.read(lives, 1)  # blocks until the test is over
        os._exit(0)
    os.close(lives)
    try:
        assert os.read(said, 1) == b"1"
        yield pid
    finally:
        for fd in (said, says, ends):
            os.close(fd)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_lock_is_visible_until_its_process_has_ended(control: Segment) -> None:
    assert not life_lock.is_held(control.fd)
    with holder(control) as pid:
        assert life_lock.is_held(control.fd, BYTE)
        assert life_lock.is_held(control.fd)
        assert not life_lock.is_held(control.fd, BYTE + 1)
        os.kill(pid, signal.SIGSTOP)
        assert not life_lock.wait_until_free(control.fd, BYTE, 0.0)
        os.kill(pid, signal.SIGKILL)  # SIGKILL also ends a stopped process
        assert life_lock.wait_until_free(control.fd, BYTE, 60.0)
    assert not life_lock.is_held(control.fd)


def test_actor_ends_with_its_agent(control: Segment) -> None:
    with holder(control) as pid:
        life_lock.let_live(control.fd, BYTE + 2)
        life_lock.let_end(control.fd, BYTE + 2)  # another actor's byte
        assert life_lock.is_held(control.fd, BYTE)
        life_lock.let_end(control.fd, BYTE)
        assert os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 1
        assert not life_lock.is_held(control.fd)


def test_child_forked_by_an_actor_does_not_keep_the_lock(control: Segment) -> None:
    with holder(control, forks=True) as pid:
        assert life_lock.is_held(control.fd)
        end(pid)
        assert life_lock.wait_until_free(control.fd, BYTE, 60.0)


def test_lock_is_not_taken_if_unreachable_or_held_already(control: Segment) -> None:
    assert not life_lock.hold(control.path + "-", BYTE)
    with holder(control):
        assert not life_lock.hold(control.path, BYTE)


class RecordingMethod:
    """A method of an actor that records its calls."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def remote(self, *argument: Any) -> str:
        self.asked.append(argument)
        return "ref"


class Actor:
    def __init__(self) -> None:
        self.work = RecordingMethod()


def cluster(control: Segment, actor: Any, *, is_seeded: bool = True) -> ActorSet:
    agent_config = AgentConfig((), "auto", (), is_seeded, 1, 0, 0, 60.0)
    made = ActorSet(agent_config, np.empty(0, np.uint8), [ActorSetting(LINK, (), AREA, 4 * AREA)], lambda: None, control.fd)
    made._actors[0], made._lock_offsets[actor] = actor, BYTE
    return made


def test_slots_are_offered_only_to_an_actor_that_locks_this_segment(control: Segment) -> None:
    actor = Actor()
    ours = cluster(control, actor)
    task = part([1], 0, 1)._replace(slot=Slot(0, control.path, 0, NBYTES, b""))
    copy = Segment.create(f"{control.name[: -len('control')]}payload-0", NBYTES)
    try:
        shutil.copy(control.path, copy.path)
        with holder(copy):  # the process has found the copy and takes it for the segment
            assert not ours.can_write_ring(0)
            assert ours._ask(actor, "work", (task,)).argument[0].slot is None
    finally:
        copy.close()
    with holder(control):
        assert ours.can_write_ring(0)
        assert ours._ask(actor, "work", (task,)).argument == (task,)


class RayTaskError(Exception):
    """Has the name of Ray's exception, which is matched by name."""


class FakeRay:
    """Replaces Ray for the agent: answers never arrive, and the first kill of an actor fails."""

    def __init__(self, error: Exception, pid: int) -> None:
        self.error, self.pid, self.num_kills = error, pid, 0

    def get(self, ref: Any) -> Any:
        raise self.error

    def kill(self, actor: Any) -> None:
        self.num_kills += 1
        if self.num_kills == 2 and self.pid:
            os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    def planted(error: Exception, pid: int) -> FakeRay:
        made, module, exceptions = FakeRay(error, pid), ModuleType("ray"), ModuleType("ray.exceptions")
        names = ("RayActorError", "ObjectLostError", "NodeDiedError", "WorkerCrashedError", "OutOfMemoryError")
        for name in names:
            setattr(exceptions, name, ConnectionError)
        exceptions.RayTaskError = RayTaskError  # type: ignore[attr-defined]  # of a module made here
        module.get, module.kill, module.exceptions = made.get, made.kill, exceptions  # type: ignore[attr-defined]  # as above
        monkeypatch.setitem(sys.modules, "ray", module)
        monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
        monkeypatch.setattr(actor_set, "LOG_S", 0.0)
        return made

    return planted


@pytest.mark.parametrize(("error", "raised"), [(ConnectionError("it is gone"), WorkerDied), (MemoryError("no"), MemoryError)])
def test_an_actors_task_is_given_up_once_it_can_no_longer_write(
    error: Exception, raised: Any, control: Segment, fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    actor = Actor()
    ours = cluster(control, actor, is_seeded=False)
    with holder(control) as pid:
        ray = fake(error, pid)
        os.kill(pid, signal.SIGSTOP)
        with caplog.at_level(logging.WARNING, "shmload"), pytest.raises(raised):
            ours.result(0, Call(actor, "ref", "work", (part([1], 0, 1),)))
        assert ray.num_kills >= 2
        assert not life_lock.is_held(control.fd, BYTE)
    assert "and still runs: its rows are not reused until it has ended" in caplog.messages[0]


def test_actor_that_ray_cannot_kill_ends_itself(control: Segment, fake: Any) -> None:
    actor = Actor()
    with holder(control):
        fake(ConnectionError("its raylet is gone"), 0)
        with pytest.raises(WorkerDied):
            cluster(control, actor, is_seeded=False).result(0, Call(actor, "ref", "work", (part([1], 0, 1),)))
        assert not life_lock.is_held(control.fd, BYTE)


def test_actor_that_reports_its_task_as_over_is_not_killed(control: Segment, fake: Any) -> None:
    actor = Actor()
    with holder(control) as pid:
        ray = fake(RayTaskError("of the task"), pid)
        with pytest.raises(RayTaskError):
            cluster(control, actor).result(0, Call(actor, "ref", "work", (part([1], 0, 1),)))
        assert ray.num_kills == 0


def test_end_of_an_actor_without_a_lock_is_not_awaited(control: Segment, fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    actor = Actor()
    ray = fake(ConnectionError("it is gone"), 0)
    with pytest.raises(WorkerDied):
        cluster(control, actor, is_seeded=False).result(0, Call(actor, "ref", "work", (part([1], 0, 1),)))
    assert (ray.num_kills, caplog.messages) == (1, [])


def pool(control: Segment) -> RayPool:
    nothing: Any = None
    made = RayPool(AgentConfig((LINK, LINK), "auto", (), True, 1, 0, 0, 60.0), nothing, nothing, control)
    process = subprocess.Popen(["sleep", "1000"])
    made._agent = Child(process.pid, process.wait)
    made._children.add(made._agent)
    made._agent.kill()
    return made


def test_agents_death_is_reported_once_none_of_its_actors_can_write(
    control: Segment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_pool, "LOG_S", -1.0)
    ours = pool(control)
    with holder(control) as pid:
        with caplog.at_level(logging.WARNING, "shmload"):
            assert ours.deaths() == []
        assert caplog.messages == ["the Ray agent has ended, but some of its actors still run: waiting until Ray has ended them"]
        end(pid)
        assert [death.worker_id for death in ours.deaths()] == [0, 1]


def test_killed_agents_actors_have_ended_when_kill_returns(control: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([True, True, False])
    monkeypatch.setattr(life_lock, "is_held", lambda fd, byte=None: next(looks))
    ours = pool(control)
    assert ours.kill(1) == Death(1, ours.pids[0], -9)
    assert next(looks, None) is None


# ------------------------------------------------------------ the actor's side


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(life_lock, "hold", lambda path, byte: True)
    return decoder(InPlace(300))


def slot_of(worker: Any, segment: Segment, offset: int = 0, nbytes: int = NBYTES // 2, number: int = 0) -> Slot:
    return Slot(number, segment.path, offset, nbytes, worker._actor_ring.layout.dumps())


def written(worker: Any, slot: Slot, keys: list[int]) -> Any:
    return worker.work(part(keys, 0, len(keys))._replace(slot=slot))


@pytest.mark.parametrize("kind", ["shm", "memfd"])
def test_actor_writes_into_the_slot_and_sends_no_rows(kind: Any, writer: Any) -> None:
    segment = Segment.create(f"shmload-{os.getuid()}-00000000beef-{os.getpid()}-payload-0", NBYTES, kind=kind)
    try:
        for at, keys in ((0, [3, 1, 4]), (NBYTES // 2, [5, 9]), (0, [2])):
            outcome = written(writer, slot_of(writer, segment, at), keys)
            assert (outcome.own, outcome.payload.nbytes) == (DONE, 0)
            assert outcome.num_written > 0
            images = np.frombuffer(os.pread(segment.fd, 20 * len(keys), at), np.uint8).reshape(-1, 20)
            assert images.tolist() == [[key] * 20 for key in keys]
        assert np.frombuffer(fields(writer, part([7], 0, 1))[0], np.uint8).tolist() == [7] * 20  # in private memory again
        assert os.pread(segment.fd, 20, 0) == bytes([2] * 20)
    finally:
        segment.close()


@pytest.mark.parametrize("change", [{"nbytes": 64}, {"path": "/dev/shm/none"}, {"layout": b"another"}])
def test_rows_that_do_not_fit_the_slot_are_sent(change: Any, writer: Any, control: Segment) -> None:
    outcome = written(writer, slot_of(writer, control)._replace(**change), [6] * 8)
    assert (outcome.own, outcome.num_written) == (DONE, 0)
    assert outcome.payload[:160].tolist() == [6] * 160
    assert os.pread(control.fd, NBYTES, 0) == bytes(NBYTES)


def test_actor_without_the_lock_writes_nothing(control: Segment) -> None:
    worker = decoder(InPlace(300))
    assert written(worker, slot_of(worker, control), [6]).num_written == 0
    assert os.pread(control.fd, NBYTES, 0) == bytes(NBYTES)


def test_segment_without_slots_is_unmapped(writer: Any, control: Segment) -> None:
    other = Segment.create(f"{control.name[: -len('control')]}payload-1", NBYTES)
    try:
        for segment in (control, other):
            assert written(writer, slot_of(writer, segment), [1]).num_written
        assert list(writer._segments) == [other.path]
    finally:
        other.close()


def test_slot_that_cannot_be_mapped_fails_the_task(writer: Any, control: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, nbytes: int, **options: Any) -> Any:
        raise OSError(12, "mmap: no memory")

    monkeypatch.setattr(worker_actor, "Mapping", failing)
    with pytest.raises(OSError, match="mmap: no memory"):  # Ray passes it on to the agent
        written(writer, slot_of(writer, control), [1])


def test_slot_without_memory_fails_the_task(writer: Any, control: Segment) -> None:
    assert written(writer, slot_of(writer, control), [1]).num_written
    os.truncate(control.fd, 1 << 16)  # memory beyond the file's end cannot be reserved, as when /dev/shm is full
    outcome = written(writer, slot_of(writer, control, NBYTES // 2), [1])
    failure = Failure.loads(outcome.error)
    assert (outcome.own, failure.kind) == (ERROR, RingTooSmall)
    assert "other processes have taken them" in failure.text
