"""Meetings: one at a time at the board, whoever dies there; the files go with the last attendant."""

from __future__ import annotations

import os
import secrets

import pytest

from shmload.shm import janitor
from shmload.shm.meeting import Meeting
from shmload.shm.names import SHM_DIR, STEM_PATTERN, meeting_stem
from tests.children import go_on, running, says, waits_for_a_lock

ATTENDANT = """
import sys
from shmload.shm.meeting import Meeting
meeting = Meeting(sys.argv[1])
with meeting.at_board():
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


def test_the_board_says_what_was_written_last(stem: str) -> None:
    meeting = Meeting(stem)
    with meeting.at_board():
        assert meeting.read() == b""
        meeting.write(b"a long text")
        meeting.write(b"short")
    with meeting.at_board():
        assert meeting.read() == b"short"
    meeting.leave()
    assert files_of(stem) == set()


def test_half_a_board_says_nothing(stem: str) -> None:
    meeting = Meeting(stem)
    with meeting.at_board():
        meeting.write(b"what was said")
        os.truncate(f"{SHM_DIR}/{stem}-control", 20)
        assert meeting.read() == b""
    meeting.leave()


def test_the_last_to_leave_removes_the_files(stem: str) -> None:
    first, second = Meeting(stem), Meeting(stem)
    for meeting in (first, second):
        with meeting.at_board():
            meeting.write(meeting.read() + b"x")
    first.leave()
    assert files_of(stem) == {"-control", "-gate"}
    with second.at_board():
        assert second.read() == b"xx"
    second.leave()
    second.leave()
    assert files_of(stem) == set()


def test_one_is_inside_at_a_time_and_the_next_sees_what_it_wrote(stem: str) -> None:
    with running(ATTENDANT, stem) as inside:
        assert says(inside) == "inside"
        with running(ATTENDANT, stem) as waiting:
            while not waits_for_a_lock(waiting):
                pass
            go_on(inside)
            assert says(inside) == "outside"
            assert says(waiting) == "inside was here"
            for child in (waiting, waiting, inside):
                go_on(child)
            assert [inside.wait(20), waiting.wait(20)] == [0, 0]
    assert files_of(stem) == set()


def test_who_dies_inside_lets_the_next_one_in(stem: str) -> None:
    meeting = Meeting(stem)
    with running(ATTENDANT, stem) as child:
        assert says(child) == "inside"
        child.kill()
        with meeting.at_board():
            assert meeting.read() == b""
    meeting.leave()
    assert files_of(stem) == set()


def test_a_file_that_was_removed_meanwhile_is_not_met_at(stem: str) -> None:
    late, early = Meeting(stem), Meeting(stem)
    with late.at_board():
        late.write(b"old")
    for part in ("control", "gate"):
        os.unlink(f"{SHM_DIR}/{stem}-{part}")
    with early.at_board():
        assert early.read() == b""
        early.write(b"new")
    with late.at_board():
        assert late.read() == b"new"
    late.leave()
    assert files_of(stem) == {"-control", "-gate"}
    early.leave()
    assert files_of(stem) == set()


def test_who_is_left_over_removes_nothing_of_a_later_meeting(stem: str) -> None:
    left_over, later = Meeting(stem), Meeting(stem)
    with left_over.at_board():
        os.unlink(f"{SHM_DIR}/{stem}-control")
    with later.at_board():
        pass
    left_over.leave()
    assert files_of(stem) == {"-control", "-gate"}
    later.leave()
    assert files_of(stem) == set()


def test_a_meeting_that_is_attended_is_never_swept(stem: str) -> None:
    assert STEM_PATTERN.fullmatch(f"{stem}-control")
    meeting = Meeting(stem)
    with meeting.at_board():
        assert stem not in [found.stem for found in janitor.sweep(guard_s=-1)]
    assert stem not in [found.stem for found in janitor.sweep(guard_s=-1)]
    meeting.leave()


def test_the_janitor_removes_a_meeting_that_died(stem: str) -> None:
    with running(ATTENDANT, stem) as child:
        says(child)
    assert files_of(stem) == {"-control", "-gate"}
    assert stem in [found.stem for found in janitor.sweep(guard_s=-1)]
    assert files_of(stem) == set()


def test_a_forked_child_neither_attends_nor_removes(stem: str) -> None:
    meeting = Meeting(stem)
    with meeting.at_board():
        pass
    pid = os.fork()
    if pid == 0:
        meeting.leave()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert files_of(stem) == {"-control", "-gate"}
    meeting.leave()
    assert files_of(stem) == set()


def test_anothers_file_is_refused(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(stem)
    with meeting.at_board():
        pass
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"not a file of user {user + 1}"), Meeting(stem).at_board():
        pass
    monkeypatch.undo()
    meeting.leave()


def test_leaving_does_not_wait_for_who_is_inside(stem: str) -> None:
    leaving = Meeting(stem)
    with leaving.at_board():
        pass
    inside = Meeting(stem)
    with inside.at_board():
        leaving.leave()
        assert files_of(stem) == {"-control", "-gate"}
    inside.leave()
    assert files_of(stem) == set()
