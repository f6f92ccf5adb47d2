"""A forked child drops, keeps or writes its copies of batches, and the parent its own: neither sees anything of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shmload._core.trainer import Lease
from shmload.shm import fork_copies

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Child:
    """A forked process that does `first` at once, waits to be told, does `then`, and exits 0 if both were true."""

    def __init__(self, first: Callable[[], Any], then: Callable[[], Any] = lambda: True) -> None:
        told, self._tell = os.pipe()
        self._said, say = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._tell)
                is_right = first()
                os.write(say, b".")
                os.read(told, 1)
                code = 0 if is_right and then() else 2
            finally:
                os._exit(code)
        os.close(told)
        os.close(say)

    def wait_for_first(self) -> None:
        """Until `first` is done."""
        os.read(self._said, 1)
        os.close(self._said)

    def end(self) -> int:
        """Lets it do `then`; its exit code."""
        os.close(self._tell)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _drops(batch: dict[str, Any]) -> bool:
    batch.clear()
    gc.collect()
    return True


def _is(expected: dict[str, Any], batch: dict[str, Any]) -> bool:
    return all(torch.equal(expected[k], batch[k]) for k in expected)


def test_a_child_that_drops_its_copies_frees_nothing_of_the_parents(stream: Any) -> None:
    batch = stream.next()
    expected = stream.expected()
    child = Child(lambda: _drops(batch))
    child.wait_for_first()
    assert stream.num_leased == 1
    assert _is(expected, batch)
    stream.run_on()
    assert child.end() == 0
    assert _is(expected, batch)
    batch.clear()
    assert stream.num_leased == 0


def test_a_child_that_keeps_its_copies_holds_nothing_of_the_parents(stream: Any) -> None:
    batch = stream.next()
    child = Child(lambda: bool(batch))
    child.wait_for_first()
    batch.clear()
    assert stream.num_leased == 0
    assert child.end() == 0


def test_a_childs_copy_stays_right_when_the_parent_goes_on(stream: Any) -> None:
    batch = stream.next()
    view = batch["x"][1:].numpy()
    expected = stream.expected()
    child = Child(lambda: True, lambda: _is(expected, batch) and np.array_equal(view, expected["x"][1:]))
    batch.clear()
    view = None
    assert stream.num_leased == 0
    stream.run_on()
    assert child.end() == 0


def test_a_child_sees_the_bytes_of_the_moment_of_the_fork(stream: Any) -> None:
    batch = stream.next()
    expected = stream.expected()
    child = Child(lambda: True, lambda: _is(expected, batch))
    batch["x"].fill_(-1)
    assert child.end() == 0


def test_what_a_child_writes_stays_its_own(stream: Any) -> None:
    batch = stream.next()
    expected = stream.expected()
    child = Child(lambda: bool(torch.all(batch["x"].fill_(-1) == -1)))
    assert child.end() == 0
    assert _is(expected, batch)


def test_several_held_batches_are_all_copied_and_all_returned(make_stream: Any) -> None:
    stream = make_stream(prefetch_factor=4)
    held = [(stream.next(), stream.expected()) for _ in range(3)]
    child = Child(lambda: True, lambda: all(_is(expected, batch) for batch, expected in held))
    for batch, _ in held:
        batch.clear()
    assert stream.num_leased == 0
    stream.run_on()
    assert child.end() == 0


def test_a_grandchild_sees_what_its_parent_saw(stream: Any) -> None:
    batch = stream.next()
    expected = stream.expected()

    def has_a_right_child() -> bool:
        child = Child(lambda: _is(expected, batch))
        batch["x"].fill_(-1)
        return child.end() == 0

    child = Child(lambda: True, has_a_right_child)
    batch.clear()
    stream.run_on()
    assert child.end() == 0


def test_a_batch_outlives_its_loader_in_a_child_too(make_stream: Any) -> None:
    stream = make_stream()
    batch, expected = stream.next(), stream.expected()
    stream.loader.close()
    del stream
    gc.collect()
    child = Child(lambda: True, lambda: _is(expected, batch))
    batch["x"].fill_(-1)
    batch.clear()
    gc.collect()
    assert child.end() == 0


def test_a_child_without_memory_for_copies_keeps_the_slots_until_it_ends(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = stream.next()
    expected = stream.expected()
    monkeypatch.setattr(fork_copies, "GRACE_S", 0)
    with monkeypatch.context() as patched:
        patched.setattr(fork_copies, "_private", lambda lease: False)
        child = Child(lambda: True, lambda: _is(expected, batch))
    batch.clear()
    stream.run_on()
    assert stream.num_leased == 1
    assert fork_copies.release_copied() == 1
    assert child.end() == 0
    assert fork_copies.release_copied() == 0
    assert stream.num_leased == 0


def test_a_child_that_dies_before_it_has_copied_holds_nothing(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = stream.next()
    monkeypatch.setattr(fork_copies, "_private", lambda lease: os._exit(7))
    pid = os.fork()
    if pid == 0:
        os._exit(1)  # it has copied
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
    assert len(now - before) <= 1  # what `Child` reads from


def test_the_pools_own_forks_copy_nothing(stream: Any, make_stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Lease]] = []
    monkeypatch.setattr(fork_copies, "live_leases", lambda: asked.append([]) or [])
    batch = stream.next()
    other = make_stream()
    other.next()
    assert asked == []
    assert Child(lambda: True).end() == 0
    assert asked == [[]]
    assert batch


def test_a_child_cannot_use_the_parents_loader(stream: Any) -> None:
    def is_refused() -> bool:
        try:
            stream.ring.hold()
        except RuntimeError as error:
            return "create a new loader in a forked child" in str(error)
        return False

    assert Child(is_refused).end() == 0


def test_a_child_leaves_the_shared_records_alone(stream: Any) -> None:
    batch = stream.next()
    child = Child(lambda: _drops(batch) and stream.ring.num_leased >= 0)
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


def ended(program: str) -> tuple[int, str, str]:
    """How a program ends in a process of its own: its code, what it printed, and what it complained of."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow(reason="a program in a process of its own, which imports torch")
def test_a_child_that_exits_like_any_program_prints_nothing_and_harms_nothing() -> None:
    assert ended(PROGRAM) == (0, "right\n", "")


GENERATORS = """
from shmload import ShmLoader
from shmload.pipeline import Items

def batches(**options):
    with ShmLoader(list(range(64)), batch_size=4, num_workers=1, **options) as loader:
        yield from loader

found = [batches(seed=1), batches(), iter(Items(range(64)).map(int, workers=1).batch(4)), iter(Items(range(64)).filter(bool).batch(4))]
print([len(next(each)) for each in found])
"""


@pytest.mark.slow(reason="a program in a process of its own, which imports torch")
def test_a_program_that_ends_amid_generators_over_loaders_prints_nothing() -> None:
    """Their `with` closes the loader when Python has taken its modules apart."""
    assert ended(GENERATORS) == (0, "[4, 4, 4, 4]\n", "")
