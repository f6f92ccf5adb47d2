"""Child processes: their ends are noticed, their exit codes are known, and none is left over."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable

import pytest

from shmload.processes.child import Child, Children
from shmload.processes.exit_codes import UNKNOWN_EXIT


def started(code: int = 0, until: int | None = None, setup: Callable[[], object] = lambda: None) -> int:
    """Starts a process that exits with `code`, after the pipe `until` is closed if given, and returns its id."""
    pid = os.fork()
    if pid == 0:
        setup()
        if until is not None:
            os.read(until, 1)
        os._exit(code)
    return pid


@pytest.fixture
def open_pipe() -> int:
    """Returns a descriptor that is never readable during the test, because both ends stay open."""
    reader, _ = os.pipe()
    return reader


def test_exit_code_is_reported() -> None:
    assert Child(started(7)).reap() == 7


def test_signal_is_a_negative_exit_code(open_pipe: int) -> None:
    child = Child(started(until=open_pipe))
    assert child.lives
    assert child.kill() == -signal.SIGKILL
    assert not child.lives
    assert (child.reap(), child.reap()) == (-signal.SIGKILL, -signal.SIGKILL)


def test_exit_code_that_the_program_has_taken_is_unknown(open_pipe: int) -> None:
    child = Child(started(until=open_pipe))
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    assert child.reap() == UNKNOWN_EXIT


def test_process_that_has_been_taken_before_it_is_watched_has_ended() -> None:
    pid = started()
    os.waitpid(pid, 0)
    child = Child(pid)
    children: Children[Child] = Children()
    children.add(child)
    assert children.ended() == [child]
    child.send(signal.SIGTERM)
    assert children.reap(child) == UNKNOWN_EXIT


def test_exit_code_is_unknown_if_the_program_ignores_sigchld() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert Child(started(7)).reap() == UNKNOWN_EXIT
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_process_that_cannot_be_watched_is_killed(open_pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(24, "Too many open files")

    pid = started(until=open_pipe)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Child(pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def reaping(children: Children[Child]) -> Callable[[float | None], None]:
    def look(timeout_s: float | None) -> None:
        for child in children.wait(timeout_s)[0]:
            children.reap(child)

    return look


def test_children_that_do_not_end_in_time_are_killed(open_pipe: int) -> None:
    children: Children[Child] = Children()
    reader, writer = os.pipe()

    def deaf() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(writer, b"x")

    polite, stubborn = Child(started(until=open_pipe)), Child(started(until=open_pipe, setup=deaf))
    os.read(reader, 1)
    for child in (polite, stubborn):
        children.add(child)
        child.ask_to_end()
    assert select.select([polite.pidfd], [], [], 60)[0]  # on a busy machine its end could take longer than 0.2 s
    assert children.end(0.2, reaping(children)) == [stubborn]
    assert (polite.exit_code, stubborn.exit_code, len(children)) == (-signal.SIGTERM, -signal.SIGKILL, 0)
    os.close(reader)
    os.close(writer)


def test_stopped_child_ends_when_asked(open_pipe: int) -> None:
    children: Children[Child] = Children()
    child = Child(started(until=open_pipe))
    children.add(child)
    child.send(signal.SIGSTOP)
    os.waitid(os.P_PIDFD, child.pidfd, os.WSTOPPED)
    child.ask_to_end()
    assert children.end(60.0, reaping(children)) == []
    assert child.exit_code == -signal.SIGTERM


def test_interrupt_while_children_end_kills_and_reaps_them(open_pipe: int) -> None:
    children: Children[Child] = Children()
    child = Child(started(until=open_pipe))
    children.add(child)
    look = reaping(children)

    def interrupted(timeout_s: float | None) -> None:
        if timeout_s is not None:
            raise KeyboardInterrupt
        look(None)

    with pytest.raises(KeyboardInterrupt):
        children.end(60.0, interrupted)
    assert child.exit_code == -signal.SIGKILL


def test_other_descriptors_end_a_wait(open_pipe: int) -> None:
    children: Children[Child] = Children()
    reader, writer = os.pipe()
    children.watch(reader)
    os.write(writer, b"x")
    assert children.wait(None) == ([], {reader})
    children.unwatch(reader)
    assert children.wait(0) == ([], set())
    os.close(reader)
    os.close(writer)


def test_popen_has_its_exit_code() -> None:
    process = subprocess.Popen(["false"])
    assert Child(process.pid, process.wait).reap() == 1
    assert process.returncode == 1
