"""The registry of formats: recognition by first bytes and names, and formats of users and installed packages."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shmload.errors import ObjectMissing, ShardCorrupt
from shmload.formats import TarWriter, TFRecordWriter, known_formats
from shmload.formats.head import head_of_object
from shmload.formats.json_lines import JsonLines
from shmload.formats.known_formats import formats, layout_named, layout_of, recognize, recognize_path, register
from shmload.formats.summary import fields_seen
from shmload.remote import RemoteDataset
from shmload.remote.layouts import BlockFormat, RecordIndex, TFRecords
from shmload.tools.inspect import describe


@dataclass(frozen=True)
class Pairs(BlockFormat):
    """A format for pairs of integers after magic bytes."""

    name: ClassVar[str] = "pairs"
    title: ClassVar[str] = "pairs of integers"
    endings: ClassVar[tuple[str, ...]] = (".pairs",)

    def index(self, url: str, nbytes: int, read: Any) -> RecordIndex:
        if bytes(read(0, 4)) != b"PAIR":
            raise ShardCorrupt(f"{url}: at byte 0: not a file of pairs")
        return RecordIndex(url, np.arange(4, nbytes + 1, 8))

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        a, b = struct.unpack("<ii", data)
        return {"a": a, "b": b}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(known_formats, "_FORMATS", list(known_formats._FORMATS))
    register(Pairs)
    return


def pairs(path: Path) -> Path:
    path.write_bytes(b"PAIR" + struct.pack("<6i", *range(6)))
    return path


def test_format_of_a_user_is_known_everywhere(tmp_path: Path, registered: None) -> None:
    path = pairs(tmp_path / "x.pairs")
    assert isinstance(layout_of("folder/x.pairs"), Pairs)
    assert isinstance(layout_named("pairs"), Pairs)
    assert isinstance(recognize_path(path)[0], Pairs)
    found = describe(path)
    assert (found.format, found.num_samples, found.fields) == ("pairs of integers", 3, {"a": "int", "b": "int"})
    view = RemoteDataset.from_urls(str(tmp_path)).indexed()
    assert [view[i] for i in range(3)] == [{"a": 0, "b": 1}, {"a": 2, "b": 3}, {"a": 4, "b": 5}]


def test_compressed_file_of_a_users_format_is_described(tmp_path: Path, registered: None) -> None:
    data = pairs(tmp_path / "x.pairs").read_bytes()
    path = tmp_path / "y.pairs.gz"
    path.write_bytes(gzip.compress(data))
    found = describe(path)
    assert (found.num_samples, found.notes) == (3, ["compressed by gzip: 28 bytes"])


def test_class_without_a_part_of_the_protocol_is_refused() -> None:
    class Nothing:
        name = "nothing"

    with pytest.raises(TypeError, match="Nothing is not a format: it has no recognize, index, decode, describe"):
        register(Nothing)  # type: ignore[type-abstract, arg-type]  # also rejected by the type checker


def test_format_of_an_installed_package_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[shmload.formats]\nbroken = there.is.no.such.module:Format\npairs = {Pairs.__module__}:Pairs\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(known_formats, "_FORMATS", list(known_formats._FORMATS))
    known_formats._load_plugins.cache_clear()
    try:
        assert formats()[0].name == "pairs"
    finally:
        known_formats._load_plugins.cache_clear()


def write_tar(path: Path) -> None:
    with TarWriter(path) as writer:
        writer.write({"__key__": "a", "cls": 7})


def write_tfrecord(path: Path) -> None:
    with TFRecordWriter(path) as writer:
        writer.write({"x": 7})


def write_npy(path: Path) -> None:
    with open(path, "wb") as file:
        np.save(file, np.array([7]))


def write_gzip(path: Path) -> None:
    write_tfrecord(path)
    path.write_bytes(gzip.compress(path.read_bytes()))


LONE = {
    "tar": (write_tar, {"__key__": "a", "cls": b"7"}),
    "tfrecord": (write_tfrecord, {"x": [7]}),
    "npy": (write_npy, {"data": 7}),
    "parquet": (lambda path: pq.write_table(pa.table({"x": [7]}), path), {"x": 7}),
    "gzip": (write_gzip, {"x": [7]}),
}


@pytest.mark.parametrize("name", LONE)
def test_lone_object_without_an_ending_is_recognized_by_its_bytes(tmp_path: Path, name: str) -> None:
    write, wanted = LONE[name]
    write(tmp_path / "data")
    view = RemoteDataset.from_urls(str(tmp_path / "data")).indexed(decode=False)
    assert [view[i] for i in range(len(view))] == [wanted]


def test_lone_object_of_no_known_format_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"nothing that is known")
    with pytest.raises(ValueError, match="data: has no format that its first bytes identify: pass layout="):
        RemoteDataset.from_urls(str(tmp_path / "data"))
    (tmp_path / "tensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(ValueError, match="tensors: is safetensors, which is read from local files only: pass layout="):
        RemoteDataset.from_urls(str(tmp_path / "tensors"))
    with pytest.raises(ObjectMissing):
        RemoteDataset.from_urls(str(tmp_path / "nothing"))


def test_every_format_describes_itself() -> None:
    every = formats()
    assert len({format.name for format in every}) == len(every)
    assert [format.title for format in every if not format.title] == []
    head = head_of_object("x", 5, lambda offset, nbytes: b"hello"[offset : offset + nbytes])
    assert recognize(head) is None
    assert isinstance(layout_named(TFRecords(is_example=False)), TFRecords)


def test_arrays_that_differ_in_their_number_of_axes_are_described_separately() -> None:
    samples = [{"x": np.zeros(shape, np.uint8)} for shape in ((2, 5), (3, 5, 3), (4, 5, 3))]
    assert fields_seen(samples, {"x": 3}, 3) == {"x": "uint8 (2, 5) or uint8 (3 to 4, 5, 3)"}


def test_value_that_is_nested_too_deeply_is_an_error_that_names_the_sample() -> None:
    data = b'{"x": 1}\n' + b"[" * 1_000_000 + b"\n"

    def read(offset: int, nbytes: int) -> bytes:
        return data[offset : offset + nbytes]

    lines = JsonLines()
    index = lines.index("x.jsonl", len(data), read)
    assert lines.sample(index, 0, read) == {"x": 1}
    with pytest.raises(ShardCorrupt, match=r"x\.jsonl: sample 1, at byte 9: maximum recursion depth exceeded"):
        lines.sample(index, 1, read)


def test_range_read_of_a_local_format_is_an_error() -> None:
    hdf5 = next(format for format in formats() if format.name == "hdf5")
    with pytest.raises(ValueError, match="x: HDF5 is read from local files only: copy it here, or pack it"):
        hdf5.index("x", 8, lambda offset, nbytes: b"")
    with pytest.raises(ValueError, match="HDF5 is read from local files only"):
        hdf5.decode(None, memoryview(b""), 0)
