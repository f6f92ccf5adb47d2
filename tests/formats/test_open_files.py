"""Files that libraries hold open for datasets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shmload.formats import open_files
from shmload.formats.open_files import OpenFiles

closed: list[str] = []


class File:
    """A file that records when it is closed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __del__(self) -> None:
        closed.append(os.path.basename(self.path))


class Files(OpenFiles):
    def _opened(self, number: int) -> Any:
        return File(self._paths[number])


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Returns four files, of which two may be open."""
    monkeypatch.setattr(open_files, "max_open", lambda: 2)
    monkeypatch.setattr(open_files, "_recent", open_files._RecentFiles())
    closed.clear()
    for name in "abcd":
        (tmp_path / name).touch()
    return Files([str(tmp_path / name) for name in "abcd"])


def test_file_used_least_recently_is_closed(files: Files) -> None:
    for number in (0, 1, 0, 2):
        assert files[number].path.endswith("abc"[number])
    assert closed == ["b"]


def test_limit_counts_the_files_of_all_datasets(files: Files) -> None:
    others = Files(files._paths)
    for each, number in ((files, 0), (others, 0), (others, 1)):
        assert each[number].path.endswith("ab"[number])
    assert (closed, list(files.are_open), list(others.are_open)) == (["a"], [], [0, 1])


def test_file_that_is_being_read_is_closed_after_that(files: Files) -> None:
    reading = files[0]
    _ = files[1], files[2]
    assert not closed
    del reading
    assert closed == ["a"]


def test_forked_child_does_not_close_its_parents_files(files: Files) -> None:
    for number in (0, 1):
        assert files[number].path.endswith("ab"[number])
    pid = os.fork()
    if not pid:
        own = Files(files._paths)
        paths = [own[number].path[-1] for number in (2, 3, 0)]
        os._exit(0 if (paths, closed) == (["c", "d", "a"], ["c"]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
