"""Named indexes: the ranks of a run share one copy whichever builds it and whichever dies; different contents are an error."""

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
from tests.children import python, read_line, running, send_line, waits_for_a_lock
from tests.formats.shared_index.index_kit import gone_within

slow = pytest.mark.slow(reason="every rank is a process, which imports numpy")
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
def separate_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes this test a separate run, with its child processes as ranks."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", str(tmp_path))


def meeting_files(name: str = "train") -> set[str]:
    stem = meeting_stem("index", name, *run_key())
    return {file for file in os.listdir(SHM_DIR) if file.startswith(stem)}


def inode(index: SharedIndex) -> tuple[int, int]:
    return index._memory.reference.inode


@slow
def test_two_ranks_share_one_copy_and_leave_nothing() -> None:
    with running(RANK) as first:
        assert read_line(first) == "builds"
        with running(RANK) as second:
            while not waits_for_a_lock(second):
                pass
            send_line(first)
            built = read_line(first)
            assert read_line(second) == built
            for child in (first, second, first, second):
                send_line(child)
            assert [first.wait(60), second.wait(60)] == [0, 0]
    assert meeting_files() == set()


@slow
def test_waiting_rank_builds_after_the_builder_dies() -> None:
    with running(RANK) as first:
        assert read_line(first) == "builds"
        with running(RANK) as second, running(RANK) as third:
            while not (waits_for_a_lock(second) and waits_for_a_lock(third)):
                pass
            first.kill()
            ready = select.select([second.stdout, third.stdout], [], [], 60)[0]
            builder, other = (second, third) if second.stdout in ready else (third, second)
            assert read_line(builder) == "builds"
            send_line(builder)
            assert read_line(builder) == read_line(other)
    assert gone_within([f"{SHM_DIR}/{name}" for name in meeting_files()], 60)


@slow
def test_killed_ranks_leave_nothing() -> None:
    with running(RANK) as first, running(RANK) as second:
        builder = first if select.select([first.stdout, second.stdout], [], [], 60)[0] == [first.stdout] else second
        assert read_line(builder) == "builds"
        send_line(builder)
        assert read_line(first) == read_line(second)
        send_line(builder)
        data = read_line(builder)
        files = [data, *(f"{SHM_DIR}/{name}" for name in meeting_files())]
        assert len(files) == 3
        assert all(map(os.path.exists, files))
        first.kill()
        second.kill()
        first.wait()
        second.wait()
        assert gone_within(files, 60)


@slow
def test_late_rank_attaches_through_a_rank_that_outlived_the_builder() -> None:
    with running(RANK) as builder:
        read_line(builder)
        send_line(builder)
        built = read_line(builder)
        mine = SharedIndex(lambda: pytest.fail("called although there is one"), name="train")
        builder.kill()
        builder.wait()
        assert not os.path.exists(f"/proc/{builder.pid}/fd")
        late = SharedIndex(lambda: pytest.fail("called although there is one"), name="train")
    assert str(inode(mine)) == str(inode(late)) == built
    assert late[999] == "999"
    del mine, late
    gc.collect()
    assert gone_within([f"{SHM_DIR}/{name}" for name in meeting_files()], 60)


@pytest.mark.parametrize("room", [True, False], ids=["shm", "memfd"])
def test_attached_index_can_be_pickled_after_the_builder_deleted_its_own(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memory_is_removed_with_the_last_index() -> None:
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
def test_different_entries_under_one_name_are_an_error(other: list[Any]) -> None:
    index = SharedIndex(["a", "b"], name="train")
    with pytest.raises(
        ValueError,
        match=r"SharedIndex\(name='train'\): another rank of this node has other entries under this name "
        r"\(2 entries, [0-9a-f]{32}; here \d entries, [0-9a-f]{32}\). Build it from the same entries in the same order",
    ):
        SharedIndex(other, name="train")
    assert index[1] == "b"


def test_fingerprint_is_compared_in_place_of_the_entries() -> None:
    index = SharedIndex(["a"], name="train", fingerprint="v1")
    assert list(SharedIndex(["never looked at"], name="train", fingerprint="v1")) == ["a"]
    for fingerprint in ("v2", None):
        with pytest.raises(ValueError, match=rf"has other entries under this name \(v1; here {fingerprint}\)"):
            SharedIndex(lambda: ["a"], name="train", fingerprint=fingerprint)
    assert index[0] == "a"


def test_changed_manifest_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    path.write_text("a\nb")
    index = SharedIndex.from_manifest(path, name="train")
    path.write_text("a\nb\nc")
    with pytest.raises(ValueError, match=r"m.txt, 3 bytes, \d+ ns; here .*m.txt, 5 bytes"):
        SharedIndex.from_manifest(path, name="train")
    assert len(index) == 2


def test_next_rank_builds_after_a_builder_fails() -> None:
    def broken() -> list[str]:
        raise RuntimeError("listing failed")

    with pytest.raises(RuntimeError, match="listing failed"):
        SharedIndex(broken, name="train")
    assert meeting_files() == set()
    assert SharedIndex(["a"], name="train")[0] == "a"


def test_other_names_and_other_runs_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SharedIndex(["a"], name="train"), SharedIndex(["b"], name="test")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    third = SharedIndex(["c"], name="train")
    assert [first[0], second[0], third[0]] == ["a", "b", "c"]


def test_error_without_shared_memory_names_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmload.shm.meeting.SHM_DIR", "/nowhere")
    with pytest.raises(FileNotFoundError, match="/nowhere/") as caught:
        SharedIndex(["a"], name="train")
    assert caught.value.__notes__ == [
        "SharedIndex(name='train') meets this run's other ranks in /dev/shm; without a name each rank holds its own copy"
    ]


def test_runs_are_identified_by_their_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for name in run_key_module._RUN_VARIABLES:
        for value in ("1", "2"):
            monkeypatch.setenv(name, value)
            found.add(run_key())
    assert len(found) == 2 * len(run_key_module._RUN_VARIABLES)


def test_without_a_launcher_a_run_is_identified_by_the_parent_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in run_key_module._RUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    code = "from shmload.processes.run_key import run_key; print(run_key())"
    keys = [python(code).communicate()[0] for _ in range(2)]
    assert keys[0] == keys[1]
    assert ast.literal_eval(keys[0])[1] == str(os.getpid())
    assert run_key() != ast.literal_eval(keys[0])


def test_index_that_cannot_be_written_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    def ours() -> set[str]:
        return {name for name in os.listdir(SHM_DIR) if process_stem() in name}

    before = ours()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken") as caught:
        patch.setattr(os, "pwrite", fail)
        SharedIndex(["a", "b"])
    assert caught.tb is not None  # its frames refer to the partial index
    assert ours() == before
