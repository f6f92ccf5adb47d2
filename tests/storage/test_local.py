"""A folder as a store: partial objects are never visible, and changed objects are detected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shmload.errors import ObjectMissing, StoreError
from shmload.storage import local_store
from shmload.storage.local_store import LocalStore
from shmload.storage.partial_files import PARTIAL_PREFIX, remove_abandoned


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def files(store: LocalStore) -> list[str]:
    return sorted(p.name for p in store.root.rglob("*") if p.is_file())


def test_partial_object_is_never_visible(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("x", b"old")
    seen = []
    fsync = os.fsync

    def look(fd: int) -> None:
        seen.append((bytes(store.get("x")), [each.key for each in store.list_objects()], len(files(store))))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", look)
    store.put("x", b"new")
    assert seen == [(b"old", ["x"], 2), (b"new", ["x"], 1)]  # first the file, then its folder


def test_failed_write_leaves_nothing(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", b"there")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"cannot write .*/store/x: No space left on device"):
        store.put("x", b"1")
    with pytest.raises(StoreError, match=r"cannot write .*/store/a: No space left on device"):
        store.put_file("a", tmp_path / "store" / "a")
    assert files(store) == ["a"]
    assert bytes(store.get("a")) == b"there"


def test_files_of_a_killed_writer_are_neither_listed_nor_readable(store: LocalStore) -> None:
    store.put("folder/x", b"")
    (store.root / "folder" / f"{PARTIAL_PREFIX}abc").write_bytes(b"half")
    os.mkfifo(store.root / "pipe")
    assert [each.key for each in store.list_objects()] == ["folder/x"]
    with pytest.raises(StoreError, match=r"names that begin with '\.half-' belong to unfinished files"):
        store.get(f"folder/{PARTIAL_PREFIX}abc")
    with pytest.raises(StoreError, match=r"names that begin with '\.half-' belong to unfinished files"):
        store.put(f"{PARTIAL_PREFIX}folder/x", b"")  # no listing would contain it


def test_files_whose_names_are_no_keys_are_left_out_with_a_warning(store: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    store.put("folder/x", b"")
    for name in (b"new\nline", b"caf\xe9.tar", b"folder/a\ttab"):
        Path(os.fsdecode(os.fsencode(store.root) + b"/" + name)).write_bytes(b"")
    (store.root / "a\tfolder").mkdir()
    for _ in range(2):
        assert [each.key for each in store.list_objects()] == ["folder/x"]
    assert sorted(record.args[1] for record in caplog.records) == ["a\tfolder", "a\ttab", "caf\udce9.tar", "new\nline"]
    assert (
        "is left out, because it is not a valid key (UTF-8 without control characters, at most 1,024 bytes): rename it"
        in caplog.text
    )


def test_names_with_unusual_characters_are_keys(store: LocalStore) -> None:
    """A macOS screenshot has a narrow space before AM; Japanese text has wide ones, and emoji are joined by characters of no width."""
    names = sorted(f"a{letter}b.png" for letter in "\u202f\u00a0\u3000\u200d\u200f\u00ad\u00e9")
    for name in names:
        store.put(name, name.encode())
    assert [each.key for each in store.list_objects()] == names
    assert [bytes(store.get(name)) for name in names] == [name.encode() for name in names]


def test_link_that_leads_nowhere_is_listed_and_reading_it_names_its_target(store: LocalStore) -> None:
    store.put("x", b"")
    (store.root / "dangling").symlink_to("nothing")
    assert [each.key for each in store.list_objects()] == ["dangling", "x"]
    with pytest.raises(ObjectMissing, match=r"no such object: .*/dangling: it is a link to nothing, which does not exist"):
        store.get("dangling")


def test_files_of_a_killed_writer_are_removed_by_the_first_write_a_day_later(store: LocalStore) -> None:
    code = f"""
        import os, signal, sys
        from pathlib import Path
        from shmload.storage.local_store import LocalStore
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        LocalStore(Path({str(store.root)!r})).put("x", b"half of it")
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = files(store)
    assert left.startswith(PARTIAL_PREFIX)
    remove_abandoned(store.root)
    assert files(store) == [left]
    os.utime(store.root / left, (0, 0))
    store.put("y", b"whole")
    assert files(store) == ["y"]


def test_file_modified_while_it_is_read_is_an_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("x", b"0123456789")
    preadv = os.preadv

    def meddled(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = preadv(fd, buffers, offset)
        with open(store.root / "x", "r+b") as file:
            file.write(b"!")
        os.utime(store.root / "x", ns=(1, 1))
        return got

    monkeypatch.setattr(os, "preadv", meddled)
    with pytest.raises(StoreError, match=r"was modified while it was read. Replace files by renaming new ones over them"):
        store.get("x")


def test_file_truncated_while_it_is_read_is_an_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("x", b"0123456789")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(StoreError, match=r"ended at 0 of 10 bytes while it was read"):
        store.get("x")


def test_file_replaced_while_it_is_read_is_read_unchanged(store: LocalStore) -> None:
    store.put("x", b"old")
    with store._opened("x", None) as file:
        store.put("x", b"newer")
        assert file.read() == b"old"
    assert bytes(store.get("x")) == b"newer"


@pytest.mark.parametrize("target", [".", "..", "a/b", "../other"])
def test_link_to_a_folder_above_is_not_followed(target: str, store: LocalStore) -> None:
    for key in ("a/b/x", "a/y"):
        store.put(key, key.encode())
    other = store.root.parent / "other"
    other.mkdir()
    (other / "z").write_bytes(b"z")
    (other / "back").symlink_to(store.root)
    (store.root / "a/link").symlink_to({"..": "..", "../other": other}.get(target, store.root / target))
    expected = {".": [], "..": [], "a/b": ["a/link/x"], "../other": ["a/link/z"]}[target]
    assert [each.key for each in store.list_objects()] == ["a/b/x", *expected, "a/y"]


def test_object_permissions_follow_the_umask(store: LocalStore) -> None:
    before = os.umask(0o027)
    try:
        store.put("x", b"")
    finally:
        os.umask(before)
    assert (store.root / "x").stat().st_mode & 0o777 == 0o640


def test_missing_folder_is_empty_and_created_on_write(store: LocalStore) -> None:
    assert list(store.list_objects()) == []
    store.delete(["x"])
    with pytest.raises(ObjectMissing):
        store.get("x")
    assert not store.root.exists()
    store.put("a/b/c", b"")
    assert [each.key for each in store.list_objects()] == ["a/b/c"]


def test_folder_is_deleted_with_its_last_object(store: LocalStore) -> None:
    for key in ("a/x", "a/y", "z"):
        store.put(key, b"")
    store.delete(["a/x"])
    assert sorted(path.name for path in store.root.iterdir()) == ["a", "z"]
    store.delete(["a/y", "z"])
    assert list(store.root.iterdir()) == []
    store.put("a/x", b"")
    assert [each.key for each in store.list_objects()] == ["a/x"]


def test_folder_deleted_while_an_object_is_written_is_created_again(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[Path] = []

    def remove_abandoned(folder: Path) -> None:
        folder.rmdir()
        removed.append(folder)
        raise FileNotFoundError(folder)

    monkeypatch.setattr(local_store, "remove_abandoned", remove_abandoned)
    store.put("a/x", b"")
    assert removed == [store.root / "a"]
    assert [each.key for each in store.list_objects()] == ["a/x"]


def test_failing_operations_raise_explanatory_errors(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"a file")
    with pytest.raises(StoreError, match=r"cannot write .*/store/x: (Not a directory|File exists)"):
        store.put("x", b"")
    store = LocalStore(tmp_path)
    (tmp_path / "folder" / "in it").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"cannot delete .*/folder: Is a directory"):
        store.delete(["folder"])
    with pytest.raises(StoreError, match=r"cannot write .*/folder: Is a directory"):
        store.put("folder", b"")
