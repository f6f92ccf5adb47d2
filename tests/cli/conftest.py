"""Small files of every format, and the command run in this process."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image
from safetensors.numpy import save_file
from typer.testing import CliRunner

from shmload.cli import app
from shmload.formats import TarWriter, TFRecordWriter
from shmload.formats.compression import zstd_pieces

ROWS = np.arange(20, dtype=np.float32).reshape(10, 2)


def jpeg(number: int, width: int = 16, height: int = 12) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 20 * number, np.uint8)).save(file, "JPEG")
    return file.getvalue()


def _tar(path: Path) -> Path:
    with TarWriter(path) as writer:
        for number in range(5):
            extra = {"txt": "odd"} if number % 2 else {}
            writer.write({"__key__": f"{number:02d}", "jpg": jpeg(number), "cls": number, **extra})
    return path


def _tfrecord(path: Path) -> Path:
    with TFRecordWriter(path) as writer:
        for number in range(6):
            writer.write({"x": ROWS[number], "y": np.arange(number % 3), "s": b"abc"})
    return path


def _hdf5(path: Path) -> Path:
    with h5py.File(path, "w", userblock_size=512) as file:
        file["x"] = ROWS
    return path


def _zarr(path: Path) -> Path:
    zarr.open_group(path, mode="w").create_array("x", data=ROWS)
    return path


def _images(path: Path) -> Path:
    for number, name in enumerate(("cat/1.bin", "cat/2.jpg", "dog/1.jpg")):  # detected by bytes, not by names
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(jpeg(number, 16 + number))
    (path / "notes.txt").write_text("no picture")
    return path


def _megatron(path: Path) -> Path:
    tokens = np.arange(9, dtype=np.uint16)
    path.with_suffix(".bin").write_bytes(tokens.tobytes())
    lengths, ends = np.array([4, 5], np.int32), np.array([0, 1, 2], np.int64)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2, 3)
    path.write_bytes(head + lengths.tobytes() + np.array([0, 8], np.int64).tobytes() + ends.tobytes())
    return path


def _npy(path: Path) -> Path:
    np.save(path, ROWS)
    return path


def _parquet(path: Path) -> Path:
    pq.write_table(pa.table({"x": ROWS[:, 0], "s": [f"é{n}" for n in range(10)]}), path, row_group_size=4)
    return path


def _safetensors(path: Path) -> Path:
    save_file({"x": ROWS}, path)
    return path


def _zstd(path: Path) -> Path:
    path.write_bytes(b"".join(zstd_pieces(memoryview(_tar(path.with_suffix(".plain")).read_bytes()), 3)))
    return path


def _gzipped(path: Path) -> Path:
    path.write_bytes(gzip.compress(_tfrecord(path.with_suffix(".plain")).read_bytes()))
    return path


WRITERS: dict[str, tuple[str, Callable[[Path], Path]]] = {  # name -> (file, function that writes it)
    "npy": ("a.npy", _npy),
    "Parquet": ("a.parquet", _parquet),
    "HDF5": ("a.h5", _hdf5),
    "safetensors": ("a.safetensors", _safetensors),
    "Zarr": ("a.zarr", _zarr),
    "tar": ("a.tar", _tar),
    "tar, gzip": ("a.tar.gz", _tar),
    "tar, bzip2": ("a.tar.bz2", _tar),
    "tar, xz": ("a.tar.xz", _tar),
    "tar, zstd": ("a.tar.zst", _zstd),
    "TFRecord": ("a.tfrecord", _tfrecord),
    "TFRecord, gzip": ("a.tfrecord.gz", _gzipped),
    "images": ("photos", _images),
    "tokens, Megatron": ("a.idx", _megatron),
}


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that writes a small file of a format and returns its path. The file's name does not reveal the format."""

    def write(name: str) -> Path:
        file, writer = WRITERS[name]
        path = writer(tmp_path / file)
        return path if name == "tokens, Megatron" else path.rename(tmp_path / f"data{number_of(name)}")

    def number_of(name: str) -> int:
        return list(WRITERS).index(name)

    return write


@pytest.fixture
def command() -> Callable[..., Any]:
    """Returns a function that runs `shmload ...` in this process."""

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run
