"""`shmload index`."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmload.formats import TarDataset, TFRecordDataset

Written = Callable[[str], Path]
Command = Callable[..., Any]


@pytest.mark.parametrize(("name", "suffix", "count"), [("tar", ".index", 5), ("TFRecord", ".shmload-index", 6)])
def test_index_is_built_once_and_reported(name: str, suffix: str, count: int, written: Written, command: Command) -> None:
    path = written(name)
    index = Path(str(path) + suffix)
    done = command("index", path)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{index}: {count} samples, {index.stat().st_size:,} bytes, ")
    assert done.stdout.endswith(" s\n")
    before = index.stat().st_mtime_ns
    again = command("index", path)
    assert again.stdout.endswith("(it was already there, and fits)\n")
    assert before == index.stat().st_mtime_ns


def test_stale_index_is_rebuilt(written: Written, command: Command) -> None:
    path = written("tar")
    command("index", path)
    os.utime(path, ns=(1, 1))
    assert "it was already there" not in command("index", path).stdout


def test_built_indexes_are_used(written: Written, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    tar, records = written("tar"), written("TFRecord")
    assert command("index", tar, records).exit_code == 0
    monkeypatch.setattr("shmload.formats.tar.shard_index.TarScan", None)
    assert len(TarDataset(tar)) == 5
    monkeypatch.setattr("shmload.formats.tfrecord.record_file.record_starts", None)
    assert len(TFRecordDataset(records)) == 6


@pytest.mark.parametrize("name", ["tar", "TFRecord"])
def test_read_only_folder_is_reported(name: str, written: Written, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(name)

    def refuse(*args: object, **kwargs: object) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("shmload.formats.atomic_write.make_half", refuse)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    done = command("index", path)
    assert done.exit_code == 1
    assert f"no index was written: {path.parent} cannot be written to: Read-only file system" in done.stdout


def test_formats_without_an_index_are_reported(written: Written, command: Command) -> None:
    done = command("index", written("npy"), written("TFRecord, gzip"))
    assert done.exit_code == 0
    first, second = done.stdout.splitlines()
    assert "no index was written: npy needs no index" in first
    assert "is compressed: it is expanded when it is opened" in second


def test_compressed_shard_cannot_be_indexed(written: Written, command: Command) -> None:
    done = command("index", written("tar, gzip"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is compressed, and its samples cannot be reached one by one" in done.stderr


def test_bad_path_does_not_prevent_other_indexes(written: Written, command: Command, tmp_path: Path) -> None:
    first, last = written("tar"), written("TFRecord")
    (tmp_path / "cut.tar").write_bytes(first.read_bytes()[:700])
    done = command("index", first, tmp_path / "cut.tar", tmp_path / "nothing", last)
    assert done.exit_code == 2
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == [f"{first}.index", f"{last}.shmload-index"]
    assert ["cut.tar: at byte 0" in line or "nothing: No such file" in line for line in done.stderr.splitlines()] == [True, True]
