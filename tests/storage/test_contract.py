"""The common contract of all stores: one suite that runs on every store, in a new folder for each test."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload.errors import ObjectMissing, StoreError
from shmload.storage import s3_store, web_reader
from shmload.storage.http_store import HttpStore
from shmload.storage.local_store import LocalStore
from shmload.storage.open_store import open_store
from shmload.storage.store import Store, StoredObject
from tests.storage import store_kit
from tests.storage.store_fixtures import open_new_folder

KEYS = ["a", "a b/c+d=e&f?g#h%20i.tar", "a/b", "a-b", "ab", "ä/日本.txt", "deep/er/and/deeper", "it's <x>"]
NOT_KEYS = ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "a/./b", "a\nb", "a\0b", "x" * 1025]


@dataclass(frozen=True)
class Place:
    """A store, and a way to add objects to it (for a web server, another store)."""

    store: Store
    fill: Callable[[str, bytes], object]
    keys: Sequence[str] = tuple(KEYS)


def s3_place(server: store_kit.Server) -> Place:
    server.bucket("contract")
    store = server.store("contract", f"folder {uuid.uuid4().hex}")
    return Place(store, store.put)


@pytest.fixture(params=["local", "file", "http", "http without ranges", "s3", "rclone", "moto", "memory", *store_kit.OTHERS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Yields an empty store."""
    name = request.param
    folder = tmp_path / "store"
    if name == "local":
        yield Place(LocalStore(folder), LocalStore(folder).put)
    elif name == "file":
        store = open_store(f"file://{folder}")
        yield Place(store, store.put)
    elif name.startswith("http"):
        with store_kit.web_server(tmp_path, ranges=name == "http") as url:
            store = HttpStore(f"{url}/store")
            yield Place(store, LocalStore(folder).put)
            store.close()
    elif name == "s3":
        yield s3_place(request.getfixturevalue("server"))
    elif name == "rclone":
        if store_kit.rclone_program() is None:
            pytest.skip("needs rclone")
        yield s3_place(store_kit.rclone())
    elif name == "moto":
        pytest.importorskip("moto.server", reason="needs moto[server]")
        yield s3_place(store_kit.moto())
    elif name == "memory":
        store = open_store(f"memory://tests/{uuid.uuid4().hex}")
        yield Place(store, store.put)
    else:
        store = open_new_folder(name)
        yield Place(store, store.put, [key for key in KEYS if name != "az" or "?" not in key])


@pytest.fixture
def writable_place(place: Place) -> Place:
    """Returns an empty store that can be written, or skips the test."""
    if isinstance(place.store, HttpStore):
        pytest.skip("a web server can only be read")
    return place


@pytest.fixture
def writable(writable_place: Place) -> Store:
    """Returns the store of `writable_place`."""
    return writable_place.store


def test_written_objects_are_read_back(place: Place) -> None:
    for key in place.keys[1:]:
        place.fill(key, key.encode())
    for key in place.keys[1:]:
        assert key.encode() == bytes(place.store.get(key))
        head = place.store.head(key)
        assert (key, len(key.encode())) == (head.key, head.nbytes)


def test_empty_object_is_read(place: Place) -> None:
    place.fill("empty", b"")
    head = place.store.head("empty")
    assert head.nbytes == 0
    assert bytes(place.store.get("empty")) == b""
    assert bytes(place.store.get("empty", etag=head.etag)) == b""
    place.store.read_into("empty", bytearray())


def test_ranges_return_exactly_the_requested_bytes(place: Place) -> None:
    data = np.random.default_rng(0).bytes(300_000)
    place.fill("x", data)
    ranges = [(0, 1), (299_999, 1), (5, 0), (100_000, 70_000), (10, 20), (12, 3), (250_000, 50_000), (0, 300_000)]
    etag = place.store.head("x").etag
    assert [data[a : a + n] for a, n in ranges] == [store_kit.read_range(place.store, "x", a, n, etag) for a, n in ranges]


def test_bytes_are_read_into_the_callers_memory(place: Place) -> None:
    data = np.random.default_rng(1).bytes(100_000)
    place.fill("x", data)
    out = np.zeros((5, 10), np.int32)
    place.store.read_into("x", out, offset=7, etag=place.store.head("x").etag)
    assert data[7 : 7 + out.nbytes] == out.tobytes()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 11), (10, 1), (11, 1), (9, 2), (-1, 1), (1 << 40, 1)])
def test_range_beyond_the_object_is_an_error(place: Place, offset: int, nbytes: int) -> None:
    place.fill("x", b"0123456789")
    with pytest.raises(StoreError, match=r"cannot read [\d,]+ at [-\d,]+|no bytes at -1: offsets begin at 0"):
        place.store.read_into("x", bytearray(nbytes), offset=offset)


def test_large_objects_are_read_in_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_reader, "_PART_NBYTES", 10_000)
    data = np.random.default_rng(2).bytes(64_321)
    place.fill("x", data)
    assert data == bytes(place.store.get("x"))
    out = bytearray(50_001)
    place.store.read_into("x", out, offset=123)
    assert data[123:50_124] == out


def test_missing_object_raises_object_missing(place: Place) -> None:
    place.fill("folder/x", b"x")
    for key in ("y", "folder", "folder/x/y", "folder/y"):
        for ask in (
            lambda key=key: place.store.head(key),
            lambda key=key: place.store.get(key),
            lambda key=key: place.store.read_into(key, bytearray(1)),
        ):
            with pytest.raises(ObjectMissing, match="no such object: .*" + key):
                ask()


def test_changed_version_is_an_error(place: Place) -> None:
    place.fill("x", b"one")
    old = place.store.head("x").etag
    assert bytes(place.store.get("x", etag=old)) == b"one"
    place.fill("x", b"two!")
    assert old != place.store.head("x").etag
    for read in (lambda: place.store.get("x", etag=old), lambda: place.store.read_into("x", bytearray(1), etag=old)):
        with pytest.raises(StoreError, match=r"has changed: version .* Read its version again"):
            read()


@pytest.mark.parametrize("key", NOT_KEYS)
def test_invalid_key_is_refused(place: Place, key: str) -> None:
    for ask in (place.store.head, place.store.get, lambda k: place.store.read_into(k, bytearray(1))):
        with pytest.raises(StoreError, match=r"is not a valid key of .*: a key is relative to it.* Try '"):
            ask(key)
    if isinstance(place.store, HttpStore):
        return
    for ask in (lambda k: place.store.put(k, b""), lambda k: place.store.delete([k])):
        with pytest.raises(StoreError, match="is not a valid key of"):
            ask(key)


def test_unpickled_store_equals_the_original(place: Place) -> None:
    place.fill("x", b"x")
    assert bytes(place.store.get("x")) == b"x"
    again = pickle.loads(pickle.dumps(place.store))
    assert place.store == again
    assert place.store.url == again.url
    assert hash(place.store) == hash(again)
    assert bytes(again.get("x")) == b"x"


def test_writing_returns_the_stored_object(writable: Store) -> None:
    written = writable.put("x", memoryview(b"hello"))
    assert writable.head("x") == written
    assert StoredObject("x", 5, written.etag) == written
    assert writable.put("x", np.arange(3, dtype=np.int16)).nbytes == 6
    assert np.arange(3, dtype=np.int16).tobytes() == bytes(writable.get("x"))


@pytest.mark.parametrize("nbytes", [0, 1, 100_000, 200_000, 654_321])
def test_file_is_written_completely(writable: Store, tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "_PART_NBYTES", 200_000)
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(3).bytes(nbytes))
    written = writable.put_file("folder/x", path)
    assert nbytes == written.nbytes
    assert writable.head("folder/x") == written
    assert path.read_bytes() == bytes(writable.get("folder/x", etag=written.etag))


def test_listing_is_sorted_by_key(writable_place: Place) -> None:
    writable, keys = writable_place.store, writable_place.keys[1:]
    for key in reversed(keys):
        writable.put(key, key.encode())
    found = list(writable.list_objects())
    assert sorted(keys) == [each.key for each in found]
    assert [writable.head(each.key) for each in found] == found


def test_object_whose_name_contains_that_of_partial_files_is_listed(writable: Store) -> None:
    keys = ["a.half-b/x", "model.half-precision.tar"]
    for key in keys:
        writable.put(key, b"")
    assert keys == [each.key for each in writable.list_objects()]


def test_folder_excludes_keys_that_only_share_its_prefix(writable: Store) -> None:
    for key in ("a/b", "a/c/d", "ab", "a-b/c", "b/a/b", "a.tar"):
        writable.put(key, b"")
    for prefix in ("a", "a/"):
        assert [each.key for each in writable.list_objects(prefix)] == ["a/b", "a/c/d"]
    assert [each.key for each in writable.list_objects("a/c")] == ["a/c/d"]
    assert list(writable.list_objects("nothing")) == []
    with pytest.raises(StoreError, match="is not a valid key of"):
        list(writable.list_objects("../a"))


def test_delete_removes_objects(writable_place: Place) -> None:
    writable, keys = writable_place.store, writable_place.keys[1:]
    for key in keys:
        writable.put(key, b"")
    writable.delete([*keys[1:], "never there"])
    assert [keys[0]] == [each.key for each in writable.list_objects()]
    writable.delete([])
    with pytest.raises(ObjectMissing):
        writable.head(keys[1])


def test_listing_of_many_pages_is_complete(writable: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "_PAGE", 7)
    keys = [f"x/{number:05d}" for number in range(30)]
    for key in [*keys, "xy"]:
        writable.put(key, b"")
    assert keys == [each.key for each in writable.list_objects("x")]
    assert [*keys, "xy"] == [each.key for each in writable.list_objects()]


@pytest.mark.slow(reason="writes, lists and deletes over a thousand objects of a real S3 server")
def test_more_objects_than_a_page_has_are_listed_and_deleted(server: store_kit.Server) -> None:
    store = s3_place(server).store
    keys = [f"x/{number:05d}" for number in range(int(os.environ.get("SHMLOAD_MANY_OBJECTS", "1100")))]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: store.put(key, b""), [*keys, "xy"]))
    assert keys == [each.key for each in store.list_objects("x")]
    store.delete(iter(keys))
    assert [each.key for each in store.list_objects()] == ["xy"]


def test_web_server_can_only_be_read(tmp_path: Path) -> None:
    store = open_store("http://127.0.0.1:9/data")
    for write in (lambda: store.put("x", b""), lambda: store.put_file("x", tmp_path), lambda: store.delete(["x"])):
        with pytest.raises(StoreError, match=r"http://127.0.0.1:9/data is read-only: write to a folder or to s3://"):
            write()
    with pytest.raises(StoreError, match=r"data cannot be listed.*Name the shards, for example as .*/name-\{000000..000099\}.tar"):
        store.list_objects()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.sets(st.lists(st.sampled_from(["a", "b", "a-", "a.b", "é", "a b"]), min_size=1, max_size=3).map("/".join)))
def test_listing_of_a_folder_equals_its_sorted_keys(tmp_path_factory: pytest.TempPathFactory, keys: set[str]) -> None:
    folders = {"/".join(key.split("/")[:n]) for key in keys for n in range(1, 3)}
    # A name that is also a folder cannot be a file.
    chosen = sorted(keys - {f for f in folders if any(k.startswith(f + "/") for k in keys)})
    store = LocalStore(tmp_path_factory.mktemp("listed"))
    for key in chosen:
        store.put(key, key.encode())
    assert chosen == [each.key for each in store.list_objects()]
