"""Packing of what has no numbers: iterables, generators, functions that make several samples of one, and data as they lie."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shmload.cli import app
from shmload.remote import RemoteDataset, upload_cv_dataset
from shmload.remote.manifest import Manifest
from shmload.remote.packing.pack import PackOptions, PackProgress, packing_of
from tests.remote.layout_kit import CASES, NUM_SAMPLES, Case
from tests.remote.packing.packing_kit import CountingStore, names_in, names_of, samples_in

OPTIONS = PackOptions(maxsize=100_000, maxcount=10, workers=0, seed=0)


def numbered(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"bin": bytes([number % 256]) * (number % 50), "cls": number}


def pack(samples: Any, folder: Path, **more: Any) -> tuple[Manifest, CountingStore]:
    store = CountingStore(folder)
    return packing_of(samples, store, OPTIONS, **more).run(), store


def labels_in(folder: Path, manifest: Manifest) -> list[int]:
    return [sample["cls"] for sample in samples_in(folder, manifest)]


@pytest.mark.parametrize("count", [1, 9, 10, 11, 257, 600])
def test_an_iterable_is_packed_in_its_order(count: int, tmp_path: Path) -> None:
    told: list[PackProgress] = []
    manifest, _ = pack(numbered(count), tmp_path, on_progress=told.append)
    assert manifest.num_samples == count
    assert labels_in(tmp_path, manifest) == list(range(count))
    assert names_in(tmp_path) == names_of(manifest)
    assert (told[-1].total, told[-1].num_samples) == (None, count)
    keys = [sample["__key__"] for sample in samples_in(tmp_path, manifest)]
    assert keys == [f"{number:09d}" for number in range(count)]


@pytest.mark.parametrize("count", [20, 25])
def test_packing_again_writes_nothing_and_what_came_since_is_added(count: int, tmp_path: Path) -> None:
    manifest, _ = pack(numbered(count), tmp_path)
    again, store = pack(numbered(count), tmp_path)
    assert again == manifest
    assert store.written == ["packing.json"]
    longer, store = pack(numbered(47), tmp_path)
    assert labels_in(tmp_path, longer) == list(range(47))
    assert longer.shards[: len(manifest.shards)] == manifest.shards
    assert not {shard.name for shard in manifest.shards} & set(store.written)
    other, _ = pack(({"cls": number + 1} for number in range(5)), tmp_path)
    assert other.generation != manifest.generation
    assert names_in(tmp_path) == names_of(other)


@pytest.mark.parametrize("after", [1, 8, 9, 25, 40, 99])
def test_a_packing_that_was_killed_goes_on(after: int, tmp_path: Path) -> None:
    def deadly() -> Iterator[dict[str, Any]]:
        for sample in numbered(100):
            if sample["cls"] == after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample

    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        pack(deadly(), tmp_path / "a")
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    resumed, _ = pack(numbered(100), tmp_path / "a")
    whole, _ = pack(numbered(100), tmp_path / "b")
    assert resumed == whole
    assert [(tmp_path / "a" / name).read_bytes() for name in names_of(whole)] == [
        (tmp_path / "b" / name).read_bytes() for name in names_of(whole)
    ]


def test_what_an_iterable_raises_says_where(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an iterable of at least 1 sample is needed; this one is empty"):
        pack(iter(()), tmp_path)
    with pytest.raises(TypeError, match="nothing keeps a object") as caught:
        pack(({"x": 1 if number < 12 else object()} for number in range(20)), tmp_path)
    assert caught.value.__notes__ == ["sample 12 of the iterable"]
    with pytest.raises(TypeError, match="is needed, or an iterable of samples, which are packed in its order; got a int"):
        pack(5, tmp_path)


def test_a_fluent_dataset_is_packed(tmp_path: Path) -> None:
    pack(numbered(30), tmp_path / "a")
    dataset = RemoteDataset.from_urls(str(tmp_path / "a"), shuffle=False).decode().select(is_even).map(doubled)
    manifest = upload_cv_dataset(dataset, bucket=str(tmp_path / "b"), maxcount=4)
    assert labels_in(tmp_path / "b", manifest) == [4 * number for number in range(15)]
    dataset.close()


def is_even(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 2 == 0)


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"cls": 2 * sample["cls"]}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`shmload pack SOURCE out`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def run(source: str, *options: str) -> Any:
        return CliRunner().invoke(app, ["pack", source, str(tmp_path / "out"), "--workers", "0", *options])

    yield run
    sys.modules.pop("made_for_packing", None)


MODULE = """
def samples():
    for number in range(12):
        yield {"cls": number}

def halves(sample):
    for part in range(int(sample["label"]) % 3):
        yield {"cls": int(sample["label"]), "part.cls": part}
"""


def test_a_function_that_yields_samples_is_a_source(command: Any, tmp_path: Path) -> None:
    (tmp_path / "made_for_packing.py").write_text(MODULE)
    done = command("made_for_packing:samples")
    assert (done.exit_code, done.stderr) == (0, "")
    assert labels_in(tmp_path / "out", Manifest.parse((tmp_path / "out/manifest.json").read_bytes())) == list(range(12))


def test_a_function_makes_any_number_of_samples_of_each(command: Any, tmp_path: Path) -> None:
    (tmp_path / "made_for_packing.py").write_text(MODULE)
    case = next(case for case in CASES if case.name == "jsonl")
    (tmp_path / "in").mkdir()
    case.write(tmp_path / "in")
    done = command(str(tmp_path / "in"), "--function", "made_for_packing:halves")
    assert (done.exit_code, done.stderr) == (0, "")
    found = labels_in(tmp_path / "out", Manifest.parse((tmp_path / "out/manifest.json").read_bytes()))
    assert found == [number for number in range(NUM_SAMPLES) for _ in range(number % 3)]
    done = command(str(tmp_path / "in"), "--function", "made_for_packing:nothing")
    assert done.exit_code == 2
    assert "--function: 'made_for_packing' has no 'nothing'" in done.stderr


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("jsonl", "jsonl.gz", "parquet", "litdata.zstd")], ids=lambda c: c.name
)
@pytest.mark.parametrize("way", ["folder", "URL", "files"])
def test_data_as_they_lie_are_packed(case: Case, way: str, command: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    case.write(tmp_path / "in")
    if way == "files" and case.name not in ("jsonl", "jsonl.gz", "parquet"):
        pytest.skip("their shards are named by an index.json")
    source = {"folder": f"{tmp_path}/in", "URL": f"file://{tmp_path}/in", "files": f"{tmp_path}/in/part-*"}[way]
    done = command(source, "--maxcount", "7")
    assert (done.exit_code, done.stderr) == (0, "")
    dataset = RemoteDataset.from_urls(str(tmp_path / "out")).decode(only=["cls", "name.txt"])
    found = sorted((sample["cls"], sample["name.txt"]) for sample in dataset)
    assert found == sorted((int(case.sample(number)["label"]), case.sample(number)["name"]) for number in range(NUM_SAMPLES))
    dataset.close()
