"""A forked child and its parent drop, keep or write their copies of batches without affecting each other."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shmload._core.trainer import Lease
from shmload.processes import private_fds
from shmload.shm import fork_copies

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Child:
    """A forked process that calls `first`, waits for `end()`, calls `then`, and exits with 0 if both returned true."""

    def __init__(self, first: Callable[[], Any], then: Callable[[], Any] = lambda: True) -> None:
        go_on, self._go_on = os.pipe()
        self._said, say = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._go_on)
                is_right = first()
                os.write(say, b".")
                os.read(go_on, 1)
                code = 0 if is_right and then() else 2
            finally:
                os._exit(code)
        os.close(go_on)
        os.close(say)

    def wait_for_first(self) -> None:
        """Waits until `first` has returned."""
        os.read(self._said, 1)
        os.close(self._said)

    def end(self) -> int:
        """Lets the child call `then`, and returns its exit code."""
        os.close(self._go_on)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _released(batch: dict[str, Any]) -> bool:
    batch.clear()
    gc.collect()
    return True


def _equals(expected: dict[str, Any], batch: dict[str, Any]) -> bool:
    return all(torch.equal(expected[k], batch[k]) for k in expected)


def test_child_that_releases_its_copies_frees_nothing_in_the_parent(stream: Any) -> None:
    batch = stream.next()
    expected = stream.expected()
    child = Child(lambda: _released(batch))
    child.wait_for_first()
    assert stream.num_leased == 1
    assert _equals(expected, batch)
    stream.run_on()
    assert child.end() == 0
    assert _equals(expected, batch)
    batch.clear()
    assert stream.num_leased == 0


def test_child_that_keeps_its_copies_holds_no_slot_of_the_parent(stream: Any) -> None:
    batch = stream.next()
    child = Child(lambda: bool(batch))
    child.wait_for_first()
    batch.clear()
    assert stream.num_leased == 0
    assert child.end() == 0


def test_copy_in_a_child_stays_correct_when_the_parent_continues(stream: Any) -> None:
    batch = stream.next()
    view = batch["x"][1:].numpy()
    expected = stream.expected()
    child = Child(lambda: True, lambda: _equals(expected, batch) and np.array_equal(view, expected["x"][1:]))
    batch.clear()
    view = None
    assert stream.num_leased == 0
    stream.run_on()
    assert child.end() == 0


def test_child_sees_the_bytes_at_the_time_of_the_fork(stream: Any) -> None:
    batch = stream.next()
    expected = stream.expected()
    child = Child(lambda: True, lambda: _equals(expected, batch))
    batch["x"].fill_(-1)
    assert child.end() == 0


def test_writes_of_a_child_are_private(stream: Any) -> None:
    batch = stream.next()
    expected = stream.expected()
    child = Child(lambda: bool(torch.all(batch["x"].fill_(-1) == -1)))
    assert child.end() == 0
    assert _equals(expected, batch)


def test_several_kept_batches_are_all_copied_and_returned(make_stream: Any) -> None:
    stream = make_stream(prefetch_factor=4)
    held = [(stream.next(), stream.expected()) for _ in range(3)]
    child = Child(lambda: True, lambda: all(_equals(expected, batch) for batch, expected in held))
    for batch, _ in held:
        batch.clear()
    assert stream.num_leased == 0
    stream.run_on()
    assert child.end() == 0


def test_grandchild_sees_the_bytes_of_its_parent(stream: Any) -> None:
    batch = stream.next()
    expected = stream.expected()

    def has_correct_child() -> bool:
        child = Child(lambda: _equals(expected, batch))
        batch["x"].fill_(-1)
        return child.end() == 0

    child = Child(lambda: True, has_correct_child)
    batch.clear()
    stream.run_on()
    assert child.end() == 0


def test_batch_in_a_child_outlives_its_loader(make_stream: Any) -> None:
    stream = make_stream()
    batch, expected = stream.next(), stream.expected()
    stream.loader.close()
    del stream
    gc.collect()
    child = Child(lambda: True, lambda: _equals(expected, batch))
    batch["x"].fill_(-1)
    batch.clear()
    gc.collect()
    assert child.end() == 0


def test_child_without_memory_for_copies_keeps_the_slots_until_it_ends(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = stream.next()
    expected = stream.expected()
    monkeypatch.setattr(fork_copies, "GRACE_S", 0)
    with monkeypatch.context() as patched:
        patched.setattr(fork_copies, "_private", lambda lease: False)
        child = Child(lambda: True, lambda: _equals(expected, batch))
    batch.clear()
    stream.run_on()
    assert stream.num_leased == 1
    assert fork_copies.release_copied() == 1
    assert child.end() == 0
    assert fork_copies.release_copied() == 0
    assert stream.num_leased == 0


def test_child_that_dies_before_copying_holds_nothing(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = stream.next()
    monkeypatch.setattr(fork_copies, "_private", lambda lease: os._exit(7))
    pid = os.fork()
    if pid == 0:
        os._exit(1)  # the batch was copied
    monkeypatch.undo()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    batch.clear()
    assert fork_copies.release_copied() == 0
    assert stream.num_leased == 0


def test_forks_leave_no_descriptors(stream: Any) -> None:
    before = set(os.listdir("/proc/self/fd"))
    batch = stream.next()
    assert Child(lambda: True).end() == 0
    assert fork_copies.release_copied() == 0
    del batch
    now = set(os.listdir("/proc/self/fd"))
    assert len(now - before) <= 1  # the pipe of `Child`


def test_forks_of_workers_copy_nothing(stream: Any, make_stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Lease]] = []
    monkeypatch.setattr(fork_copies, "live_leases", lambda: asked.append([]) or [])
    batch = stream.next()
    other = make_stream()
    other.next()
    assert asked == []
    assert Child(lambda: True).end() == 0
    assert asked == [[]]
    assert batch


def test_child_cannot_use_the_loader_of_its_parent(stream: Any) -> None:
    def raises_error() -> bool:
        try:
            stream.ring.hold()
        except RuntimeError as error:
            return "create a new loader in a forked child" in str(error)
        return False

    assert Child(raises_error).end() == 0


def test_child_does_not_change_shared_records(stream: Any) -> None:
    batch = stream.next()
    child = Child(lambda: _released(batch) and stream.ring.num_leased >= 0)
    assert child.end() == 0
    assert stream.num_leased == 1


PROGRAM = """
import os, sys
import torch
from tests.engine.conftest import Stream

if __name__ == "__main__":
    stream = Stream()
    batch = stream.next()
    expected = stream.expected()
    pid = os.fork()
    if pid == 0:
        assert torch.equal(batch["x"], expected["x"])
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    stream.run_on()
    assert torch.equal(batch["x"], expected["x"])
    print("right")
"""


@pytest.mark.slow(reason="runs a program that imports torch")
def test_child_that_exits_normally_prints_nothing_and_changes_nothing(output_of: Callable[..., str]) -> None:
    assert output_of(PROGRAM, strict=False, deadline_s=120, warm=True) == "right\n"


GENERATORS = """
import multiprocessing
from shmload import ShmLoader
from shmload.pipeline import Items

def batches(**options):
    with ShmLoader(list(range(64)), batch_size=4, num_workers=1, **options) as loader:
        yield from loader

multiprocessing.set_start_method("fork")  # the default from Python 3.14 on imports the main module in workers
found = [batches(seed=1), batches(), iter(Items(range(64)).map(int, workers=1).batch(4)), iter(Items(range(64)).filter(bool).batch(4))]
print([len(next(each)) for each in found])
"""


@pytest.mark.slow(reason="runs a program that imports torch")
def test_program_that_ends_inside_generators_over_loaders_prints_nothing(output_of: Callable[..., str]) -> None:
    """Closes the loaders by the generators' `with`, which runs while Python dismantles its modules."""
    assert output_of(GENERATORS, strict=False, deadline_s=120, warm=True) == "[4, 4, 4, 4]\n"


def test_fork_that_two_threads_settle_at_once_is_settled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(writer)  # the child has copied its batches
    fork = fork_copies._Fork([], private_fds.keep(reader), writer)
    fork_copies._unsettled.append(fork)
    close = private_fds.close

    def close_later(fd: int) -> None:
        monkeypatch.setattr(private_fds, "close", close)
        fork_copies._await_child_copy(fork, 0)  # by another thread, between the two steps of this one
        close(fd)

    monkeypatch.setattr(private_fds, "close", close_later)
    fork_copies._await_child_copy(fork, 0)
    assert fork_copies.release_copied() == 0
    assert not private_fds.is_kept(fork.reader)
