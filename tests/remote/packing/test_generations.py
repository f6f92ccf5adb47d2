"""Packings that are resumed, replaced, or run at the same time: generations are never mixed, and other files are not touched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import shmload
from shmload import StoreError
from shmload.remote.manifest import Manifest
from shmload.remote.packing.generation import Generation
from shmload.storage.local_store import LocalStore
from shmload.storage.store import StoredObject
from tests.remote.packing.packing_kit import CountingStore, Folder, Grey, bytes_in, names_in, names_of, packed, samples_in

PHOTOS = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))


class InjectedEnd(Exception):
    pass


class EndingStore(CountingStore):
    """A folder whose writer fails after `num` objects."""

    def __init__(self, root: Path, num_objects: int) -> None:
        super().__init__(root)
        object.__setattr__(self, "left", num_objects)

    def put(self, key: str, data: Any) -> StoredObject:
        self._count()
        return super().put(key, data)

    def put_file(self, key: str, path: Path) -> StoredObject:
        self._count()
        return super().put_file(key, path)

    def _count(self) -> None:
        object.__setattr__(self, "left", self.left - 1)
        if self.left < 0:
            raise InjectedEnd


class ReadCountingGrey(Grey):
    """Records which samples were read."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def damage_in_place(path: Path) -> None:
    """Changes a byte but keeps the file's size and time."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.slow(reason="packs forty times")
def test_packing_interrupted_at_any_object_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    packed(Grey(60), LocalStore(tmp_path / "whole"))
    wanted = bytes_in(tmp_path / "whole")
    for num_objects in range(20):
        store = EndingStore(tmp_path / str(num_objects), num_objects)
        with pytest.raises(InjectedEnd):
            packed(Grey(60), store)
        assert "manifest.json" not in names_in(store.root)
        packed(Grey(60), LocalStore(store.root))
        assert wanted == bytes_in(store.root)


def test_whole_shards_are_neither_read_nor_sent_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shmload.remote.packing.shard_sender.NUM_THREADS", 1)  # with two threads, one may be ahead by a shard
    first = EndingStore(tmp_path, 13)  # the claim and four shards
    with pytest.raises(InjectedEnd):
        packed(ReadCountingGrey(60), first)
    noted = [name.removesuffix(".json") for name in names_in(tmp_path) if name.endswith(".tar.json")]
    assert len(noted) == 4
    dataset, store = ReadCountingGrey(60), CountingStore(tmp_path)
    packed(dataset, store)
    assert not set(store.written) & set(noted)
    assert 60 - 10 * len(noted) == len(dataset.read) - 8  # probes recognize the dataset


@pytest.mark.parametrize("damage", ["gone", "short", "changed", "no index", "bad index", "bad note", "note of another"])
def test_incomplete_shard_and_those_after_it_are_packed_again(damage: str, tmp_path: Path) -> None:
    packed(Grey(60), LocalStore(tmp_path / "whole"))
    wanted = bytes_in(tmp_path / "whole")
    store = EndingStore(tmp_path / "out", 19)  # everything except the manifest
    with pytest.raises(InjectedEnd):
        packed(Grey(60), store)
    shard = next(store.root.glob("*/shard-000002.tar"))
    note = shard.with_name(shard.name + ".json")
    match damage:
        case "gone":
            shard.unlink()
        case "short":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "changed":
            damage_in_place(shard)
        case "bad index":
            damage_in_place(shard.with_name(shard.name + ".index"))
        case "no index":
            shard.with_name(shard.name + ".index").unlink()
        case "bad note":
            note.write_bytes(b"{}")
        case "note of another":
            note.write_text(note.read_text().replace("shard-000002", "shard-000003"))
    again = CountingStore(store.root)
    packed(Grey(60), again)
    assert wanted == bytes_in(store.root)
    written = {f"{shard.parent.name}/shard-00000{number}.tar" for number in range(2, 6)}
    assert written == {name for name in again.written if name.endswith(".tar")}


def test_finished_packing_is_not_repeated(tmp_path: Path) -> None:
    manifest = packed(Grey(30), LocalStore(tmp_path))
    store = CountingStore(tmp_path)
    assert manifest == packed(Grey(30), store)
    assert store.written == []


def test_rerun_of_a_finished_packing_takes_the_folder_back_from_a_killed_one(tmp_path: Path) -> None:
    manifest = packed(Grey(30), LocalStore(tmp_path))
    with pytest.raises(InjectedEnd):
        packed(Grey(60), EndingStore(tmp_path, 8))
    assert manifest == packed(Grey(30), LocalStore(tmp_path))
    assert names_of(manifest) == names_in(tmp_path)


def test_lost_shard_of_a_finished_packing_is_packed_again(tmp_path: Path) -> None:
    manifest = packed(Grey(60), LocalStore(tmp_path))
    wanted = bytes_in(tmp_path)
    (tmp_path / manifest.shards[3].name).unlink()
    store = CountingStore(tmp_path)
    assert manifest == packed(Grey(60), store)
    assert {shard.name for shard in manifest.shards[3:]} == {name for name in store.written if name.endswith(".tar")}
    assert wanted == bytes_in(tmp_path)


@pytest.mark.parametrize("suffix", ["", ".index"])
def test_damaged_shard_of_a_finished_packing_is_written_again(suffix: str, tmp_path: Path) -> None:
    """Packing again must help, because that is what the error of a wrong checksum advises. Sizes and times are unchanged."""
    manifest = packed(Grey(60), LocalStore(tmp_path))
    wanted = bytes_in(tmp_path)
    damage_in_place(tmp_path / (manifest.shards[3].name + suffix))
    store = CountingStore(tmp_path)
    assert manifest == packed(Grey(60), store)
    assert {shard.name for shard in manifest.shards[3:]} == {name for name in store.written if name.endswith(".tar")}
    assert wanted == bytes_in(tmp_path)
    assert manifest == packed(Grey(60), again := CountingStore(tmp_path))
    assert again.written == []


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "length": (Grey(61), {}),
    "seed": (Grey(60), {"seed": 1}),
    "maxcount": (Grey(60), {"maxcount": 11}),
    "maxsize": (Grey(60), {"maxsize": 10_240}),
    "quality": (Grey(60), {"quality": 90}),
    "samples": ([(b"x", 2)] * 60, {}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_different_dataset_or_argument_makes_a_generation_that_replaces_the_first(what: str, tmp_path: Path) -> None:
    first = packed(Grey(60), LocalStore(tmp_path))
    dataset, options = OTHERS[what]
    second = packed(dataset, LocalStore(tmp_path), **{"maxcount": 10, **options})
    assert first.generation != second.generation
    assert names_of(second) == names_in(tmp_path)
    assert len(dataset) == len(samples_in(tmp_path, second))


def test_different_files_or_labels_make_a_new_generation(tmp_path: Path) -> None:
    found = []
    for number, photos in enumerate((PHOTOS, PHOTOS[::-1], PHOTOS)):
        dataset = Folder(photos)
        if number == 2:
            dataset.samples = [(path, label + 1) for path, label in dataset.samples]
            dataset.__dict__["__getitem__"] = None
        found.append(packed(dataset, LocalStore(tmp_path), maxsize=10**6).generation)
    assert len(set(found)) == 3


def test_unrelated_objects_are_kept(tmp_path: Path) -> None:
    foreign = [
        "README",
        "0123456789abcdef/notes.txt",
        "0123456789abcdef/shard-1.tar",
        "x/shard-000000.tar",
        "deep/0123456789abcdef/shard-000000.tar",
    ]
    for name in foreign:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("kept")
    (tmp_path / "0123456789abcdef" / "shard-000000.tar").write_text("of a packing that nobody ended")
    packed(Grey(30), LocalStore(tmp_path))
    manifest = packed(Grey(31), LocalStore(tmp_path))
    assert sorted([*foreign, *names_of(manifest)]) == names_in(tmp_path)


def test_readers_see_the_old_dataset_until_the_new_one_is_complete(tmp_path: Path) -> None:
    old = packed(Grey(60), LocalStore(tmp_path))
    for num_objects in (1, 10, 8):
        with pytest.raises(InjectedEnd):
            packed(Grey(70), EndingStore(tmp_path, num_objects))
        assert old == Manifest.parse((tmp_path / "manifest.json").read_bytes())
        assert len(samples_in(tmp_path, old)) == 60


class OvertakenStore(CountingStore):
    """A folder into which another packing writes right before the n-th object of this one."""

    def __init__(self, root: Path, at: int, other: Any) -> None:
        super().__init__(root)
        object.__setattr__(self, "plan", [at, other])

    def put(self, key: str, data: Any) -> StoredObject:
        self._overtaken()
        return super().put(key, data)

    def put_file(self, key: str, path: Path) -> StoredObject:
        self._overtaken()
        return super().put_file(key, path)

    def _overtaken(self) -> None:
        self.plan[0] -= 1
        if self.plan[0] == 0:
            self.plan[1]()


@pytest.mark.parametrize("at", [2, 5, 9, 19])
def test_overtaken_packing_raises_and_the_other_is_complete(at: int, tmp_path: Path) -> None:
    def other() -> None:
        packed(Grey(33), LocalStore(tmp_path))

    with pytest.raises(
        StoreError,
        match=r"another packing into this folder was begun \(.*\) while generation [0-9a-f]{16} was being packed; this one stops\.",
    ):
        packed(Grey(60), OvertakenStore(tmp_path, at, other))
    manifest = Manifest.parse((tmp_path / "manifest.json").read_bytes())
    assert sorted(range(33)) == sorted(sample["cls"] for sample in samples_in(tmp_path, manifest))
    packed(Grey(33), LocalStore(tmp_path))  # removes what the other packing left
    assert names_of(manifest) == names_in(tmp_path)


@pytest.mark.parametrize("at", range(1, 21))
def test_two_equal_packings_end_in_one_complete_generation(at: int, tmp_path: Path) -> None:
    def other() -> None:
        packed(Grey(60), LocalStore(tmp_path))

    manifest = packed(Grey(60), OvertakenStore(tmp_path, at, other))
    assert manifest == Manifest.parse((tmp_path / "manifest.json").read_bytes())
    assert names_of(manifest) == names_in(tmp_path)
    assert len(samples_in(tmp_path, manifest)) == 60


def test_packing_that_begins_during_a_commit_keeps_its_files(tmp_path: Path) -> None:
    other = Generation(LocalStore(tmp_path), "f" * 16)

    class Late(CountingStore):
        def put(self, key: str, data: Any) -> StoredObject:
            if key == "manifest.json":
                other.claim()
                LocalStore(tmp_path).put(other.shard_name(0), b"its first")
            return super().put(key, data)

    manifest = packed(Grey(30), Late(tmp_path))
    assert sorted([*names_of(manifest), "packing.json", other.shard_name(0)]) == names_in(tmp_path)


def test_commit_with_removed_shards_is_an_error(tmp_path: Path) -> None:
    class Emptied(CountingStore):
        def put(self, key: str, data: Any) -> StoredObject:
            done = super().put(key, data)
            if key == "manifest.json":
                next(tmp_path.glob("*/shard-000001.tar")).unlink()
            return done

    with pytest.raises(
        StoreError,
        match=r"shard-000001.tar was written, but is missing or has changed \(1 shards in all\): another program writes to",
    ):
        packed(Grey(60), Emptied(tmp_path))
    assert packed(Grey(60), LocalStore(tmp_path)).num_samples == 60


class Drifting(Grey):
    """A dataset whose samples get larger each time it is read, except the first and last."""

    extra = 0

    def __getitem__(self, index: int) -> Any:
        image, _ = super().__getitem__(index)
        return (image, b"\1" * (700 * self.extra if index % 7 == 3 and index else 1))


@pytest.mark.slow(reason="packs eighteen times")
def test_dataset_that_changes_between_runs_is_packed_completely(tmp_path: Path) -> None:
    for extra in (1, 3, 40):
        folder = tmp_path / str(extra)
        for num_objects in (13, 16, 19):
            dataset = Drifting(90)
            with pytest.raises(InjectedEnd):
                packed(dataset, EndingStore(folder, num_objects))
            for lost in (1, 2, 4):
                for path in folder.glob(f"*/shard-{lost:06d}.tar"):
                    path.unlink()
            dataset.extra = extra
            manifest = packed(dataset, LocalStore(folder))
            assert names_of(manifest) == names_in(folder)
            assert [f"{manifest.generation}/shard-{number:06d}.tar" for number in range(len(manifest.shards))] == [
                shard.name for shard in manifest.shards
            ]
            assert [f"{number:08d}" for number in range(90)] == sorted(sample["__key__"] for sample in samples_in(folder, manifest))
            (folder / "manifest.json").unlink()


def test_unreadable_claim_counts_as_another_packings(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for content in (b"", b"[]", json.dumps({"generation": "e" * 16}).encode()):
        store.put("packing.json", content)
        with pytest.raises(StoreError, match="another packing into this folder was begun"):
            Generation(store, "f" * 16).check()


@pytest.mark.slow(reason="packs 600 samples, and again with workers for each of three gaps")
def test_workers_are_forked_while_no_thread_runs(tmp_path: Path) -> None:
    packed(Grey(600), LocalStore(tmp_path))
    wanted = bytes_in(tmp_path)
    for lost in (5, 20, 40):
        next(tmp_path.glob(f"*/shard-{lost:06d}.tar")).unlink()
    packed(Grey(600), LocalStore(tmp_path), workers=1, multiprocessing_context="fork")  # fork warns if threads run
    assert wanted == bytes_in(tmp_path)


def test_shard_deleted_between_listing_and_check_is_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = packed(Grey(10), LocalStore(tmp_path), maxcount=4)
    generation = Generation(LocalStore(tmp_path), manifest.generation)
    there = generation._there()
    monkeypatch.setattr(generation, "_there", lambda: there)
    (tmp_path / manifest.shards[0].name).unlink()
    (tmp_path / manifest.shards[1].name).write_bytes(b"")
    assert [record.shard for record in generation.records()] == [manifest.shards[2]]
