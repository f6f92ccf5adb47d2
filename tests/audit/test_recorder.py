"""Where and when records are written, and failures to write them."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmload import ShmLoader
from shmload.audit.audit_file import Batch
from shmload.tools.audit.verify import read_folder
from tests.audit.audit_kit import kinds, make, run, verdict_of

BOTH_MODES = pytest.mark.parametrize("seed", [None, 7], ids=["torch mode", "seed mode"])
PAIRS = [(i, -i) for i in range(11)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def batches(folder: Path) -> list[Batch]:
    return [record for log in read_folder(folder) for record in log.records if isinstance(record, Batch)]


def test_file_is_created_at_the_first_delivery_with_the_users_umask(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "audit"
    loader = make(folder)
    stream = iter(loader)
    assert files(folder) == []
    mask = os.umask(0o027)
    try:
        next(stream)
    finally:
        os.umask(mask)
    (path,) = files(folder)
    assert path.name.startswith("rank-0000-")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_batch_is_recorded_before_the_next_is_delivered(tmp_path: Path) -> None:
    loader = make(tmp_path)
    for number, _ in enumerate(loader, 1):
        assert number == len(batches(tmp_path))


class FailsOnce:
    """A batch sampler that raises once, after three batches."""

    def __init__(self) -> None:
        self._has_failed = False

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        self._at = getattr(self, "_at", 0) + 1
        if self._at == 4 and not self._has_failed:
            self._at, self._has_failed = 3, True
            raise OSError("try again")
        if self._at > 6:
            raise StopIteration
        return [self._at]

    def __len__(self) -> int:
        return 6


def test_batch_that_is_taken_again_after_an_error_is_recorded_once(tmp_path: Path) -> None:
    """In seed mode, the sampler is asked for a later batch while one is being delivered, which then comes with the next call."""
    got, num_errors = [], 0
    with ShmLoader(range(9), batch_sampler=FailsOnce(), num_workers=1, seed=1, audit=tmp_path) as loader:
        stream = iter(loader)
        while True:
            try:
                got += next(stream).tolist()
            except OSError:
                num_errors += 1
            except StopIteration:
                break
    assert (got, num_errors) == ([1, 2, 3, 4, 5, 6], 1)
    assert [batch.keys.tolist() for batch in batches(tmp_path)] == [[key] for key in got]


@BOTH_MODES
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.slow(reason="records and checks two passes, also with two workers")
def test_run_with_and_without_workers_is_proven(tmp_path: Path, seed: int | None, num_workers: int) -> None:
    with make(tmp_path, seed=seed, num_workers=num_workers, persistent_workers=num_workers > 0) as loader:
        run([loader])
        run([loader])
    report = verdict_of(tmp_path)
    assert (report.status, report.findings) == (0, [])
    assert [epoch.num_samples for epoch in report.loaders[0].epochs] == [45, 45]


def test_digests_are_the_same_with_and_without_workers(tmp_path: Path) -> None:
    for num_workers in (0, 2):
        with make(tmp_path / str(num_workers), num_workers=num_workers) as loader:
            run([loader])
    assert [b.digest for b in batches(tmp_path / "0")] == [b.digest for b in batches(tmp_path / "2")]


def test_copy_records_in_its_own_file(tmp_path: Path) -> None:
    loader = make(tmp_path)
    stream = iter(loader)
    next(stream)
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.last_indices is None
        next(iter(other))
    next(stream)
    assert sorted(len(log.records) - 1 - ("resume" in str(log.records[0])) for log in read_folder(tmp_path)) == [1, 1, 2]


def test_forked_child_records_in_its_own_file(tmp_path: Path) -> None:
    stream = iter(make(tmp_path))
    next(stream)
    child = os.fork()
    if child == 0:
        next(stream)
        os._exit(0)
    assert (child, 0) == os.waitpid(child, 0)
    next(stream)
    assert sorted(sum(isinstance(r, Batch) for r in log.records) for log in read_folder(tmp_path)) == [1, 2]


def test_changed_world_size_begins_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ShmLoader(PAIRS, 2, seed=1, audit=tmp_path)
    run([loader], 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    run([loader], 1)
    assert sorted((log.header["rank"], log.header["world_size"]) for log in read_folder(tmp_path)) == [(0, 1), (1, 2)]


def test_read_only_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="needs a folder that this process can write to; give another, or leave audit"):
        ShmLoader(PAIRS, audit=tmp_path)


def test_file_instead_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileExistsError, match="taken"):
        ShmLoader(PAIRS, audit=tmp_path / "taken")


@pytest.mark.parametrize("how", ["error", "short"])
def test_full_disk_does_not_stop_the_run_and_lost_records_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    loader = make(tmp_path)
    stream, write = iter(loader), os.write
    next(stream)

    def full(file: int, content: bytes) -> int:
        if how == "short":
            return write(file, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(RuntimeWarning, match=r"rank-0000-.* cannot be written: .*No space left on device. Training goes on"):
        next(stream)
    next(stream)  # logged once
    monkeypatch.setattr(os, "write", write)
    run_rest = list(stream)
    assert len(run_rest) == 9
    report = verdict_of(tmp_path)
    assert {"missing"} == kinds(report)
    assert "steps 1-2 of rank 0" in report.findings[0].text
    assert any("2 batches could not be recorded" in note for note in report.notes)


def test_creating_the_file_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, really = iter(make(tmp_path)), os.open

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(RuntimeWarning, match="batches from epoch 0, step 0 on are not recorded"):
        next(stream)
    monkeypatch.setattr(os, "open", really)
    list(stream)
    assert "steps 0 of rank 0" in verdict_of(tmp_path).findings[0].text


def test_header_that_could_not_be_written_is_not_written_to_the_next_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ShmLoader(PAIRS, 2, seed=1, audit=tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            run([loader], 1)
    monkeypatch.setenv("WORLD_SIZE", "2")  # begins another file
    monkeypatch.setenv("RANK", "1")
    run([loader], 1)
    assert [(log.header.get("world_size"), log.damage) for log in read_folder(tmp_path) if log.records] == [(2, [])]


class RaisingItems(dict):
    def items(self) -> Any:
        raise RuntimeError("no")


def raising_items(samples: list[Any]) -> Any:
    return RaisingItems()


def test_object_that_cannot_be_inspected_does_not_stop_the_run(tmp_path: Path) -> None:
    run([make(tmp_path, collate_fn=raising_items)])
    report = verdict_of(tmp_path)
    assert (report.status, report.findings) == (0, [])
    assert any("12 batches with objects that a digest leaves out" in note for note in report.notes)


def test_threads_that_share_an_iterator_record_the_end_of_a_pass_once(tmp_path: Path) -> None:
    stream = iter(make(tmp_path, seed=7))
    threads = [threading.Thread(target=list, args=(stream,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds_found = Counter(type(record) is Batch or record.kind for log in read_folder(tmp_path) for record in log.records)
    assert kinds_found["end"] == 1
