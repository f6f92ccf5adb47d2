"""Several machines pack one dataset: each packs its part of the order, and the last one to finish writes the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shmload import faults
from shmload.cli import app
from shmload.errors import ObjectMissing, StoreError
from shmload.formats.encryption import SampleCipher
from shmload.remote import RemoteDataset, upload_cv_dataset
from shmload.remote.manifest import Manifest
from shmload.remote.packing.dataset_packing import DatasetPacking
from shmload.remote.packing.pack_options import PackOptions
from shmload.remote.packing.shard_packing import PackProgress
from shmload.remote.packing.upload import packing_of
from shmload.storage.local_store import LocalStore
from tests.faults.points import PACKER_POINTS
from tests.remote.packing.kill_kit import MAXCOUNT, SEED, killed_after
from tests.remote.packing.packing_kit import CountingStore, Grey, Noisy, names_in, names_of, packed, published_bytes_in, samples_in


def part_of(dataset: Any, store: Any, number: int, count: int, **given: Any) -> DatasetPacking:
    """Returns the packing of a part in this process; `store` may be a folder."""
    on_progress = given.pop("on_progress", None)
    options: dict[str, Any] = {"maxsize": 100_000, "maxcount": 10, "workers": 0, "seed": 0, **given}
    store = LocalStore(store) if isinstance(store, Path) else store
    packing = DatasetPacking(dataset, store, PackOptions(**options, part=(number, count)), on_progress)
    packing.manifest = packing.run()  # type: ignore[attr-defined]  # what the test looks at
    return packing


def missing(packing: DatasetPacking) -> list[str]:
    return list(map(str, packing.missing))


@pytest.mark.parametrize("options", [{}, {"compress": "shards", "cipher": SampleCipher(bytes(32))}], ids=["plain", "encrypted"])
def test_parts_packed_in_any_order_equal_one_machines_packing(options: dict[str, Any], tmp_path: Path) -> None:
    told: list[PackProgress] = []
    assert missing(part_of(Noisy(75), tmp_path / "a", 3, 3, on_progress=told.append, **options)) == ["1/3", "2/3"]
    assert (told[-1].total, told[-1].num_samples) == (25, 25)
    assert missing(part_of(Noisy(75), tmp_path / "a", 1, 3, **options)) == ["2/3"]
    assert not (tmp_path / "a/manifest.json").exists()
    last = part_of(Noisy(75), tmp_path / "a", 2, 3, workers=1, multiprocessing_context="fork", **options)
    assert missing(last) == []
    manifest = Manifest.parse((tmp_path / "a/manifest.json").read_bytes())
    assert last.manifest == manifest  # type: ignore[attr-defined]
    assert names_in(tmp_path / "a") == names_of(manifest)
    assert [int(s.name.rpartition("-")[2].partition(".")[0]) for s in manifest.shards] == [
        *(0, 1, 2),
        *(1_000_000, 1_000_001, 1_000_002),
        *(2_000_000, 2_000_001, 2_000_002),
    ]
    for number in (1, 2, 3):
        part_of(Noisy(75), tmp_path / "b", number, 3, **options)
    assert published_bytes_in(tmp_path / "a") == published_bytes_in(tmp_path / "b")
    if not options:
        alone = samples_in(tmp_path / "c", packed(Noisy(75), LocalStore(tmp_path / "c")))
        for theirs, ours in zip(alone, samples_in(tmp_path / "a", manifest), strict=True):
            assert theirs == ours


def test_reader_names_a_missing_part(tmp_path: Path) -> None:
    part_of(Grey(40), tmp_path, 1, 4)
    part_of(Grey(40), tmp_path, 3, 4)
    with pytest.raises(
        ObjectMissing, match=r"not a dataset yet: it is packed in 4 parts, of which 2/4, 4/4 are missing: pack them with"
    ):
        RemoteDataset.from_urls(str(tmp_path))
    part_of(Grey(40), tmp_path, 4, 4)
    with pytest.raises(ObjectMissing, match=r"of which 2/4 is missing: pack it with the same arguments$"):
        RemoteDataset.from_urls(str(tmp_path))

    class Ending(CountingStore):
        def put(self, key: str, data: Any) -> Any:
            if key == "manifest.json":
                raise StoreError("the store is away")
            return super().put(key, data)

    with pytest.raises(StoreError, match="the store is away"):
        part_of(Grey(40), Ending(tmp_path), 2, 4)
    with pytest.raises(ObjectMissing, match="all of its 4 parts are there, and the packing was not finished: pack any"):
        RemoteDataset.from_urls(str(tmp_path))
    part_of(Grey(40), tmp_path, 1, 4)
    assert len(RemoteDataset.from_urls(str(tmp_path))) == 40


def test_unfinished_packing_is_not_a_dataset(tmp_path: Path) -> None:
    class Failing(Grey):
        calls = 0

        def __getitem__(self, index: int) -> Any:
            self.calls += 1
            if self.calls > 400:
                raise KeyError(index)
            return super().__getitem__(index)

    with pytest.raises(KeyError):
        packed(Failing(600), LocalStore(tmp_path))
    assert any(name.endswith(".tar") for name in names_in(tmp_path))
    with pytest.raises(ObjectMissing, match="a packing into it was begun and is not finished: the same call, or `shmload pack`"):
        RemoteDataset.from_urls(str(tmp_path))


def test_part_repairs_only_its_own_shards(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        part_of(Grey(75), tmp_path, number, 3)
    whole = published_bytes_in(tmp_path)
    for name in ("shard-1000001.tar", "shard-1000002.tar.index"):
        next(tmp_path.glob(f"*/{name}")).unlink()
    damaged = next(tmp_path.glob("*/shard-2000000.tar"))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    store = CountingStore(tmp_path)
    # Only sizes are compared: a shard's content is checked by its own machine.
    assert missing(part_of(Grey(75), store, 1, 3)) == ["2/3"]
    assert store.written == []
    assert missing(part_of(Grey(75), tmp_path, 3, 3)) == ["2/3"]
    store = CountingStore(tmp_path)
    assert missing(part_of(Grey(75), store, 2, 3)) == []
    assert [name[17:] for name in store.written if name.endswith(".tar")] == ["shard-1000001.tar", "shard-1000002.tar"]
    assert published_bytes_in(tmp_path) == whole


def test_two_parts_that_finish_at_once_are_both_complete(tmp_path: Path) -> None:
    class Overtaken(CountingStore):
        def put(self, key: str, data: Any) -> Any:
            if key == "manifest.json":
                assert missing(part_of(Grey(40), tmp_path, 1, 2)) == []
            return super().put(key, data)

    part_of(Grey(40), tmp_path, 1, 2)
    last = part_of(Grey(40), Overtaken(tmp_path), 2, 2)
    assert missing(last) == []
    assert names_in(tmp_path) == names_of(last.manifest)  # type: ignore[attr-defined]


def test_different_number_of_parts_is_another_packing(tmp_path: Path) -> None:
    class Overtaken(CountingStore):
        def put(self, key: str, data: Any) -> Any:
            if key.endswith("shard-1000001.tar.index"):
                part_of(Grey(60), tmp_path, 1, 3)
            return super().put(key, data)

    with pytest.raises(StoreError, match="another packing into this folder was begun"):
        part_of(Grey(60), Overtaken(tmp_path), 2, 2)


def test_parts_are_appended(tmp_path: Path) -> None:
    first = packed(Grey(25), LocalStore(tmp_path))
    for again in (False, True):
        for number in (2, 1):
            part_of(Grey(12), tmp_path, number, 2, append=True)
        manifest = Manifest.parse((tmp_path / "manifest.json").read_bytes())
        assert (manifest.num_samples, len(manifest.generations)) == (37, 2), again
    assert manifest.shards[: len(first.shards)] == first.shards
    assert len({sample["__key__"] for sample in samples_in(tmp_path, manifest)}) == 37


def test_parts_may_be_empty(tmp_path: Path) -> None:
    for number in (3, 1, 5, 2, 4):
        last = part_of(Grey(3), tmp_path, number, 5)
    assert missing(last) == []
    assert sorted(sample["cls"] for sample in samples_in(tmp_path, last.manifest)) == [0, 1, 2]  # type: ignore[attr-defined]


def test_launchers_rank_is_not_used_as_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert part_of(Grey(30), tmp_path, 2, 2).manifest.num_samples == 15  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", [(0, 4), (5, 4), (1, 0), (1, 1000), (1, 2, 3)])
def test_invalid_part_is_refused(part: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"part is \(number, count\), from \(1, count\) on, and count is 999 at most; got"):
        upload_cv_dataset([(b"x", 1)], bucket=str(tmp_path), part=part)


def test_iterable_cannot_be_packed_in_parts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"part=\(1, 2\) is of a dataset with a length, and where a part of an iterable begins is"):
        packing_of(iter([{"cls": 1}]), LocalStore(tmp_path), PackOptions(100_000, 10, 0, 0, part=(1, 2)))


def test_pack_command_packs_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"label": {number}}}\n' for number in range(20)))

    def run(part: str) -> Any:
        return CliRunner().invoke(app, ["pack", "lines.jsonl", str(tmp_path / "out"), "--workers", "0", "--part", part])

    done = run("2/2")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[1] == "part 2/2 is complete; missing: 1/2. The part that ends last completes the dataset"
    assert "read it by" in run("1/2").stdout
    assert sorted(s["cls"] for s in RemoteDataset.from_urls(str(tmp_path / "out")).decode()) == list(range(20))
    for wrong in ("2", "a/b", "-1/2"):
        done = run(wrong)
        assert (done.exit_code, f"--part is N/COUNT, such as 1/4 to 4/4; got {wrong!r}" in done.stderr) == (2, True)


@pytest.mark.slow(reason="parts are killed in their own processes, and resumed")
@pytest.mark.parametrize("point", PACKER_POINTS)
def test_part_killed_at_a_named_point_is_resumed(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charges = tmp_path / "charges"
    charges.mkdir()
    given = {"maxcount": MAXCOUNT, "seed": SEED}
    for folder in ("out", "wanted"):
        part_of(Noisy(80), tmp_path / folder, 1, 2, **given)
    part_of(Noisy(80), tmp_path / "wanted", 2, 2, **given)
    with monkeypatch.context() as patch:
        patch.setattr(faults, "_folder", str(charges))
        patch.setattr(faults, "armed", True)
        (charges / f"{point}.1").write_text("")
        assert killed_after(tmp_path / "out", None, num_samples=80, part=(2, 2)) >= 0
    assert missing(part_of(Noisy(80), tmp_path / "out", 2, 2, **given)) == []
    assert published_bytes_in(tmp_path / "out") == published_bytes_in(tmp_path / "wanted")
