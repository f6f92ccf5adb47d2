"""Appending to a packed dataset: existing shards are unchanged, and new samples form a further generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shmload import faults
from shmload.errors import ObjectMissing, ShardCorrupt, StoreError
from shmload.formats.encryption import SampleCipher
from shmload.remote import RemoteDataset
from shmload.remote.manifest import Manifest
from shmload.remote.packing.generation import Generation
from shmload.remote.packing.pack_options import PackOptions
from shmload.remote.packing.upload import packing_of
from shmload.storage.local_store import LocalStore
from tests.faults.points import PACKER_POINTS
from tests.remote.packing.kill_kit import killed_after
from tests.remote.packing.packing_kit import CountingStore, Grey, Noisy, names_in, names_of, packed, published_bytes_in, samples_in

KEY = bytes(range(32))


def appended(dataset: Any, folder: Path, **options: Any) -> Manifest:
    return packed(dataset, LocalStore(folder), append=True, **options)


def test_existing_shards_are_unchanged_and_new_samples_follow_them(tmp_path: Path) -> None:
    first = packed(Grey(25), LocalStore(tmp_path))
    before = published_bytes_in(tmp_path)
    second = appended(Grey(12), tmp_path, seed=3, maxcount=7)
    third = appended([(b"old", 1)] * 3, tmp_path)
    assert third.shards[: len(second.shards)] == second.shards
    assert second.shards[: len(first.shards)] == first.shards
    assert (first.generation, second.generation, third.generation) == third.generations
    assert {name: data for name, data in before.items() if name != "manifest.json"}.items() <= published_bytes_in(tmp_path).items()
    assert names_of(third) == names_in(tmp_path)
    found = samples_in(tmp_path, third)
    assert [f"{number:08d}" for number in range(40)] == sorted(sample["__key__"] for sample in found)
    assert list(range(12)) == sorted(sample["cls"] for sample in found[25:37])
    assert third.num_samples == 40
    assert third.extensions == ("bin", "cls", "png")
    assert third == Manifest.parse((tmp_path / "manifest.json").read_bytes())


def test_repeated_append_adds_nothing_but_a_different_one_does(tmp_path: Path) -> None:
    first = appended(Grey(25), tmp_path)
    assert first == packed(Grey(25), LocalStore(tmp_path / "other"))
    second = appended(Grey(12), tmp_path)
    store = CountingStore(tmp_path)
    assert second == packed(Grey(12), store, append=True)
    assert store.written == []
    assert appended(Grey(25), tmp_path).num_samples == 62
    assert appended(Grey(12), tmp_path).num_samples == 74


def test_iterable_is_appended(tmp_path: Path) -> None:
    for again in (False, True):
        for numbers in (range(5), range(5, 11)):
            options = PackOptions(100_000, 4, 0, 0, append=True)
            packing_of(({"label": number} for number in numbers), LocalStore(tmp_path), options).run()
        if not again:
            assert [sample["cls"] for sample in RemoteDataset.from_urls(str(tmp_path), shuffle=False).decode()] == list(range(11))
    assert len(RemoteDataset.from_urls(str(tmp_path))) == 22


def test_open_reader_and_reader_of_a_generation_do_not_see_the_append(tmp_path: Path) -> None:
    first = packed(Grey(25), LocalStore(tmp_path))
    reader = RemoteDataset.from_urls(str(tmp_path), seed=4)
    wanted = [sample["__key__"] for sample in RemoteDataset.from_urls(str(tmp_path), seed=4)]
    appended(Grey(12), tmp_path)
    assert [sample["__key__"] for sample in reader] == wanted
    then = RemoteDataset.from_urls(str(tmp_path), seed=4, generation=first.generation)
    assert [sample["__key__"] for sample in then] == wanted
    assert RemoteDataset(None, str(tmp_path), generation=first.generation).num_samples == 25
    assert len(RemoteDataset.from_urls(str(tmp_path))) == 37
    with pytest.raises(
        ObjectMissing, match=rf"the dataset has no generation 'ffff', only {first.generation}, [0-9a-f]{{16}}: it was"
    ):
        RemoteDataset.from_urls(str(tmp_path), generation="ffff")
    with pytest.raises(ValueError, match="needs the URL of a packed folder, and no other URL"):
        RemoteDataset.from_urls(str(tmp_path / first.shards[0].name), generation=first.generation)


def test_dataset_has_one_key_and_moved_members_are_detected(tmp_path: Path) -> None:
    packed(Grey(5), LocalStore(tmp_path), cipher=SampleCipher(KEY))
    for cipher in (None, SampleCipher(bytes(32))):
        with pytest.raises(
            ValueError, match=r"a dataset is encrypted with one key or with none: what is there with [0-9a-f]{8}, and"
        ):
            appended(Grey(7), tmp_path, cipher=cipher)
    appended(Grey(7), tmp_path, cipher=SampleCipher(KEY), compress="shards")
    found = list(RemoteDataset.from_urls(str(tmp_path), key=KEY).decode())
    assert sorted(sample["cls"] for sample in found) == sorted([*range(5), *range(7)])
    assert len({sample["__key__"] for sample in found}) == 12


def test_lost_appended_shard_is_packed_again_and_a_lost_earlier_shard_is_an_error(tmp_path: Path) -> None:
    first = packed(Grey(25), LocalStore(tmp_path))
    second = appended(Grey(12), tmp_path, maxcount=5)
    whole = published_bytes_in(tmp_path)
    (tmp_path / second.shards[-1].name).unlink()
    assert appended(Grey(12), tmp_path, maxcount=5) == second
    assert published_bytes_in(tmp_path) == whole
    (tmp_path / first.shards[0].name).unlink()
    with pytest.raises(StoreError, match=r"shard-000000.tar was written, but is missing or has changed \(1 shards in all\)"):
        appended(Grey(30), tmp_path)


def test_concurrent_appends_never_lose_each_others_samples(tmp_path: Path) -> None:
    packed(Grey(25), LocalStore(tmp_path))

    class Overtaken(CountingStore):
        def put(self, key: str, data: Any) -> Any:
            if key.endswith("shard-000001.tar.index"):
                appended(Grey(12), tmp_path)
            return super().put(key, data)

    with pytest.raises(StoreError, match="another packing into this folder was begun"):
        packed(Grey(30), Overtaken(tmp_path), append=True)
    assert appended(Grey(30), tmp_path).num_samples == 67
    store = LocalStore(tmp_path)
    late = Generation(store, "f" * 16, before=Manifest.parse((tmp_path / "manifest.json").read_bytes()).before())
    late.claim()
    with pytest.raises(StoreError, match=r"is appended to \([0-9a-f]{16}\) no longer exists: another packing has finished since"):
        late.commit([], 0)


def test_interrupted_append_is_invisible_until_it_is_complete(tmp_path: Path) -> None:
    first = packed(Grey(25), LocalStore(tmp_path))

    class Failing(Grey):
        def __getitem__(self, index: int) -> Any:
            if index == 17 and self.fails:
                raise KeyError(index)
            return super().__getitem__(index)

    dataset = Failing(60)
    dataset.fails = True
    with pytest.raises(KeyError):
        appended(dataset, tmp_path)
    assert first == Manifest.parse((tmp_path / "manifest.json").read_bytes())
    dataset.fails = False
    assert appended(dataset, tmp_path).num_samples == 85


def test_generations_in_a_manifest_are_consecutive(tmp_path: Path) -> None:
    packed(Grey(15), LocalStore(tmp_path))
    manifest = appended(Grey(12), tmp_path)
    one, two, three, *rest = manifest.shards
    mixed = Manifest(**{name: getattr(manifest, name) for name in manifest.__slots__} | {"shards": (one, three, two, *rest)})
    with pytest.raises(ShardCorrupt, match=r"manifest.json: shards: the shards of a generation must be adjacent"):
        Manifest.parse(mixed.dump())


@pytest.mark.slow(reason="appends are killed in their own processes, and resumed")
@pytest.mark.parametrize("point", PACKER_POINTS)
def test_append_killed_at_a_named_point_is_resumed(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charges = tmp_path / "charges"
    charges.mkdir()
    for name in ("out", "wanted"):
        packed(Noisy(30), LocalStore(tmp_path / name))
    wanted = appended(Noisy(40), tmp_path / "wanted", maxcount=12, seed=5)
    with monkeypatch.context() as patch:
        patch.setattr(faults, "_folder", str(charges))
        patch.setattr(faults, "armed", True)
        (charges / f"{point}.1").write_text("")
        assert killed_after(tmp_path / "out", None, num_samples=40, append=True) >= 0
    assert appended(Noisy(40), tmp_path / "out", maxcount=12, seed=5) == wanted
    assert published_bytes_in(tmp_path / "out") == published_bytes_in(tmp_path / "wanted")
