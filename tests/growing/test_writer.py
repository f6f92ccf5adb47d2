"""Writing into a growing cache: complete files, in time, within the reserved space."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload.errors import CacheFull
from shmload.formats import TFRecordDataset, atomic_write
from shmload.growing import SampleCache, cache_writer, damage, process_report
from tests.growing.growing_kit import RECORD_NBYTES, dataset_of, epoch_of, loader_of, put, put_foreign, sample
from tests.storage.cache.test_processes import child


def reserved(cache: SampleCache) -> int:
    return cache.stats().nbytes


def test_file_being_written_counts_with_its_largest_size(cache: SampleCache) -> None:
    with cache.writer() as one:
        one.write(sample(0))
        assert reserved(cache) == 1024
        assert cache.files() == []
        one.publish()
        assert reserved(cache) == RECORD_NBYTES
        assert [file.name for file in cache.files()] == ["g000000000001-1-48.tfrecord"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=40), compression=st.sampled_from([None, "gzip", "zlib"]))
def test_records_are_read_back_and_the_budget_holds(tmp_path_factory: Any, sizes: list[int], compression: Any) -> None:
    folder = tmp_path_factory.mktemp("cache")
    rng = np.random.default_rng(1)
    records = [rng.bytes(size) for size in sizes]
    with SampleCache(folder, 20_000, file_nbytes=2048) as cache:
        with cache.writer(publish_s=1e9, compression=compression) as one:
            for record in records:
                one.write(record)
                assert reserved(cache) <= 20_000
        names = [file.name for file in cache.files()]
        data = [bytes(s["bytes"]) for s in (TFRecordDataset([folder / name for name in names]) if names else [])]
        assert records[len(records) - len(data) :] == data
        assert sum(map(len, records)) > 15_000 or len(data) == len(records)


def test_record_larger_than_a_file_gets_its_own_file(cache: SampleCache) -> None:
    with cache.writer() as one:
        one.write(bytes(10_000))
    assert [(file.num_records, file.nbytes) for file in cache.files()] == [(1, 10_016)]


def test_record_larger_than_the_cache_is_refused(cache: SampleCache) -> None:
    with pytest.raises(CacheFull, match="can never fit in"), cache.writer() as one:
        one.write(bytes(1 << 17))
        one.publish()
    assert reserved(cache) == 0


def test_samples_are_published_when_they_have_waited_long_enough(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(cache_writer, "monotonic", lambda: now[0])
    with cache.writer(publish_s=10.0) as one:
        for at, expected in ((0.0, 0), (9.0, 0), (10.0, 1), (19.0, 1), (21.0, 1), (29.0, 2)):
            now[0] = at
            one.write(sample(0))
            assert expected == len(cache.files()), at


def test_time_until_a_file_is_due_is_never_negative(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(cache_writer, "monotonic", lambda: now[0])
    with cache.writer(publish_s=10.0) as one:
        one.write(sample(0))
        clock = iter([9.9, 10.1])  # it becomes due between two looks at the clock
        monkeypatch.setattr(cache_writer, "monotonic", lambda: next(clock))
        assert one.published_in_time() == 0
        monkeypatch.setattr(cache_writer, "monotonic", lambda: now[0])


def test_timeout_while_waiting_for_space_is_an_error_with_figures(make_cache: Callable[..., SampleCache]) -> None:
    cache = make_cache(4096)
    for number in range(4):
        put(cache, range(20 * number, 20 * number + 20))
    held = cache.folder.lease_many([file.name for file in cache.files()])
    with (
        pytest.raises(CacheFull, match="3840 of its budget of 4096 bytes are in use") as caught,
        cache.writer(timeout_s=0.0) as one,
    ):
        one.write(sample(1))
    assert "3840 of them are leased, 3840 by this process, and 0 may be evicted" in str(caught.value)
    held.release()
    put(cache, [7])


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_samples_accepted_before_space_ran_out_are_published_later(
    make_cache: Callable[..., SampleCache], compression: str | None
) -> None:
    cache = make_cache(10_000, file_nbytes=1_000)
    with cache.writer() as one:
        for number in range(9):
            one.write(bytes([number]) * 984)
    held, taken = cache.folder.lease_many(), []
    numbers = iter(range(100, 200))
    one = cache.writer(timeout_s=0.0, compression=compression)
    with pytest.raises(CacheFull, match=r"no room for \d+ more bytes"):
        for number in numbers:
            one.write(np.random.default_rng(number).bytes(400))
            taken.append(number)
    assert (one.num_records, len(taken)) == (3, 3), "the third exceeded the reserved space"
    for refused in (one.publish, one.close, lambda: one.write(b"not taken")):
        with pytest.raises(CacheFull, match="no room for"):
            refused()
    held.release()
    one.write(np.random.default_rng(0).bytes(400))
    one.close()
    with loader_of(cache.dataset()) as loader:
        found = {bytes(each) for batch in loader for each in batch["bytes"]}
    assert {np.random.default_rng(number).bytes(400) for number in (*taken, 0)} <= found
    assert b"not taken" not in found


def test_samples_are_kept_while_the_disk_has_no_room_for_the_files_number(
    make_cache: Callable[..., SampleCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = cache_writer.next_generation, [True]

    def next_generation(control: Path) -> int:
        if failing[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(control)

    monkeypatch.setattr(cache_writer, "next_generation", next_generation)
    cache = make_cache(capacity_bytes=4096)
    with cache.writer(timeout_s=0.01) as one:
        one.write(sample(0))
        with pytest.raises(CacheFull):
            one.publish()
        assert cache.files() == []
        failing[0] = False
        one.publish()
        assert [file.num_records for file in cache.files()] == [1]


def test_sample_larger_than_the_cache_is_dropped_and_the_next_is_written(make_cache: Callable[..., SampleCache]) -> None:
    cache = make_cache(10_000, file_nbytes=1_000)
    with cache.writer(timeout_s=0.0) as one:
        with pytest.raises(CacheFull, match="a file of 20016 bytes can never fit in"):
            one.write(bytes(20_000))
        one.write(b"small")
    assert [file.num_records for file in cache.files()] == [1]


def test_unpublished_samples_of_a_failing_block_are_dropped(cache: SampleCache) -> None:
    with pytest.raises(KeyError), cache.writer() as one:
        one.write(sample(0))
        one.publish()
        one.write(sample(1))
        raise KeyError
    with loader_of(dataset_of(cache)) as loader:
        assert epoch_of(loader) == [0]
    assert reserved(cache) == 48


def test_sample_that_cannot_be_written_leaves_the_writer_usable(cache: SampleCache) -> None:
    with cache.writer() as one:
        with pytest.raises(TypeError, match="name it in raw="):
            one.write({"x": np.array([1 + 2j])})
        one.write(sample(3))
    assert [file.num_records for file in cache.files()] == [1]
    with cache.writer() as one, pytest.raises(TypeError, match="name it in raw="):
        one.write({"x": np.array([1 + 2j])})
    assert len(cache.files()) == 1


def test_closed_writer_refuses_to_write(cache: SampleCache) -> None:
    one = cache.writer()
    one.close()
    one.close()
    with pytest.raises(ValueError, match=f"this writer into {cache.path} is closed"):
        one.write(sample(0))
    with pytest.raises(ValueError, match='compression is None, "gzip" or "zlib"; got \'bz2\''):
        cache.writer(compression="bz2")


def test_writer_reports_its_activity(cache: SampleCache) -> None:
    with cache.writer() as one:
        one.write(sample(0))
        one.publish()
        (report,) = cache.stats().writers
        assert (report.role, report.num_files, report.num_records, report.nbytes, report.is_waiting) == (
            "writer",
            1,
            1,
            RECORD_NBYTES,
            False,
        )
        assert (report.pid, report.waited_s) == (os.getpid(), 0.0)
    assert tuple(cache.stats().writers) == ()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"headroom": 1.0}, "headroom is a share of the budget, between 0 and 1; got 1.0"),
        ({"file_nbytes": 300}, "file_nbytes is at most a quarter of capacity_bytes=1000"),
    ],
)
def test_invalid_cache_arguments_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SampleCache(tmp_path / "cache", 1000, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_samples": 0}, "min_samples is at least 1; got 0"),
        ({"timeout_s": -1.0}, "timeout_s is at least 0; got -1.0"),
        ({"missing": "ignore"}, 'missing is one of "error", "skip", "substitute"; got \'ignore\''),
    ],
)
def test_invalid_dataset_arguments_are_refused(cache: SampleCache, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cache.dataset(**options)


def test_writer_on_a_full_disk_loses_its_reports_and_no_sample(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_write, "write_whole", full)
    with cache.writer() as one:
        for _ in range(2):
            one.write(sample(0))
            one.publish()
        with one._waiting():
            pass
    put_foreign(cache.path / "dropped.tfrecord", range(3))
    damage.report_bad(cache.path, "another.tfrecord", "is damaged", 0)
    assert sorted(file.num_records for file in cache.files()) == [1, 1, 3]


def test_small_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for is_new, error in ((True, None), (False, IsADirectoryError)):
        with pytest.raises(error) if error else nullcontext():
            assert not atomic_write.write_whole(tmp_path / "taken", b"x", is_new=is_new)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("pid", [os.getpid(), 1 << 30], ids=["pid of a live process", "pid of another container"])
def test_report_counts_while_its_writer_lives_whatever_its_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    monkeypatch.setattr(process_report.os, "getpid", lambda: pid)
    report = process_report.WriterReport(tmp_path, "writers")
    report.write({"num_files": 3})
    for _ in range(2):
        assert [(pid, {"num_files": 3})] == list(process_report.reports(tmp_path, "writers"))
    report._lock.close()  # SIGKILL has this effect
    assert list(process_report.reports(tmp_path, "writers")) == []
    assert list((tmp_path / "writers").iterdir()) == []


def test_forked_child_does_not_keep_its_parents_report_alive(tmp_path: Path) -> None:
    report = process_report.WriterReport(tmp_path, "writers")
    report.write({})
    with child(lambda: None):
        report._lock.close()
        assert list(process_report.reports(tmp_path, "writers")) == []
