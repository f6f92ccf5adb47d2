"""Files that other programs put into the folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload.errors import ShardCorrupt
from shmload.formats import TFRecordWriter
from shmload.growing import SampleCache, cache_view, intake
from shmload.growing.intake import Intake, count_records
from tests.growing.growing_kit import RECORD_NBYTES, dataset_of, epoch_of, flip, loader_of, put_foreign, values_of


@pytest.fixture
def folder(cache: SampleCache) -> Path:
    return cache.path


def test_file_that_is_still_being_written_waits_for_the_next_epoch(cache: SampleCache, folder: Path) -> None:
    put_foreign(folder / "whole.tfrecord", range(2))
    with (folder / "growing.tfrecord").open("wb") as file:
        file.write(put_foreign(folder / ".hidden", range(2, 4)).read_bytes())
        file.flush()  # it ends after a whole record, but is not complete
        with loader_of(dataset_of(cache)) as loader:
            assert sorted(epoch_of(loader)) == [0, 1]
            file.write(put_foreign(folder / ".hidden", range(4, 6)).read_bytes())
            file.close()
            assert list(range(6)) == sorted(epoch_of(loader))
    assert cache.stats().bad == {}


def test_file_must_be_old_enough_if_leases_cannot_tell_writers(
    make_cache: Callable[..., SampleCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, command: int, argument: int = 0) -> int:
        raise OSError(errno.EINVAL, "no leases here")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(intake, "SETTLE_S", 60.0)
    cache = make_cache()
    path = put_foreign(cache.path / "fresh.tfrecord", range(3))
    assert cache.files() == []
    os.utime(path, (0, 0))
    assert [file.name for file in cache.files()] == ["fresh.tfrecord"]


def test_bad_file_is_checked_once_and_again_when_it_changes(
    make_cache: Callable[..., SampleCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache()
    path = put_foreign(cache.path / "bad.tfrecord", range(3))
    whole = path.read_bytes()
    flip(path, 2 * RECORD_NBYTES + 20)
    looks: list[Path] = []
    look = Intake.look

    def counted(self: Intake, path: Path, status: os.stat_result) -> Any:
        looks.append(path)
        return look(self, path, status)

    monkeypatch.setattr(Intake, "look", counted)
    assert [] == cache.files() == cache.files() == make_cache().files()  # the last one is another object
    assert [path] == looks
    assert (
        "record 2, which starts at byte 96: corrupted: the checksum of the record's 32 bytes differs"
        in cache.stats().bad[path.name]
    )
    path.write_bytes(whole + whole)
    assert [file.num_records for file in cache.files()] == [6]
    assert cache.stats().bad == {}


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"x.tfrecord": 5}'])
def test_control_file_of_another_kind_is_ignored(cache: SampleCache, folder: Path, text: bytes) -> None:
    put_foreign(folder / "x.tfrecord", range(2))
    (folder / ".growing" / "known.json").write_bytes(text)
    (folder / ".growing" / "bad" / "x.json").write_bytes(text)
    assert [file.num_records for file in cache.files()] == [2]


def test_files_with_other_names_are_neither_read_nor_evicted(make_cache: Callable[..., SampleCache]) -> None:
    cache = make_cache(4096, file_nbytes=512)
    (cache.path / "README.txt").write_text("of the project")
    put_foreign(cache.path / "a.tfrecord", range(10))
    with cache.writer() as writer:
        for _ in range(300):
            writer.write(bytes(100))
    assert (cache.path / "README.txt").exists()
    assert not (cache.path / "a.tfrecord").exists()
    assert all(file.generation > 0 for file in cache.files())


def test_epoch_waits_for_few_foreign_files_and_takes_the_rest_later(
    cache: SampleCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_foreign(folder / "0.tfrecord", [0])
    with loader_of(dataset_of(cache)) as loader:
        assert epoch_of(loader) == [0]
        monkeypatch.setattr(cache_view, "EXAMINE_S", -1.0)
        for value in range(1, 4):
            put_foreign(folder / f"{value}.tfrecord", [value])
        assert [len(epoch_of(loader)) for _ in range(3)] == [2, 3, 4]


def test_next_epoch_has_the_new_file_of_a_replaced_name(cache: SampleCache, folder: Path) -> None:
    path = put_foreign(folder / "again.tfrecord", range(4))
    with loader_of(dataset_of(cache)) as loader:
        assert sorted(epoch_of(loader)) == list(range(4))
        put_foreign(folder / ".hidden", range(10, 16)).rename(path)
        assert sorted(epoch_of(loader)) == list(range(10, 16))


def test_file_damaged_after_intake_is_bad_from_the_next_epoch_on(cache: SampleCache, folder: Path) -> None:
    put_foreign(folder / "good.tfrecord", range(4))
    path = put_foreign(folder / "later_bad.tfrecord", range(4, 8))
    with loader_of(dataset_of(cache), on_error="skip") as loader:
        assert list(range(8)) == sorted(epoch_of(loader))
        before = path.stat()
        flip(path, 20)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk error, which changes no time stamp
        assert sorted(epoch_of(loader)) == [0, 1, 2, 3, 5, 6, 7]
        assert list(range(4)) == sorted(epoch_of(loader))
    assert "later_bad.tfrecord: record 4, which starts at byte 0: corrupted" in cache.stats().bad["later_bad.tfrecord"]


def test_file_that_cannot_be_opened_now_is_not_bad(cache: SampleCache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    put_foreign(folder / "good.tfrecord", range(4))
    with loader_of(dataset_of(cache)) as loader, monkeypatch.context() as patch:
        assert list(range(4)) == sorted(epoch_of(loader))
        put_foreign(folder / "new.tfrecord", range(4, 8))
        patch.setattr(intake, "count_records", refuse)
        assert list(range(4)) == sorted(epoch_of(loader))
        assert cache.stats().bad == {}
        patch.undo()
        assert list(range(8)) == sorted(epoch_of(loader))


def test_bad_file_replaced_by_a_good_one_is_read_again(cache: SampleCache, folder: Path) -> None:
    path = put_foreign(folder / "again.tfrecord", range(4))
    put_foreign(folder / "good.tfrecord", range(4, 8))
    with loader_of(dataset_of(cache), on_error="skip") as loader:
        assert list(range(8)) == sorted(epoch_of(loader))
        before, whole = path.stat(), path.read_bytes()
        flip(path, 20)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert list(range(1, 8)) == sorted(epoch_of(loader))
        assert list(cache.stats().bad) == [path.name]
        (folder / ".copy").write_bytes(whole)
        (folder / ".copy").rename(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # cp -p and rsync do this
        assert cache.stats().bad == {}
        assert list(range(8)) == sorted(epoch_of(loader))


def test_file_replaced_during_its_epoch_is_not_reported_as_bad(
    cache: SampleCache, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = put_foreign(folder / "again.tfrecord", range(4))
    dataset = dataset_of(cache)
    with loader_of(dataset, on_error="skip", batch_size=2) as loader:
        batches = iter(loader)
        len(loader)  # settles the epoch's snapshot
        put_foreign(folder / ".hidden", range(10, 16)).rename(path)
        assert [value for batch in batches for value in values_of(batch)] == []
        assert "again.tfrecord has been replaced since the epoch's snapshot was settled" in caplog.text
        assert cache.stats().bad == {}
        assert sorted(epoch_of(loader)) == list(range(10, 16))


@pytest.mark.parametrize(("is_removed", "what"), [(True, "removed"), (False, "replaced")])
def test_error_says_if_another_program_has_changed_a_file(cache: SampleCache, folder: Path, is_removed: bool, what: str) -> None:
    path = put_foreign(folder / "again.tfrecord", range(4))
    with loader_of(dataset_of(cache), batch_size=2) as loader:
        batches = iter(loader)
        len(loader)  # settles the epoch's snapshot
        if is_removed:
            path.unlink()
        else:
            put_foreign(folder / ".hidden", range(10, 16)).rename(path)
        with pytest.raises(ShardCorrupt, match=rf"again.tfrecord: has been {what} since the epoch's snapshot was settled"):
            next(batches)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "holds no record"),
        (b"no such format, but long enough", "this is not a TFRecord file"),
        (b"\x1f\x8bnot really", "the gzip stream is"),
    ],
)
def test_file_that_is_not_a_tfrecord_is_reported_with_its_name(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(data)
    with pytest.raises(ShardCorrupt, match=f"{path}: .*{text}"):
        count_records(str(path))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 100, 16383, 16384, 40000]), min_size=1, max_size=6), st.data())
def test_any_flipped_byte_is_found(tmp_path_factory: Any, sizes: list[int], data: Any) -> None:
    path = tmp_path_factory.mktemp("flip") / "x.tfrecord"
    with TFRecordWriter(path) as writer:
        for size in sizes:
            writer.write(np.random.default_rng(size).bytes(size))
    assert len(sizes) == count_records(str(path))
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    with pytest.raises(ShardCorrupt, match=str(path)):
        count_records(str(path))


def test_look_at_a_file_that_another_program_opens_survives(tmp_path: Path) -> None:
    """The signal for a broken lease would end the process; so it did within the first hundred looks."""
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"x")
    writer = os.fork()
    if not writer:
        while True:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
    looker = os.fork()
    if not looker:
        taker = Intake(tmp_path / "known.json")
        for _ in range(20_000):
            taker.is_being_written(path, path.stat())
        os._exit(0)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(looker, 0)[1]) == 0
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
