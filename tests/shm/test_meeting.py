"""Meetings: one process at a time is at the board, even if processes die there; the files are removed with the last attendant."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shmload.shm import janitor
from shmload.shm.meeting import Meeting
from shmload.shm.names import SHM_DIR, STEM_PATTERN, meeting_stem
from tests.children import read_line, running, send_line, waits_for_a_lock

ATTENDANT = """
import sys
from shmload.shm.meeting import Meeting
meeting = Meeting(sys.argv[1])
with meeting.locked_board():
    print("inside", meeting.read().decode(), flush=True)
    input()
    meeting.write(b"was here")
print("outside", flush=True)
input()
meeting.leave()
"""


@pytest.fixture
def stem() -> str:
    return meeting_stem("test", secrets.token_hex(8))


def files_of(stem: str) -> set[str]:
    return {name.removeprefix(stem) for name in os.listdir(SHM_DIR) if name.startswith(stem)}


def test_board_has_the_latest_text(stem: str) -> None:
    meeting = Meeting(stem)
    with meeting.locked_board():
        assert meeting.read() == b""
        meeting.write(b"a long text")
        meeting.write(b"short")
    with meeting.locked_board():
        assert meeting.read() == b"short"
    meeting.leave()
    assert files_of(stem) == set()


def test_partial_board_is_empty(stem: str) -> None:
    meeting = Meeting(stem)
    with meeting.locked_board():
        meeting.write(b"what was said")
        os.truncate(f"{SHM_DIR}/{stem}-control", 20)
        assert meeting.read() == b""
    meeting.leave()


def test_last_to_leave_removes_the_files(stem: str) -> None:
    first, second = Meeting(stem), Meeting(stem)
    for meeting in (first, second):
        with meeting.locked_board():
            meeting.write(meeting.read() + b"x")
    first.leave()
    assert files_of(stem) == {"-control", "-gate"}
    with second.locked_board():
        assert second.read() == b"xx"
    second.leave()
    second.leave()
    assert files_of(stem) == set()


def test_one_process_is_at_the_board_at_a_time_and_the_next_reads_its_text(stem: str) -> None:
    with running(ATTENDANT, stem) as inside:
        assert read_line(inside) == "inside"
        with running(ATTENDANT, stem) as waiting:
            while not waits_for_a_lock(waiting):
                pass
            send_line(inside)
            assert read_line(inside) == "outside"
            assert read_line(waiting) == "inside was here"
            for child in (waiting, waiting, inside):
                send_line(child)
            assert [inside.wait(60), waiting.wait(60)] == [0, 0]
    assert files_of(stem) == set()


def test_death_at_the_board_admits_the_next_process(stem: str) -> None:
    meeting = Meeting(stem)
    with running(ATTENDANT, stem) as child:
        assert read_line(child) == "inside"
        child.kill()
        with meeting.locked_board():
            assert meeting.read() == b""
    meeting.leave()
    assert files_of(stem) == set()


def test_removed_file_is_not_used_for_a_meeting(stem: str) -> None:
    late, early = Meeting(stem), Meeting(stem)
    with late.locked_board():
        late.write(b"old")
    for part in ("control", "gate"):
        os.unlink(f"{SHM_DIR}/{stem}-{part}")
    with early.locked_board():
        assert early.read() == b""
        early.write(b"new")
    with late.locked_board():
        assert late.read() == b"new"
    late.leave()
    assert files_of(stem) == {"-control", "-gate"}
    early.leave()
    assert files_of(stem) == set()


def test_late_leaver_removes_nothing_of_a_later_meeting(stem: str) -> None:
    left_over, later = Meeting(stem), Meeting(stem)
    with left_over.locked_board():
        os.unlink(f"{SHM_DIR}/{stem}-control")
    with later.locked_board():
        pass
    left_over.leave()
    assert files_of(stem) == {"-control", "-gate"}
    later.leave()
    assert files_of(stem) == set()


def test_attended_meeting_is_never_swept(stem: str) -> None:
    assert STEM_PATTERN.fullmatch(f"{stem}-control")
    meeting = Meeting(stem)
    with meeting.locked_board():
        assert stem not in [found.stem for found in janitor.sweep(guard_s=-1)]
    assert stem not in [found.stem for found in janitor.sweep(guard_s=-1)]
    meeting.leave()


def test_janitor_removes_a_dead_meeting(stem: str) -> None:
    with running(ATTENDANT, stem) as child:
        read_line(child)
    assert files_of(stem) == {"-control", "-gate"}
    assert stem in [found.stem for found in janitor.sweep(guard_s=-1)]
    assert files_of(stem) == set()


def test_forked_child_neither_attends_nor_removes(stem: str) -> None:
    meeting = Meeting(stem)
    with meeting.locked_board():
        pass
    pid = os.fork()
    if pid == 0:
        meeting.leave()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert files_of(stem) == {"-control", "-gate"}
    meeting.leave()
    assert files_of(stem) == set()


def test_board_writable_by_others_is_not_used(stem: str) -> None:
    path = f"{SHM_DIR}/{stem}-control"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.chmod(path, 0o666)
    meeting = Meeting(stem)
    with meeting.locked_board():
        meeting.write(b"here")
    assert os.path.getsize(path) == 0
    meeting.leave()
    os.unlink(path)
    assert files_of(stem.removesuffix("0")) == set()


def test_leaving_does_not_wait_for_the_process_at_the_board(stem: str) -> None:
    leaving = Meeting(stem)
    with leaving.locked_board():
        pass
    inside = Meeting(stem)
    with inside.locked_board():
        leaving.leave()
        assert files_of(stem) == {"-control", "-gate"}
    inside.leave()
    assert files_of(stem) == set()


OTHER_UID = 65534  # the user "nobody"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user too")


@contextmanager
def other_users_files(paths: list[str], make: str) -> Iterator[None]:
    """Creates files at paths as another user, in a folder writable by all, in a separate process."""
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(OTHER_UID)
        os.setuid(OTHER_UID)
        for path in paths:
            PLACED[make](path)
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    try:
        yield
    finally:
        for path in paths:
            if os.path.isdir(path) and not os.path.islink(path):
                os.rmdir(path)
            else:
                os.unlink(path)


PLACED: dict[str, Callable[[str], object]] = {
    "file": lambda path: os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)),
    "closed file": lambda path: os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o000)),
    "link": lambda path: os.symlink("/dev/null", path),
    "folder": os.mkdir,
    "pipe": os.mkfifo,
}


@as_root
@pytest.mark.parametrize("make", PLACED)
@pytest.mark.parametrize("part", ["control", "gate"])
def test_files_of_another_user_do_not_prevent_a_meeting(stem: str, part: str, make: str) -> None:
    with other_users_files([f"{SHM_DIR}/{stem}-{part}"], make):
        first, second = Meeting(stem), Meeting(stem)
        with first.locked_board():
            first.write(b"here")
        with second.locked_board():
            assert second.read() == b"here"
        assert files_of(stem) == {f"-{part}"}
        first.leave()
        second.leave()
        assert files_of(stem.removesuffix("0")) == {f"0-{part}"}


@as_root
def test_meeting_continues_at_its_place_after_the_obstacle_is_removed(stem: str) -> None:
    first, second = Meeting(stem), Meeting(stem)
    with other_users_files([f"{SHM_DIR}/{stem}-control"], "file"), first.locked_board():
        first.write(b"here")
    with second.locked_board():
        assert second.read() == b"here"
    first.leave()
    second.leave()


@as_root
def test_error_if_all_places_are_taken_names_the_owner(stem: str) -> None:
    paths = [f"{SHM_DIR}/{stem.removesuffix('0')}{number}-gate" for number in range(16)]
    with other_users_files(paths, "file"), pytest.raises(PermissionError) as caught, Meeting(stem).locked_board():
        pass
    assert f"files of user {OTHER_UID} block the place where processes of user 0 meet" in str(caught.value)
    assert "ask that user or root to remove them" in str(caught.value)
    assert paths[0] == caught.value.filename


def test_two_users_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = meeting_stem("share", "0")
    monkeypatch.setattr(os, "getuid", lambda: OTHER_UID)
    assert mine != meeting_stem("share", "0")
