"""Long commands show a progress bar on a terminal, and none in a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmload import ShmLoader
from shmload.cli.terminal import progress_bar

Written = Callable[[str], Path]


def on_terminal(*arguments: object) -> tuple[int, str, str]:
    """Runs a command whose stderr is a terminal. Returns the exit code, stdout and the terminal's output."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "shmload", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    drawn = b""
    while True:
        try:
            drawn += os.read(ours, 65536)
        except OSError:  # the other end is closed, and everything was read
            break
    os.close(ours)
    return done.returncode, done.stdout, drawn.decode()


@pytest.fixture
def arguments(written: Written, tmp_path: Path) -> Callable[[str], list[Any]]:
    """Returns a function that makes the arguments of a command."""

    def make(command: str) -> list[Any]:
        if command != "verify":
            return [written("tar"), written("TFRecord")]
        for _ in ShmLoader([(x,) for x in range(6)], 2, seed=1, audit=tmp_path / "audit"):
            pass
        return [tmp_path / "audit"]

    return make


@pytest.mark.slow(reason="also runs the command in another process")
@pytest.mark.parametrize(("name", "count"), [("index", "/2"), ("inspect", "/2"), ("verify", "/1")])
def test_bar_is_shown_on_a_terminal_and_stdout_is_unchanged(
    name: str, count: str, arguments: Callable[[str], list[Any]], command: Callable[..., Any]
) -> None:
    given = arguments(name)
    piped = command(name, *given)
    code, out, drawn = on_terminal(name, *given)
    assert (piped.exit_code, piped.stderr) == (0, "")
    assert code == 0
    assert count in drawn
    if name != "index":  # shows how long it took
        assert out == piped.stdout


def test_bar_shows_the_names_of_items(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(visible=False) as bar:
        (task,) = bar.progress.tasks
        seen = [(item, task.description, task.completed) for item in bar.over(["a", "b"], str.upper)]
    assert seen == [("a", "A", 0), ("b", "B", 1)]
    assert (task.completed, task.total) == (2, 2)
    assert capsys.readouterr() == ("", "")
