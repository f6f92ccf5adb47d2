"""Named indexes: one copy for the ranks of a run, whoever comes first and whoever dies; what differs is an error."""

from __future__ import annotations

import ast
import errno
import gc
import os
import pickle
import select
from pathlib import Path
from typing import Any

import pytest

from shmload import SharedIndex
from shmload.processes import run_key as run_key_module
from shmload.processes.run_key import run_key
from shmload.shm import segment
from shmload.shm.names import SHM_DIR, meeting_stem, process_stem
from tests.children import go_on, python, running, says, waits_for_a_lock
from tests.formats.shared_index.index_kit import gone_within

slow = pytest.mark.slow(reason="ranks are processes of their own, which import numpy")
RANK = """
import sys
from shmload import SharedIndex
def entries():
    print("builds", flush=True)
    input()
    return map(str, range(1000))
index = SharedIndex(entries, name="train")
assert list(index) == list(map(str, range(1000)))
print(index._memory.reference.inode, flush=True)
input()
print(index._memory.reference.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def a_run_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Children of this test are ranks of one run, and no other test's."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", str(tmp_path))


def meeting_files(name: str = "train") -> set[str]:
    stem = meeting_stem("index", name, *run_key())
    return {file for file in os.listdir(SHM_DIR) if file.startswith(stem)}


def inode(index: SharedIndex) -> tuple[int, int]:
    return index._memory.reference.inode


@slow
def test_two_ranks_hold_one_copy_and_nothing_stays() -> None:
    with running(RANK) as first:
        assert says(first) == "builds"
        with running(RANK) as second:
            while not waits_for_a_lock(second):
                pass
            go_on(first)
            built = says(first)
            assert says(second) == built
            for child in (first, second, first, second):
                go_on(child)
            assert [first.wait(20), second.wait(20)] == [0, 0]
    assert meeting_files() == set()


@slow
def test_a_builder_that_dies_in_the_middle_is_taken_over_from() -> None:
    with running(RANK) as first:
        assert says(first) == "builds"
        with running(RANK) as second, running(RANK) as third:
            while not (waits_for_a_lock(second) and waits_for_a_lock(third)):
                pass
            first.kill()
            ready = select.select([second.stdout, third.stdout], [], [], 20)[0]
            builder, other = (second, third) if second.stdout in ready else (third, second)
            assert says(builder) == "builds"
            go_on(builder)
            assert says(builder) == says(other)
    assert gone_within([f"{SHM_DIR}/{name}" for name in meeting_files()], 2)


@slow
def test_nothing_stays_when_all_ranks_are_killed() -> None:
    with running(RANK) as first, running(RANK) as second:
        builder = first if select.select([first.stdout, second.stdout], [], [], 20)[0] == [first.stdout] else second
        assert says(builder) == "builds"
        go_on(builder)
        assert says(first) == says(second)
        go_on(builder)
        data = says(builder)
        files = [data, *(f"{SHM_DIR}/{name}" for name in meeting_files())]
        assert len(files) == 3
        assert all(map(os.path.exists, files))
        first.kill()
        second.kill()
        first.wait()
        second.wait()
        assert gone_within(files, 2)


@slow
def test_a_late_rank_finds_the_memory_at_those_that_outlive_its_builder() -> None:
    with running(RANK) as builder:
        says(builder)
        go_on(builder)
        built = says(builder)
        mine = SharedIndex(lambda: pytest.fail("called although there is one"), name="train")
        builder.kill()
        builder.wait()
        assert not os.path.exists(f"/proc/{builder.pid}/fd")
        late = SharedIndex(lambda: pytest.fail("called although there is one"), name="train")
    assert str(inode(mine)) == str(inode(late)) == built
    assert late[999] == "999"
    del mine, late
    gc.collect()
    assert gone_within([f"{SHM_DIR}/{name}" for name in meeting_files()], 2)


@pytest.mark.parametrize("room", [True, False], ids=["shm", "memfd"])
def test_who_attached_can_hand_on_what_the_builder_let_go(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not room:
        monkeypatch.setattr(segment, "shm_free_bytes", lambda: 0)
    built = SharedIndex(["a", "b"], name="train")
    attached = SharedIndex(["a", "b"], name="train")
    wanted = inode(built)
    del built
    gc.collect()
    again = pickle.loads(pickle.dumps(attached))
    assert inode(attached) == inode(again) == wanted
    assert list(again) == ["a", "b"]


def test_nothing_stays_after_the_last_has_gone() -> None:
    before = len(os.listdir("/proc/self/fd"))
    first, second = SharedIndex(["a"], name="train"), SharedIndex(["a"], name="train")
    assert len(meeting_files()) == 2
    del first
    gc.collect()
    assert len(meeting_files()) == 2
    del second
    gc.collect()
    assert meeting_files() == set()
    assert len(os.listdir("/proc/self/fd")) == before


def test_all_ways_to_build_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    path.write_text("a\nb")
    makers: dict[str, Any] = {
        "columns": lambda: SharedIndex.from_columns({"x": [1, 2]}, name="columns"),
        "manifest": lambda: SharedIndex.from_manifest(path, name="manifest"),
        "tuples": lambda: SharedIndex([("a", 1)], name="tuples"),
    }
    for make in makers.values():
        first, second = make(), make()
        assert inode(first) == inode(second)
        assert list(first) == list(second)


@pytest.mark.parametrize("other", [["a", "c"], ["a"], [b"a", b"b"], [("a",), ("b",)], ["ab", ""]], ids=str)
def test_other_entries_under_the_name_are_an_error(other: list[Any]) -> None:
    index = SharedIndex(["a", "b"], name="train")
    with pytest.raises(
        ValueError,
        match=r"SharedIndex\(name='train'\): another rank of this node has other entries under this name "
        r"\(2 entries, [0-9a-f]{32}; here \d entries, [0-9a-f]{32}\). Build it from the same entries in the same order",
    ):
        SharedIndex(other, name="train")
    assert index[1] == "b"


def test_fingerprints_stand_for_the_entries() -> None:
    index = SharedIndex(["a"], name="train", fingerprint="v1")
    assert list(SharedIndex(["never looked at"], name="train", fingerprint="v1")) == ["a"]
    for fingerprint in ("v2", None):
        with pytest.raises(ValueError, match=rf"has other entries under this name \(v1; here {fingerprint}\)"):
            SharedIndex(lambda: ["a"], name="train", fingerprint=fingerprint)
    assert index[0] == "a"


def test_a_manifest_that_has_changed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    path.write_text("a\nb")
    index = SharedIndex.from_manifest(path, name="train")
    path.write_text("a\nb\nc")
    with pytest.raises(ValueError, match=r"m.txt, 3 bytes, \d+ ns; here .*m.txt, 5 bytes"):
        SharedIndex.from_manifest(path, name="train")
    assert len(index) == 2


def test_a_builder_that_fails_leaves_the_place_to_the_next() -> None:
    def broken() -> list[str]:
        raise RuntimeError("listing failed")

    with pytest.raises(RuntimeError, match="listing failed"):
        SharedIndex(broken, name="train")
    assert meeting_files() == set()
    assert SharedIndex(["a"], name="train")[0] == "a"


def test_other_names_and_other_runs_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SharedIndex(["a"], name="train"), SharedIndex(["b"], name="test")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    third = SharedIndex(["c"], name="train")
    assert [first[0], second[0], third[0]] == ["a", "b", "c"]


def test_without_a_place_to_meet_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmload.shm.meeting.SHM_DIR", "/nowhere")
    with pytest.raises(FileNotFoundError, match="/nowhere/") as caught:
        SharedIndex(["a"], name="train")
    assert caught.value.__notes__ == [
        "SharedIndex(name='train') meets this run's other ranks in /dev/shm; without a name each rank holds its own copy"
    ]


def test_runs_differ_by_what_their_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for name in run_key_module._RUN_VARIABLES:
        for value in ("1", "2"):
            monkeypatch.setenv(name, value)
            found.add(run_key())
    assert len(found) == 2 * len(run_key_module._RUN_VARIABLES)


def test_without_a_launcher_a_run_is_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in run_key_module._RUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    code = "from shmload.processes.run_key import run_key; print(run_key())"
    keys = [python(code).communicate()[0] for _ in range(2)]
    assert keys[0] == keys[1]
    assert ast.literal_eval(keys[0])[1] == str(os.getpid())
    assert run_key() != ast.literal_eval(keys[0])


def test_an_index_that_cannot_be_written_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    def ours() -> set[str]:
        return {name for name in os.listdir(SHM_DIR) if process_stem() in name}

    before = ours()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken") as caught:
        patch.setattr(os, "pwrite", fail)
        SharedIndex(["a", "b"])
    assert caught.tb is not None  # its frames hold what was begun
    assert ours() == before
