"""`shmload top` as users and scripts see it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from typing import Any

import pytest
from typer.testing import CliRunner

from shmload.cli import app
from shmload.cli.terminal import WIDE
from shmload.engine.ring_reader import HostRings, RingReader
from tests.faults.faults_kit import DEADLINE_S, await_readable, program_env

slow = pytest.mark.slow(reason="looks at a trainer that is a process of its own and imports torch")
NOBODY = "4194305"  # above the largest possible process id


def top(*words: object, **environment: str) -> Any:
    return CliRunner().invoke(app, ["top", *map(str, words)], env=environment)


@slow
def test_once_as_json_prints_one_object(still: int) -> None:
    done = top("--once", "--json", "--pid", still, "--interval", 0.05)
    assert done.exit_code == 0
    look = json.loads(done.stdout)
    (loader,) = look["loaders"]
    assert (loader["pid"], loader["bottleneck"], loader["slots"]["leased"]) == (still, "trainer", 2)
    assert 0.05 <= loader["interval_s"] < loader["age_s"]
    assert set(look) == {"time_s", "loaders", "totals", "leftovers", "unreadable"}


@slow
def test_once_prints_one_view_of_the_given_width(still: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # test runners set it
    done = top("--once", "--pid", still, "--interval", 0.01, COLUMNS="80")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("shmload top  1 loader, 2 workers  0.0 samples/s")
    assert max(map(len, lines)) == 80
    assert max(map(len, top("--once", "--pid", still, "--interval", 0.01).stdout.splitlines())) == WIDE


def test_process_without_a_loader_is_named_and_exits_with_2() -> None:
    done = top("--once", "--pid", NOBODY)
    assert done.exit_code == 2
    assert "shmload top  0 loaders, 0 workers" in done.stdout
    assert f"no loader of process {NOBODY} is running" in done.stdout
    as_json = top("--once", "--json", "--pid", NOBODY)
    assert (as_json.exit_code, json.loads(as_json.stdout)["loaders"]) == (2, [])


def test_host_without_a_loader_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingReader, "find", lambda: HostRings([], []))
    done = top("--once")
    assert done.exit_code == 0
    assert "no loader is running" in done.stdout


@pytest.mark.slow(reason="runs the command as a process")
@pytest.mark.parametrize("form", [["--json"], []])
def test_without_a_terminal_it_runs_until_interrupted(form: list[str]) -> None:
    words = [sys.executable, "-m", "shmload", "top", "--pid", NOBODY, "--interval", "0.01", *form]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=program_env()) as program:
        assert program.stdout is not None
        try:
            for _ in range(6):
                await_readable(program.stdout.fileno())
                line = program.stdout.readline().decode()
                assert (json.loads(line)["loaders"] == []) if form else line
            program.send_signal(signal.SIGINT)
            program.stdout.read()
            assert program.wait(DEADLINE_S) == 0
        finally:
            program.kill()


@pytest.mark.slow(reason="runs the command as a process")
def test_interrupt_in_a_terminal_ends_it_and_restores_the_terminal() -> None:
    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        words = [sys.executable, "-m", "shmload", "top", "--pid", NOBODY, "--interval", "0.05"]
        with subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env={**program_env(), "TERM": "xterm"}
        ) as program:
            try:
                text = b""
                while f"no loader of process {NOBODY} is running".encode() not in text:
                    await_readable(ours)
                    text += os.read(ours, 4096)
                program.send_signal(signal.SIGINT)
                assert program.wait(DEADLINE_S) == 0
            finally:
                program.kill()
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)
