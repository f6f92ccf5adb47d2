"""Packing of sources without indices: iterables, generators, functions that make several samples of one, and existing datasets."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from shmload.cli import app
from shmload.formats.encryption import SampleCipher
from shmload.remote import RemoteDataset, upload_cv_dataset
from shmload.remote.manifest import Manifest
from shmload.remote.packing import stream_encoding
from shmload.remote.packing.pack_options import PackOptions
from shmload.remote.packing.shard_packing import PackProgress
from shmload.remote.packing.upload import packing_of
from tests.remote.layout_kit import CASES, NUM_SAMPLES, Case
from tests.remote.packing.packing_kit import CountingStore, encoded, names_in, names_of, samples_in

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
def test_iterable_is_packed_in_its_order(count: int, tmp_path: Path) -> None:
    told: list[PackProgress] = []
    manifest, _ = pack(numbered(count), tmp_path, on_progress=told.append)
    assert manifest.num_samples == count
    assert labels_in(tmp_path, manifest) == list(range(count))
    assert names_in(tmp_path) == names_of(manifest)
    assert (told[-1].total, told[-1].num_samples) == (None, count)
    keys = [sample["__key__"] for sample in samples_in(tmp_path, manifest)]
    assert keys == [f"{number:09d}" for number in range(count)]


@pytest.mark.parametrize("count", [20, 25])
def test_repeated_packing_writes_nothing_and_adds_new_samples(count: int, tmp_path: Path) -> None:
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


def test_fewer_samples_than_packed_before_are_an_error_and_the_dataset_is_kept(tmp_path: Path) -> None:
    manifest, _ = pack(numbered(35), tmp_path)
    with pytest.raises(ValueError, match="this iterable ended after 12 samples, but 35 that began with the same ones are packed"):
        pack(numbered(12), tmp_path)
    assert (
        labels_in(tmp_path, manifest)
        == list(range(35))
        == sorted(s["cls"] for s in RemoteDataset.from_urls(str(tmp_path)).decode())
    )


@pytest.mark.parametrize("after", [1, 8, 9, 25, 40, 99])
def test_killed_packing_is_resumed(after: int, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("count", [3, 20])
def test_iterable_may_reuse_its_buffers(count: int, tmp_path: Path) -> None:
    def samples() -> Iterator[dict[str, Any]]:
        sample = {"x": np.zeros(3, np.int32), "cls": 0}
        for number in range(count):
            sample["x"][:] = sample["cls"] = number
            yield sample

    manifest, _ = pack(samples(), tmp_path)
    assert [(sample["x.npy"][0], sample["cls"]) for sample in samples_in(tmp_path, manifest)] == [(n, n) for n in range(count)]


def test_error_that_cannot_be_pickled_is_reported_as_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"field 'text': 'utf-8' codec can't encode character .*surrogates not allowed") as caught:
        pack([{"text": "\ud800"}], tmp_path)
    assert caught.value.__notes__ == ["sample 0 of the dataset"]


def test_error_of_an_iterable_names_the_position(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an iterable of at least 1 sample is needed; this one is empty"):
        pack(iter(()), tmp_path)
    with pytest.raises(TypeError, match="no format stores values of type object") as caught:
        pack(({"x": 1 if number < 12 else object()} for number in range(20)), tmp_path)
    assert caught.value.__notes__ == ["sample 12 of the iterable"]
    with pytest.raises(TypeError, match="is needed, or an iterable of samples, which are packed in its order; got int"):
        pack(5, tmp_path)


class Pair(NamedTuple):
    image: Any
    label: int


class Whole(int):
    """An int subclass, which another process may unpickle as anything."""


class Bare:
    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


def all_kinds(folder: Path) -> Iterator[Any]:
    """Yields samples of every kind and reuses its buffer."""
    buffer = np.zeros((4, 5, 3), np.uint8)
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    jpeg = encoded(Image.fromarray(pixels), "JPEG")
    (folder / "there.jpg").write_bytes(jpeg)
    grey = Image.fromarray(pixels).convert("P")
    for number in range(84):
        buffer[:] = number % 256
        with Image.open(folder / "there.jpg") as there, Image.open(folder / "there.jpg") as changed:
            changed.putpixel((0, 0), (number % 256, 0, 0))
            yield (
                (buffer, number),
                {"image": Image.open(io.BytesIO(jpeg)), "label": Whole(number), "more": [1, 2.5, {"a": None}]},
                (there, number),
                {"image": changed, "seg.png": encoded(grey, "PNG"), "where": folder / "there.jpg"},
                Pair(torch.full((3, 2, 2), number / 255), number),
                {"graph": Bare(), "n": np.int16(number), "x": torch.arange(number % 7), "y": np.arange(6.0)[:: -(number % 2) or 1]},
                grey,
            )[number % 7]


@pytest.mark.parametrize(
    "options", [{}, {"quality": 90, "compress": "samples", "cipher": SampleCipher(bytes(32))}], ids=["plain", "all options"]
)
def test_bytes_of_an_iterable_do_not_depend_on_the_number_of_workers(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_encoding, "_CHUNK_SIZE", 8)
    found = {}
    for workers in (0, 1, 2):
        folder = tmp_path / str(workers)
        given = PackOptions(30_000, 50, workers, 0, serializers={Bare: ("bare", lambda bare: b"kept")}, **options)
        manifest = packing_of(all_kinds(tmp_path), CountingStore(folder), given).run()
        found[workers] = {name: (folder / name).read_bytes() for name in names_of(manifest)}
    assert found[0] == found[1] == found[2]
    assert multiprocessing.active_children() == []


def test_bad_sample_raises_the_same_error_with_and_without_workers(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="field 'x': no format stores values of type complex") as caught:
        samples = ({"x": 1 if number < 200 else complex(number)} for number in range(400))
        packing_of(samples, CountingStore(tmp_path), replace(OPTIONS, workers=2)).run()
    assert caught.value.__notes__ == ["sample 200 of the iterable"]


def test_workers_of_a_killed_packing_end(tmp_path: Path) -> None:
    read, write = os.pipe()

    def deadly() -> Iterator[dict[str, Any]]:
        for number, sample in enumerate(numbered(500)):
            if number == 400:
                os.write(write, json.dumps([child.pid for child in multiprocessing.active_children()]).encode())
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample

    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        packing_of(deadly(), CountingStore(tmp_path), replace(OPTIONS, workers=2)).run()
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    os.close(write)
    with os.fdopen(read) as pipe:
        workers = json.loads(pipe.read())
    assert workers
    for worker in workers:
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(worker)
            assert select.select([pidfd], [], [], 30)[0]
            os.close(pidfd)


def test_fluent_dataset_is_packed(tmp_path: Path) -> None:
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
    """Returns a function that runs `shmload pack SOURCE out`."""
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


def test_generator_function_is_a_source(command: Any, tmp_path: Path) -> None:
    (tmp_path / "made_for_packing.py").write_text(MODULE)
    done = command("made_for_packing:samples")
    assert (done.exit_code, done.stderr) == (0, "")
    assert labels_in(tmp_path / "out", Manifest.parse((tmp_path / "out/manifest.json").read_bytes())) == list(range(12))


def test_function_makes_any_number_of_samples_of_each(command: Any, tmp_path: Path) -> None:
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
def test_existing_datasets_are_packed(case: Case, way: str, command: Any, tmp_path: Path) -> None:
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
