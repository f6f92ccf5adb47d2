"""Objects as samples, in the order of a listing that has not ended yet."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shmload.cli import app
from shmload.errors import StoreError
from shmload.remote import ObjectStream, RemoteDataset, upload_cv_dataset
from shmload.remote.packing.pack_options import PackOptions
from shmload.remote.packing.upload import packing_of
from shmload.storage import s3_store
from shmload.storage.local_store import LocalStore
from shmload.storage.store import StoredObject
from tests.storage.store_kit import Server

KEYS = [f"{number // 10}/{number:03d}.jpg" for number in range(60)]


class RecordingStore(LocalStore):
    """A folder that records what was listed and read, in order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        object.__setattr__(self, "done", [])

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        for found in super().list_objects(prefix):
            self.done.append(("listed", found.key))
            yield found

    def get(self, key: str, **given: Any) -> Any:
        self.done.append(("read", key))
        return super().get(key, **given)


@pytest.fixture
def photos(tmp_path: Path) -> RecordingStore:
    """Returns a folder of objects."""
    for number, key in enumerate(KEYS):
        (tmp_path / "in" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / key).write_bytes(b"\xff\xd8\xff" + bytes([number]))
    return RecordingStore(tmp_path / "in")


def packed(samples: Any, folder: Path) -> list[int]:
    """Packs the samples; returns the numbers of the photos in their stored order."""
    manifest = packing_of(samples, LocalStore(folder), PackOptions(100_000, 7, 0, 0)).run()
    assert manifest.num_samples == sum(shard.num_samples for shard in manifest.shards)
    found = RemoteDataset.from_urls(str(folder), shuffle=False)
    return [sample["jpg"][3] for sample in found]


def test_objects_are_packed_in_the_order_of_their_listing(photos: RecordingStore, tmp_path: Path) -> None:
    assert packed(ObjectStream(photos), tmp_path / "out") == list(range(60))
    keys = [sample["__key__"] for sample in RemoteDataset.from_urls(str(tmp_path / "out"), shuffle=False)]
    assert keys == [f"{key.removesuffix('.jpg')}-{number:09d}" for number, key in enumerate(KEYS)]
    assert [sample["__key__"] for sample in ObjectStream(str(photos.root))] == [key.removesuffix(".jpg") for key in KEYS]


def test_objects_are_fetched_while_they_are_listed(photos: RecordingStore) -> None:
    stream = iter(ObjectStream(photos, at_once=4))
    for number in range(40):
        assert next(stream)["__key__"] == KEYS[number].removesuffix(".jpg")
        assert sum(what == "listed" for what, _ in photos.done) == number + 4
    stream.close()  # type: ignore[attr-defined]  # of a generator


def test_resumed_packing_does_not_fetch_packed_objects_again(photos: RecordingStore, tmp_path: Path) -> None:
    class Away(LocalStore):
        def put(self, key: str, data: Any) -> StoredObject:
            if "shard-000004" in key:
                raise StoreError("the store is away")
            return super().put(key, data)

    with pytest.raises(StoreError, match="the store is away"):
        packing_of(ObjectStream(photos, at_once=1), Away(tmp_path / "out"), PackOptions(100_000, 7, 0, 0)).run()
    photos.done.clear()
    assert packed(ObjectStream(photos, at_once=1), tmp_path / "out") == list(range(60))
    assert [key for what, key in photos.done if what == "read"] == KEYS[:8] + KEYS[28:]  # the first reads detect the format


def test_object_that_is_a_shard_or_was_replaced_is_an_error(photos: RecordingStore) -> None:
    (photos.root / "9.tar.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"in/9.tar.gz is a shard of many samples, and here each object is one: read it by Rem"):
        list(ObjectStream(photos))
    (photos.root / "9.tar.gz").unlink()

    class Late(RecordingStore):
        def get(self, key: str, **given: Any) -> Any:
            (self.root / key).write_bytes(b"of another length")
            return super().get(key, **given)

    with pytest.raises(StoreError, match="has changed: version"):
        list(ObjectStream(Late(photos.root)))
    with pytest.raises(ValueError, match="at_once must be at least 1, got 0"):
        ObjectStream(photos, at_once=0)


@pytest.mark.parametrize(
    ("name", "key", "extension"), [("a.b.JPG", "a_b", "jpg"), ("README", "README", "data"), ("x.", "x.", "data")]
)
def test_object_with_an_unusual_name_is_packed(name: str, key: str, extension: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"\xff\xd8\xff")
    (sample,) = ObjectStream(str(tmp_path / "in"))
    assert sample == {"__key__": key.replace(".", "_"), extension: b"\xff\xd8\xff"}
    packing_of([sample].__iter__(), LocalStore(tmp_path / "out"), PackOptions(100_000, 7, 0, 0)).run()


def test_pack_command_packs_in_order(photos: RecordingStore, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["pack", str(photos.root), str(tmp_path / "out"), "--in-order", "--workers", "0"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert [s["jpg"][3] for s in RemoteDataset.from_urls(str(tmp_path / "out"), shuffle=False)] == list(range(60))


def test_bucket_is_listed_page_by_page(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "_PAGE", 5)
    server.bucket("listed")
    store = server.store("listed", uuid.uuid4().hex)
    for number in range(12):
        store.put(f"{number:02d}.jpg", bytes([number]))
    asked: list[Any] = []
    page = s3_store.S3Store._page
    monkeypatch.setattr(s3_store.S3Store, "_page", lambda self, *given: asked.append(given) or page(self, *given))
    stream = iter(ObjectStream(store, at_once=2))
    assert [next(stream)["jpg"][0] for _ in range(3)] == [0, 1, 2]
    assert len(asked) == 1
    assert [sample["jpg"][0] for sample in stream] == list(range(3, 12))
    assert len(asked) == 3


def test_objects_deleted_since_they_were_packed_are_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "in")
    for number in range(10):
        store.put(f"{number}.txt", b"x")
    upload_cv_dataset(ObjectStream(store), bucket=str(tmp_path / "out"))
    (tmp_path / "in/9.txt").unlink()
    with pytest.raises(ValueError, match=f"the listing of {tmp_path}/in ended after 9 samples, but 10 that began with the same"):
        upload_cv_dataset(ObjectStream(store), bucket=str(tmp_path / "out"))
