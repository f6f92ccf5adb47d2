"""Indexes, compression, and files that change while they are read."""

from __future__ import annotations

import gzip
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload import ShardCorrupt
from shmload._core.mapped_file import MappedFile
from shmload._core.records import record_starts
from shmload.formats import TFRecordDataset, TFRecordWriter
from shmload.formats.tfrecord.record_file import write_index

HERE = Path(__file__).parent
WRAPPING = [0, 2**63 - 1, -2]  # every record ends where the next begins, modulo 2**64
WHOLE = [b"record %d" % i * (i + 1) for i in range(6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Writes a file of six raw records."""
    with TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        for record in WHOLE:
            writer.write(record)
    return tmp_path / "a.tfrecord"


def records_of(path: Any, **options: Any) -> list[bytes]:
    dataset = TFRecordDataset(path, **options)
    return [dataset[i]["bytes"] for i in range(len(dataset))]


def touched(path: Path) -> None:
    """Advances the modification time, however coarse the file system's clock is."""
    now = path.stat().st_mtime_ns
    os.utime(path, ns=(now + 1_000_000, now + 1_000_000))


@pytest.mark.parametrize(("compression", "expand"), [("gzip", gzip.decompress), ("zlib", zlib.decompress)])
def test_compressed_file_has_the_content_of_the_plain_one(path, compression, expand):
    other = path.with_suffix(".z")
    with TFRecordWriter(other, compression=compression) as writer:
        for record in WHOLE:
            writer.write(record)
    assert expand(other.read_bytes()) == path.read_bytes()
    assert records_of(other) == records_of(other, compression=compression) == WHOLE
    assert not Path(f"{other}.shmload-index").exists()
    other.write_bytes(other.read_bytes() * (2 if compression == "gzip" else 1))
    assert records_of(other) == WHOLE * (2 if compression == "gzip" else 1)
    with pytest.raises(ShardCorrupt, match=r"record 0, which starts at byte 0: corrupted: .* or this is not a TFRecord file"):
        records_of(other, compression="none")


def test_no_index_is_written_for_a_compressed_file(tmp_path):
    with pytest.raises(ValueError, match="index=True needs compression=None: a compressed file has no random access"):
        TFRecordWriter(tmp_path / "a", compression="gzip", index=True)
    assert list(tmp_path.iterdir()) == []


def test_no_index_is_written_for_a_file_that_changes_during_the_scan(path, monkeypatch):
    def walked(data):
        found = record_starts(data)
        touched(path)
        return found

    monkeypatch.setattr("shmload.formats.tfrecord.record_file.record_starts", walked)
    with pytest.raises(ShardCorrupt, match="the file was changed while it was in use"):
        records_of(path)
    assert [path] == list(path.parent.iterdir())


def test_index_stays_in_memory_if_the_folder_is_read_only(path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("read-only")

    monkeypatch.setattr("shmload.formats.atomic_write.make_half", refuse)
    assert records_of(path) == WHOLE
    assert [path] == list(path.parent.iterdir())


def test_index_that_cannot_be_renamed_leaves_nothing(path):
    index = Path(f"{path}.shmload-index")
    index.mkdir()
    assert records_of(path) == WHOLE
    assert {path, index} == set(path.parent.iterdir())


def test_index_by_the_writer_equals_that_of_a_scan(path):
    assert records_of(path) == WHOLE
    made = Path(f"{path}.shmload-index").read_bytes()
    other = path.parent / "other" / path.name
    other.parent.mkdir()
    with TFRecordWriter(other, index=True) as writer:
        for record in WHOLE:
            writer.write(record)
    now = path.stat().st_mtime_ns
    assert made.split(b"\n", 2)[2] == Path(f"{other}.shmload-index").read_bytes().split(b"\n", 2)[2]
    assert b'"mtime_ns": %d' % now in made


def test_index_of_an_older_version_is_rebuilt(path):
    assert records_of(path) == WHOLE
    stale = Path(f"{path}.shmload-index").read_bytes()
    data = path.read_bytes()
    first = 16 + len(WHOLE[0])
    path.write_bytes(data[first:] + data[:first])  # the same size, but other records
    touched(path)
    assert [*WHOLE[1:], WHOLE[0]] == records_of(path)
    assert stale != Path(f"{path}.shmload-index").read_bytes()


@pytest.mark.slow(reason="rebuilds the index once for each of its bytes")
def test_damaged_index_is_rebuilt(path):
    assert records_of(path) == WHOLE
    index = Path(f"{path}.shmload-index")
    whole = index.read_bytes()
    heads = [whole[:25] + b"[" * 5000 + b"\n", whole[:25] + b"\xff\n", b""]
    for bad in [*(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :] for i in range(len(whole))), whole[:-8], *heads]:
        index.write_bytes(bad)
        assert len(TFRecordDataset(path)) == len(WHOLE)
        assert whole == index.read_bytes()


@pytest.mark.parametrize("name", ["a.tfindex", "a.index", "a.idx", "a.tfrecord.idx"])
def test_tfindex_file_is_read_under_every_usual_name(path, name):
    ends = np.cumsum([16 + len(record) for record in WHOLE])
    lines = [f"{end - 16 - len(record)} {16 + len(record)}\n" for end, record in zip(ends, WHOLE, strict=True)]
    (path.parent / name).write_text("".join(lines))
    assert records_of(path) == WHOLE
    assert not Path(f"{path}.shmload-index").exists()


@pytest.mark.parametrize("text", ["", "0", "0 x", "0 10\n", "1 5", "0 99999999999999999999", "0 -5 -5 5", "0 20 0 20"])
def test_tfindex_file_that_does_not_fit_is_ignored(path, text):
    path.with_suffix(".tfindex").write_text(text)
    assert records_of(path) == WHOLE
    assert Path(f"{path}.shmload-index").exists()


def indexed(path: Path, starts: list[int]) -> None:
    """Writes a valid index of this file in which records begin at `starts`."""
    status = path.stat()
    identity = {"name": path.name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    write_index(str(path), identity, np.array([*starts, status.st_size], np.int64))


@pytest.mark.parametrize("starts", [[], [1], [0, 10], [0, 1 << 40], [0, -5, 0], WRAPPING])
def test_index_with_offsets_outside_its_file_is_rebuilt(path, starts):
    assert records_of(path) == WHOLE
    sound = Path(f"{path}.shmload-index").read_bytes()
    indexed(path, starts)
    assert records_of(path) == WHOLE
    assert sound == Path(f"{path}.shmload-index").read_bytes()


def test_index_with_wrong_offsets_never_gives_a_wrong_record(path):
    indexed(path, [0, 20])
    dataset = TFRecordDataset(path)
    with pytest.raises(ShardCorrupt, match="record 1, which starts at byte 20: corrupted: the checksum of the record's length"):
        dataset[1]
    for verify, cause in (("length", "cannot be believed"), ("none", "goes beyond the end of the file")):
        with pytest.raises(ShardCorrupt, match=cause):
            TFRecordDataset(path, verify=verify)[1]


def test_files_of_the_package_tfrecord_are_read(tmp_path):
    for file in (HERE / "written_by_tfrecord").glob("*.tf*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    schema = {"floats": ("float32", (3,)), "ints": ("int64", (2,)), "ragged": ("int64", (None,)), "text": str}
    dataset = TFRecordDataset(tmp_path / "plain.tfrecord", schema)
    for i in range(5):
        sample = {name: getattr(value, "tolist", lambda v=value: v)() for name, value in dataset[i].items()}
        assert {"floats": [i + 0.5, -i, 3.25], "ints": [-i, 300 * i], "ragged": [*range(i)], "text": f"text {i}"} == sample
    assert not (tmp_path / "plain.tfrecord.shmload-index").exists()  # its tfindex was used
    schema = {"frames": ("float32", (None, 2)), "label": "int64"}
    sequences = TFRecordDataset(tmp_path / "sequence.tfrecord", schema, records="sequence")
    assert [[[t, i] for t in range(i)] for i in range(4)] == [s["frames"].tolist() for s in sequences]


def test_truncated_or_overwritten_file_is_an_error(path):
    whole = path.read_bytes()
    for change in (lambda: os.truncate(path, 3), lambda: path.write_bytes(whole[::-1]), lambda: path.open("ab").close()):
        path.write_bytes(whole)
        dataset = TFRecordDataset(path)
        assert dataset[5]["bytes"] == WHOLE[5]
        change()
        touched(path)
        with pytest.raises(
            ShardCorrupt,
            match=r"a\.tfrecord: record 2, .*: the file was changed while it was in use; it had \d+ bytes when it was opened: "
            "create the dataset again",
        ):
            dataset[2]


def test_replaced_or_removed_file_is_still_read_as_it_was(path):
    dataset = TFRecordDataset(path)
    assert len(dataset) == 6
    with TFRecordWriter(path) as writer:
        writer.write(b"new")
    assert [dataset[i]["bytes"] for i in range(6)] == WHOLE
    path.unlink()
    assert [dataset[i]["bytes"] for i in range(6)] == WHOLE


TEXT = {"text": bytes}  # a field without a fixed size makes the reader survey all records of a batch before copying one


class ChangingFile(dict):
    """Rows that change the file when they are requested, which is after the survey and before the copy."""

    def __init__(self, change: Any, **rows: Any) -> None:
        super().__init__(rows)
        self.change = change

    def __getitem__(self, name: str) -> Any:
        self.change()
        return super().__getitem__(name)


def test_file_that_changes_during_a_batch_is_an_error_and_overruns_no_row(tmp_path):
    path = tmp_path / "a"
    with TFRecordWriter(path) as writer:
        writer.write({"n": np.full(20, 300)})
    at = path.read_bytes().index(b"\xac\x02")

    def doubled() -> None:  # replaces the two bytes of every number with two numbers
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(b"\x01\x02" * 20)

    room = np.full(60, -1)
    with pytest.raises(ShardCorrupt, match="record 0, which starts at byte 0: the file was changed while it was in use"):
        TFRecordDataset(path, {"n": ("int64", (20,)), **TEXT}, defaults={"text": b""}).read_batch_into(
            [0], ChangingFile(doubled, n=room[:20].reshape(1, 20))
        )
    assert (room[20:] == -1).all()

    path.write_bytes(path.read_bytes())
    dataset = TFRecordDataset(path, {"n": ("int64", (40,)), **TEXT}, defaults={"text": b""}, verify="length")
    rows = np.empty((1, 40), np.int64)
    with pytest.raises(ShardCorrupt, match="the file was changed while it was in use"):
        dataset.read_batch_into([0], ChangingFile(lambda: touched(path), n=rows))
    assert rows.tolist() == [[1, 2] * 20]


def test_files_keep_no_descriptor(path):
    before = len(os.listdir("/proc/self/fd"))
    datasets = [TFRecordDataset([path] * 10) for _ in range(2)]
    assert [len(dataset) for dataset in datasets] == [60, 60]
    assert before == len(os.listdir("/proc/self/fd"))


def test_mapped_file_has_the_bytes_and_status_of_the_file(path):
    file = MappedFile(os.fsencode(path))
    status = path.stat()
    assert bytes(memoryview(file)) == path.read_bytes()
    assert file.state == (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    assert memoryview(file).readonly
    assert not file.has_changed()
    touched(path)
    assert file.has_changed()
    for bad in (b"/nowhere/a", os.fsencode(path.parent)):
        with pytest.raises(OSError, match=r"No such file|No such device|Is a directory"):
            MappedFile(bad)


def test_error_names_the_file_that_disappeared_before_the_first_read(path):
    dataset = TFRecordDataset(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{path}'"):
        len(dataset)
    with pytest.raises(FileNotFoundError, match=r"no TFRecord file has the name '/nowhere/.*'"):
        TFRecordDataset("/nowhere/*")


def test_empty_files_have_no_records(path):
    empty = path.parent / "empty"
    empty.write_bytes(b"")
    assert records_of(empty) == [b""] * 0
    assert records_of([empty, path, empty]) == WHOLE
    assert pickle.loads(pickle.dumps(TFRecordDataset([empty, path])))[0]["bytes"] == WHOLE[0]
