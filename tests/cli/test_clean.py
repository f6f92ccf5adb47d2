"""`shmload clean` lists by default, removes on request, and never removes memory that is in use or of another user."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shmload.shm import janitor
from shmload.shm.segment_group import SegmentGroup

Command = Callable[..., Any]
ME = pwd.getpwuid(os.getuid()).pw_name
STEM = f"shmload-{os.getuid()}-c1ea00000000-0"


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Creates what a loader of process 4711 would have left, in a folder that no other program cleans."""
    control, payload = tmp_path / f"{STEM}-control", tmp_path / f"{STEM}-payload-0"
    payload.write_bytes(bytes(1 << 20))
    control.write_bytes(b"SHMLOLD1" + bytes(88) + (4711).to_bytes(8, "little") + bytes(3992))
    monkeypatch.setattr(janitor, "find_leftovers", partial(janitor.find_leftovers, str(tmp_path)))
    monkeypatch.setattr(janitor, "sweep", partial(janitor.sweep, str(tmp_path)))
    return [control, payload]


def own_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(STEM)]


def test_leftovers_are_only_listed_by_default(dead: list[Path], command: Command) -> None:
    done = command("clean")
    assert done.exit_code == 0
    (line,) = own_lines(done.stdout)
    assert line.startswith(f"{STEM}: of {ME}, process 4711, ")
    assert line.endswith(" s old, 2 files, 1.0 MiB; its lock is free, so its owner is dead")
    assert done.stdout.splitlines()[-1].endswith("can be freed: shmload clean --yes")
    assert all(path.exists() for path in dead)


def test_leftovers_are_removed_with_yes(dead: list[Path], command: Command) -> None:
    done = command("clean", "--yes")
    assert done.exit_code == 0
    assert own_lines(done.stdout)
    assert done.stdout.splitlines()[-1].startswith("removed ")
    assert not any(path.exists() for path in dead)


@pytest.mark.parametrize("removed", [False, True])
def test_json_has_everything(dead: list[Path], command: Command, removed: bool) -> None:
    done = command("clean", "--json", *(["--yes"] if removed else []))
    (found,) = [one for one in json.loads(done.stdout) if one["stem"] == STEM]
    age_s = found.pop("age_s")
    assert -1 < age_s < 120
    assert found == {
        "stem": STEM,
        "owner": ME,
        "uid": os.getuid(),
        "pid": 4711,
        "nbytes": (1 << 20) + 4096,
        "paths": [str(path) for path in dead],
        "why": "its lock is free, so its owner is dead",
        "removed": removed,
        "error": None,
    }
    assert removed == (not dead[0].exists())


def test_no_leftovers_are_reported(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "find_leftovers", list)
    assert command("clean").stdout == "dead loaders have left nothing\n"


def test_memory_of_a_running_loader_is_kept(command: Command) -> None:
    group = SegmentGroup()
    control = group.segment("control", 4096)
    assert group.stem not in command("clean", "--yes").stdout
    assert os.path.exists(control.path)
    group.close()


def test_files_that_cannot_be_removed_are_reported(dead: list[Path], command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        done = command("clean", "--yes")
    assert done.exit_code == 1
    assert f"shmload clean: {dead[1]}: Operation not permitted" in done.stderr
    assert dead[0].exists()


@pytest.mark.parametrize(
    ("age_s", "text"), [(-1, "0 s"), (5, "5 s"), (600, "10 min"), (4 * 3600, "4 hours"), (3 * 86400, "3 days")]
)
def test_ages_are_human_readable(age_s: int, text: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    one = janitor.Leftover(STEM, ("x",), 1, age_s, 987654, 0, "so")
    monkeypatch.setattr(janitor, "find_leftovers", lambda: [one])
    assert f"{STEM}: of uid 987654, process unknown, {text} old, 1 file, 1 byte; so" == command("clean").stdout.splitlines()[0]
