"""Compressed shards without a compression suffix, as TensorFlow writes TFRecord files."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from shmload.errors import ShardCorrupt
from shmload.formats import TarStream, TarWriter, TFRecordWriter
from shmload.formats.shared_index.shared_index import SharedIndex
from shmload.remote import RemoteDataset
from tests.storage.store_kit import web_server

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "zlib": zlib.compress,
}


def shards(folder: Path, layout: str) -> list[Path]:
    """Writes two shards of two samples."""
    paths = [folder / f"{number}.{layout}" for number in range(2)]
    for path in paths:
        if layout == "tar":
            with TarWriter(path) as tar:
                for number in range(2):
                    tar.write({"__key__": str(number), "cls": number})
        elif layout == "tfrecord":
            with TFRecordWriter(path) as writer:
                for number in range(2):
                    writer.write({"cls": number})
        elif layout == "npy":
            np.save(path, np.arange(2))
        else:
            path.write_text('{"cls": 0}\n{"cls": 1}\n')
    return paths


CASES = [(layout, kind) for layout in ("tfrecord", "jsonl", "npy") for kind in COMPRESS if kind != "zlib"]


@pytest.mark.parametrize(("layout", "kind"), [*CASES, ("tfrecord", "zlib")])
def test_compressed_shards_without_a_suffix_are_decompressed(layout: str, kind: str, tmp_path: Path) -> None:
    plain = list(RemoteDataset.from_urls(map(str, shards(tmp_path, layout)), shuffle=False))
    for path in shards(tmp_path, layout):
        path.write_bytes(COMPRESS[kind](path.read_bytes()))
    for source in (str(tmp_path), str(tmp_path / f"{{0..1}}.{layout}")):
        dataset = RemoteDataset.from_urls(source, shuffle=False)
        assert len(list(dataset)) == len(plain) == len(dataset.indexed()) == 4
        assert [list(map(str, sample.values())) for sample in dataset] == [list(map(str, sample.values())) for sample in plain]


@pytest.mark.parametrize(("layout", "kind"), [("tfrecord", "gz"), ("jsonl", "zst"), ("npy", "bz2"), ("tar", "xz")])
def test_compressed_shard_after_plain_ones_is_an_error_with_a_remedy(layout: str, kind: str, tmp_path: Path) -> None:
    path = shards(tmp_path, layout)[1]
    path.write_bytes(COMPRESS[kind](path.read_bytes()))
    with pytest.raises(
        ShardCorrupt, match=rf"1\.{layout}: is compressed .{kind}., which its name does not show: end the names of .* in \.{kind}"
    ):
        list(RemoteDataset.from_urls(str(tmp_path)))


def test_tar_files_that_are_all_compressed_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    for path in shards(tmp_path, "tar"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ShardCorrupt, match=r"[01]\.tar: is compressed .gz., which its name does not show"):
        list(RemoteDataset.from_urls(str(tmp_path)))


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_tar_without_any_suffix_is_decompressed(kind: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(COMPRESS[kind](shards(tmp_path, "tar")[0].read_bytes()))
    with web_server(tmp_path) as url:
        for place in (str(tmp_path), url):
            dataset = RemoteDataset.from_urls(f"{place}/data", shuffle=False, layout="tar")
            assert [sample["cls"] for sample in dataset] == [b"0", b"1"]
    assert [sample["cls"] for sample in TarStream(tmp_path / "data")] == [0, 1]


def test_record_whose_length_looks_like_gzip_is_not_decompressed(tmp_path: Path) -> None:
    with TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        writer.write(bytes(0x088B1F))
    assert len(RemoteDataset.from_urls(str(tmp_path))) == 1


def test_gzipped_manifest_of_files_without_a_suffix_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'"x"\n"y"\n'))
    assert len(SharedIndex.from_manifest(tmp_path / "a.jsonl")) == 2
