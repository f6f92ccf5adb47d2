"""`shmload inspect --check`: all samples are read, and what is damaged is named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shmload.formats import TarWriter, TFRecordWriter
from shmload.remote import upload_cv_dataset
from tests.cli.conftest import WRITERS, jpeg

Written = Callable[[str], Path]
Command = Callable[..., Any]

KEY = bytes(range(32))


def changed(path: Path, at: int) -> None:
    """Changes a byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def packed(folder: Path, **options: Any) -> list[Path]:
    """Packs 12 samples into shards of 4. Returns their paths."""
    samples = [{"npy": np.arange(100) + number} for number in range(12)]
    upload_cv_dataset(samples, None, str(folder), maxcount=4, workers=1, **options)
    return sorted([*folder.glob("*/*.tar"), *folder.glob("*/*.tar.zst")])


@pytest.mark.parametrize(
    "name", ["npy", "Parquet", "tar", "tar, gzip", "tar, xz", "tar, zstd", "TFRecord", "TFRecord, gzip", "images"]
)
def test_good_files(name: str, tmp_path: Path, command: Command) -> None:
    file, write = WRITERS[name]
    done = command("inspect", "--check", "--json", write(tmp_path / file))
    assert (done.exit_code, done.stderr) == (0, "")
    (found,) = json.loads(done.stdout)
    expected = {"npy": 10, "Parquet": 10, "TFRecord": 6, "TFRecord, gzip": 6, "images": 2}.get(name, 5)
    assert (found["num_samples"], found["damaged"]) == (expected, [])  # of the images, two are named so


@pytest.mark.parametrize("mode", ["I", "F"])
def test_images_of_kinds_that_the_decoder_refuses_are_not_damaged(mode: str, tmp_path: Path, command: Command) -> None:
    upload_cv_dataset([{"tif": Image.new(mode, (9, 9), 70_000)}] * 3, None, str(tmp_path), workers=1)
    done = command("inspect", "--check", "--json", *tmp_path.glob("*/*.tar"))
    assert done.exit_code == 0, done.stdout


def test_records_after_a_damaged_one_in_another_shard_are_read(tmp_path: Path, command: Command) -> None:
    for shard in range(3):
        with TFRecordWriter(tmp_path / f"{shard}.tfrecord") as writer:
            for number in range(5):
                writer.write({"x": np.full(8, number, np.float32)})
    path = tmp_path / "1.tfrecord"
    changed(path, path.stat().st_size // 2)
    done = command("inspect", "--check", tmp_path)
    assert done.exit_code == 1
    damage, verdict = done.stdout.splitlines()
    assert damage.startswith("DAMAGED ")
    assert "1.tfrecord" in damage
    assert "checksum" in damage
    assert verdict == f"{tmp_path}: 12 samples in 3 shards read, damage in 1 place"


@pytest.mark.parametrize(
    "options", [{}, {"compress": "shards"}, {"compress": "samples"}, {"key": KEY}], ids=["plain", "shards", "samples", "encrypted"]
)
def test_packed_shards(options: dict[str, Any], tmp_path: Path, command: Command) -> None:
    shards = packed(tmp_path / "p", **options)
    assert len(shards) == 3
    done = command("inspect", "--check", tmp_path / "p")
    assert done.exit_code == 0, done.stdout
    assert done.stdout == f"{tmp_path / 'p'}: 12 samples in 3 shards read, no damage found\n"
    changed(shards[1], shards[1].stat().st_size // 3)
    shards[2].unlink()
    done = command("inspect", "--check", tmp_path / "p")
    first, second, verdict = done.stdout.splitlines()
    assert done.exit_code == 1
    assert f"{shards[1].name}" in first
    assert f"{shards[2].name}" in second
    assert verdict == f"{tmp_path / 'p'}: 4 samples in 3 shards read, damage in 2 places"


def test_every_damaged_image_is_named(tmp_path: Path, command: Command) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        for number in range(6):
            image = jpeg(number)
            writer.write({"__key__": str(number), "jpg": {1: image[:300], 3: b"", 4: b"not an image"}.get(number, image)})
    done = command("inspect", "--check", "--json", tmp_path / "a.tar")
    assert done.exit_code == 1
    (found,) = json.loads(done.stdout)
    assert found["num_samples"] == 3
    assert [line.partition("sample ")[2].split(":")[0] for line in found["damaged"]] == ["'1'", "'3'", "'4'"]


def test_compressed_shards_after_a_damaged_one_are_read(tmp_path: Path, command: Command) -> None:
    for number in range(3):
        with TarWriter(tmp_path / f"{number}.tar") as writer:
            writer.write({"__key__": "a", "txt": "x" * 1000, "jpg": jpeg(number)[: 300 if number == 2 else None]})
        data = gzip.compress((tmp_path / f"{number}.tar").read_bytes(), mtime=0)
        (tmp_path / f"{number}.tar").unlink()
        (tmp_path / f"{number}.tar.gz").write_bytes(data)
    changed(tmp_path / "0.tar.gz", 60)
    for place, num_shards in ((tmp_path, 3), (f"{tmp_path}/{{0..2}}.tar.gz", 3), (tmp_path / "0.tar.gz", 1)):
        done = command("inspect", "--check", "--json", place)
        assert done.exit_code == 1
        (found,) = json.loads(done.stdout)
        assert (found["num_shards"], found["num_samples"]) == (num_shards, num_shards // 2)
        assert "0.tar.gz" in found["damaged"][0]
        assert len(found["damaged"]) == (num_shards + 1) // 2


def test_a_truncated_shard_and_a_missing_path(tmp_path: Path, written: Written, command: Command) -> None:
    path = tmp_path / "a.tar"
    WRITERS["tar"][1](path)
    path.write_bytes(path.read_bytes()[:2000])
    done = command("inspect", "--check", path, tmp_path / "absent")
    assert done.exit_code == 2
    assert "a.tar" in done.stdout.splitlines()[0]
    assert "absent" in done.stderr
