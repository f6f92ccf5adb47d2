"""Local copies of shards: prefetched, checked, kept within a budget and evicted; and the errors if the store has changed."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from shmload import ShmLoader
from shmload.errors import CacheFull, ShardCorrupt, StoreError
from shmload.processes.file_lock import is_locked
from shmload.remote import RemoteDataset
from shmload.remote.fetch import fetch_of
from shmload.remote.listing import shards_in
from shmload.remote.local_shards import LocalShards
from shmload.remote.prefetcher import Fetched, Prefetcher
from shmload.remote.private_folder import PrivateFolder, remove_abandoned
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.cache import Cache
from shmload.storage.folder_session import Session as FolderSession
from shmload.storage.ledger import NEW
from shmload.storage.local_store import LocalStore
from tests.formats.test_per_process import BlockedCall, exit_status_of_child_forked_while_blocked
from tests.remote.remote_kit import NBYTES, WatchedStore, dataset_of, labels, watched, write_packed, write_plain


def test_each_shard_is_fetched_once_for_all_epochs_and_datasets_of_a_folder(tmp_path: Path) -> None:
    write_packed(tmp_path / "data", [5] * 6)
    dataset, store = watched(tmp_path / "data", cache_folder=tmp_path / "cache")
    for _ in range(3):
        assert list(range(30)) == sorted(labels(dataset))
    dataset.close()
    again, other = watched(tmp_path / "data", cache_folder=tmp_path / "cache")
    assert list(range(30)) == sorted(labels(again))
    again.close()
    assert (store.count("read_into"), other.count("read_into")) == (6, 0)
    assert {"get"} == {method for method, _ in other.asked}  # only the manifest: indexes are cached, too


@pytest.mark.parametrize("is_packed", [True, False])
def test_the_cache_stays_within_its_budget_and_reads_all(tmp_path: Path, is_packed: bool) -> None:
    (tmp_path / "data").mkdir()
    (write_packed if is_packed else write_plain)(tmp_path / "data", [5] * 12)
    budget = 6 * NBYTES
    dataset, store = watched(tmp_path / "data", cache_folder=tmp_path / "cache", cache_bytes=budget)
    assert dataset._source.window == 2
    peaks = []
    for _ in range(2):
        found = []
        for item in dataset:
            found.append(int(item["cls"]))
            peaks.append(dataset._source.local.cache.statistics().folder.nbytes)
        assert list(range(60)) == sorted(found)
    assert 0 < max(peaks) <= budget
    dataset.close()
    assert store.count("read_into") >= 12


def test_next_shards_are_prefetched(tmp_path: Path) -> None:
    write_packed(tmp_path, [5] * 6)
    seen = threading.Event()
    dataset, store = watched(tmp_path, window=1, cache_bytes=3 * NBYTES)
    order = [shards[0] for shards in dataset._ordered().shards_from(0, seed=0, epoch=0, num_windows=3)]
    second = f"{'0' * 16}/shard-{order[1]:06d}.tar"
    store.harm = lambda method, key: seen.set() if (method, key) == ("read_into", second) else None
    next(iter(dataset))
    assert seen.wait(30)
    dataset.close()


@pytest.mark.parametrize(("ahead", "num_ahead"), [(0, 0), (2 * NBYTES, 2), (5 * NBYTES - 1, 4)])
def test_prefetching_respects_its_byte_limit(ahead: float, num_ahead: int, tmp_path: Path) -> None:
    write_packed(tmp_path, [5] * 8)
    dataset, store = watched(tmp_path, window=1, ahead_bytes=ahead, rank=0, world_size=1)
    order = [shards[0] for shards in dataset._ordered().shards_from(0, seed=0, epoch=0, num_windows=8)]
    last_ahead = f"{'0' * 16}/shard-{order[num_ahead]:06d}.tar"
    seen = threading.Event()
    store.harm = lambda method, key: seen.set() if (method, key) == ("read_into", last_ahead) else None
    begun = set()
    for item in dataset:
        begun.add(item["__url__"])
        assert seen.wait(30)
        assert store.count("read_into") <= len(begun) + num_ahead
    assert len(begun) == 8
    dataset.close()


def test_nothing_is_prefetched_if_any_shard_may_be_next(tmp_path: Path) -> None:
    write_packed(tmp_path, [5] * 8)
    dataset, store = watched(tmp_path, ahead_bytes=0)
    view = dataset.indexed()
    assert [int(view[index]["cls"]) for index in (7, 8)] == [7, 8]
    dataset.close()
    assert store.count("read_into") == 1


def test_prefetch_limit_that_is_not_a_number_of_bytes_is_refused(tmp_path: Path) -> None:
    write_packed(tmp_path, [5])
    with pytest.raises(ValueError, match="ahead_bytes must be at least 0, or None, got -1"):
        RemoteDataset.from_urls(str(tmp_path), ahead_bytes=-1)


def test_shard_larger_than_the_cache_is_read_sample_by_sample(tmp_path: Path) -> None:
    write_packed(tmp_path, [5] * 4)
    dataset, store = watched(tmp_path, cache_bytes=NBYTES // 2)
    assert list(range(20)) == sorted(labels(dataset))
    assert (store.count("read_into"), store.count("range")) == (0, 20)
    dataset.close()


def test_damaged_shard_is_fetched_again_once(tmp_path: Path) -> None:
    write_packed(tmp_path, [5, 5])
    dataset, store = watched(tmp_path)
    spoiled: list[str] = []

    def spoil(key: str, out: memoryview) -> None:
        if key.endswith(".tar") and key not in spoiled:
            spoiled.append(key)
            out[700] ^= 1

    store.spoil = spoil
    assert list(range(10)) == sorted(labels(dataset))
    assert store.count("read_into") == 4
    dataset.close()


def test_permanently_damaged_shard_is_an_error_with_url_and_cause(tmp_path: Path) -> None:
    write_packed(tmp_path, [5])
    path = tmp_path / ("0" * 16) / "shard-000000.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    dataset, _ = watched(tmp_path)
    path.write_bytes(data)
    message = r"shard-000000.tar: its checksum is [0-9a-f]{8} and then [0-9a-f]{8}, but the manifest says [0-9a-f]{8}: the object"
    with pytest.raises(ShardCorrupt, match=message):
        labels(dataset)
    dataset.close()


def test_damaged_index_is_an_error(tmp_path: Path) -> None:
    write_packed(tmp_path, [5])
    dataset, store = watched(tmp_path)
    store.spoil = lambda key, out: out.__setitem__(9, 1) if key.endswith(".index") else None
    with pytest.raises(ShardCorrupt, match=r"shard-000000.tar.index: it has \(\d+, '.{8}'\) as size and checksum, but the man"):
        labels(dataset)
    dataset.close()


def test_index_of_another_shard_is_an_error(tmp_path: Path) -> None:
    manifest = write_packed(tmp_path, [5])
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"num_samples": 5', '"num_samples": 4'))
    dataset, _ = watched(tmp_path)
    with pytest.raises(ShardCorrupt, match=r"its index says 5 samples, but manifest.json says 4 samples in 20480 bytes"):
        labels(dataset)
    dataset.close()
    assert manifest.num_samples == 5


def test_repacked_dataset_is_an_error_that_says_so(tmp_path: Path) -> None:
    write_packed(tmp_path, [5] * 4)
    dataset, _ = watched(tmp_path, cache_bytes=2 * NBYTES, window=1)
    items = iter(dataset)
    next(items)
    write_packed(tmp_path, [5] * 4, generation="1" * 16)
    shutil.rmtree(tmp_path / ("0" * 16))
    with pytest.raises(
        ShardCorrupt, match=r"packed again while it was read: this is of generation 0{16}, but .* now contains 1{16}"
    ):
        list(items)
    dataset.close()


def test_modified_shard_is_an_error(tmp_path: Path) -> None:
    write_plain(tmp_path, [5, 5])
    dataset, _ = watched(tmp_path)
    before = (tmp_path / "part-000001.tar").stat().st_mtime_ns
    shutil.copy(tmp_path / "part-000000.tar", tmp_path / "part-000001.tar")
    os.utime(tmp_path / "part-000001.tar", ns=(before, before + 1_000_000))  # the kernel's time may not have changed since
    with pytest.raises(
        ShardCorrupt, match=r"part-000001.tar: was removed or written to since the dataset was created: .*Create it again"
    ):
        labels(dataset)
    dataset.close()


def test_deleted_shard_is_an_error(tmp_path: Path) -> None:
    write_plain(tmp_path, [5, 5])
    dataset, _ = watched(tmp_path)
    (tmp_path / "part-000001.tar").unlink()
    with pytest.raises(ShardCorrupt, match=r"part-000001.tar: was removed or written to since the dataset was created"):
        labels(dataset)
    dataset.close()


def test_error_of_an_unreachable_store_is_passed_on(tmp_path: Path) -> None:
    write_packed(tmp_path, [5])
    dataset, store = watched(tmp_path)

    def harm(method: str, key: str) -> None:
        if method == "read_into":
            raise StoreError("the store is down")

    store.harm = harm
    with pytest.raises(StoreError, match="the store is down"):
        labels(dataset)
    dataset.close()


def test_closing_an_unpickled_copy_does_not_affect_the_shared_folder(tmp_path: Path) -> None:
    write_packed(tmp_path, [5])
    local = LocalShards(shards_in(LocalStore(tmp_path)), None, 1 << 20)
    other = pickle.loads(pickle.dumps(local))
    assert local.copy(0) is not None
    assert other.copy(0) is not None
    assert other.cache.statistics().num_fetched == 0
    other.close()
    assert local.copy(0) is not None
    local.close()


def test_private_folder_is_removed_only_with_its_owner(private_folders_are_removed: Path) -> None:
    folder = PrivateFolder()
    copy = pickle.loads(pickle.dumps(folder))
    assert copy.path == folder.path
    copy.close()
    assert remove_abandoned(private_folders_are_removed) == []
    del copy
    assert os.path.isdir(folder.path)
    path = folder.path
    del folder
    assert not os.path.exists(path)


@pytest.mark.parametrize("who", ["its owner", "a copy"])
def test_fetch_that_ends_after_close_leaves_no_files(
    who: str, private_folders_are_removed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_packed(tmp_path, [5] * 3)
    owner = LocalShards(shards_in(LocalStore(tmp_path)), None, 1 << 30)
    local = owner if who == "its owner" else pickle.loads(pickle.dumps(owner))
    place = Path(local.cache.path).parent
    begun, ended, late_done = threading.Event(), threading.Event(), threading.Event()
    opened = local.cache.open

    def late(*args: Any, **options: Any) -> Any:
        begun.set()
        assert ended.wait(30)
        try:
            return opened(*args, **options)
        finally:
            late_done.set()

    monkeypatch.setattr(local.cache, "open", late)
    before = set(threading.enumerate())  # among them those of earlier tests, which may still fetch
    local.announce([0, 1, 2], 3)
    (fetching,) = (thread for thread in threading.enumerate() if thread.name == "shmload-fetch" and thread not in before)
    assert begun.wait(30)
    local.close()
    owner.close()
    ended.set()
    fetching.join(30)
    assert late_done.is_set()
    assert not place.exists()
    assert local.copy(0) is None
    assert len(local.range(0, 0, 100)) == 100  # read from the store
    assert local.index(0).num_samples == 5
    local.close()
    assert list(private_folders_are_removed.iterdir()) == []


def test_folder_whose_removal_was_killed_is_removed_by_the_next_owner(private_folders_are_removed: Path) -> None:
    folder = PrivateFolder()
    half = Path(f"{folder.path}.gone")
    folder.close()
    half.mkdir()  # a kill during the removal, after the lock's file
    (half / "left").touch()
    assert remove_abandoned(private_folders_are_removed) == [str(half)]
    assert not half.exists()


def test_worker_continues_reading_after_its_trainers_folder_is_closed(tmp_path: Path) -> None:
    write_packed(tmp_path, [5] * 6)
    view = RemoteDataset(None, str(tmp_path)).indexed()
    with ShmLoader(view, batch_size=1, num_workers=1, prefetch_factor=2, multiprocessing_context="fork") as loader:
        found = []
        for batch in loader:
            if not found:
                view._source.local.close()
            found += batch["cls"].tolist()
    assert found == list(range(30))


def test_reader_continues_when_another_thread_closes_the_cache_of_a_removed_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_packed(tmp_path, [5] * 2)
    local = LocalShards(shards_in(LocalStore(tmp_path)), None, 1 << 30)
    owner, opened = local._private, FolderSession.locked
    assert owner is not None

    def after_removal(session: FolderSession) -> Any:
        monkeypatch.undo()
        owner.close()  # the owner of the folder, another process
        local.cache.close()  # the prefetcher's thread, which has noticed that first
        return opened(session)

    monkeypatch.setattr(FolderSession, "locked", after_removal)
    assert len(local.range(1, 0, 100)) == 100
    local.close()


def test_workers_started_after_close_create_no_folder(private_folders_are_removed: Path, tmp_path: Path) -> None:
    write_packed(tmp_path, [5] * 6)
    view = RemoteDataset(None, str(tmp_path)).indexed()
    assert len(view) == 30
    view._source.local.close()
    with ShmLoader(view, batch_size=5, num_workers=2, seed=1, multiprocessing_context="fork") as loader:
        assert sorted(number for batch in loader for number in batch["cls"].tolist()) == list(range(30))
    assert list(private_folders_are_removed.iterdir()) == []


@pytest.mark.slow(reason="a program in a process of its own, which imports torch")
def test_private_folder_of_a_killed_program_is_removed_at_the_next_start(private_folders_are_removed: Path, tmp_path: Path) -> None:
    write_packed(tmp_path, [5])
    code = f"""
        import os, signal, tempfile
        tempfile.tempdir = {str(private_folders_are_removed)!r}
        from shmload.remote import RemoteDataset
        dataset = RemoteDataset(None, {str(tmp_path)!r})
        print(sum(int(sample["cls"]) for sample in dataset), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "10\n"), done.stderr
    (left,) = private_folders_are_removed.iterdir()
    dataset = RemoteDataset(None, str(tmp_path))
    assert not left.exists()
    dataset.close()


def test_prefetcher_follows_the_latest_announcement_and_ends_with_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.fetched: list[int] = []
            self.done = threading.Event()
            self.prefetcher = Prefetcher(self.fetch)

        def fetch(self, shard: int) -> Fetched:
            self.fetched.append(shard)
            if shard == 9:
                self.done.set()
            return "over" if shard == 5 else "again" if self.fetched.count(shard) < 3 else "done"

    owner = Owner()
    thread = owner.prefetcher._thread
    owner.prefetcher.wish([4, 5, 6])
    owner.prefetcher.wish([7, 9])
    assert owner.done.wait(30)
    assert owner.fetched[owner.fetched.index(7) :][:4] == [7, 7, 7, 9]
    assert 6 not in owner.fetched
    del owner
    thread.join(30)
    assert not thread.is_alive()


def test_plain_shards_are_indexed_once_for_all_processes_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_plain(tmp_path / "data", [5] * 3)
    shards = shards_in(LocalStore(tmp_path / "data"))
    first = dataset_of(shards, cache_folder=tmp_path / "cache", cache_bytes=2 * NBYTES)
    assert len(first) == 15
    first.close()
    again, store = watched(tmp_path / "data", cache_folder=tmp_path / "cache", cache_bytes=2 * NBYTES)
    assert (len(again), store.count("range")) == (15, 0)
    again.close()


def test_error_names_a_shard_that_is_not_a_tar_file(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"x" * 2048)
    dataset: Any = RemoteDataset.from_urls(str(tmp_path))
    with pytest.raises(ShardCorrupt, match=r"x.tar: at byte 0: "):
        len(dataset)
    dataset.close()


def test_waiting_for_another_fetch_does_not_keep_the_shards_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "files").mkdir()
    write_packed(tmp_path / "files", [5])
    asked: list[float] = []
    obtain, folder_obtain = LocalShards._obtain, BudgetedFolder.obtain

    def noted(self: LocalShards, number: int, timeout_s: float) -> Any:
        asked.append(timeout_s)
        return obtain(self, number, timeout_s)

    def busy_first(self: BudgetedFolder, name: str, nbytes: int, **options: Any) -> Any:
        if len(asked) > 1:
            return folder_obtain(self, name, nbytes, **options)
        with folder_obtain(self, name, nbytes, timeout_s=0):  # to the folder, this looks like another process
            return folder_obtain(self, name, nbytes, **options)

    monkeypatch.setattr(LocalShards, "_obtain", noted)
    monkeypatch.setattr(BudgetedFolder, "obtain", busy_first)
    local = LocalShards(shards_in(LocalStore(tmp_path / "files")), tmp_path / "cache", 1 << 20)
    gc.disable()
    try:
        held = weakref.ref(local)
        assert local.copy(0) is not None
        assert asked == [0, 0]
        del local
        assert held() is None, "an error's traceback must not keep the shards alive"
    finally:
        gc.enable()


def test_reader_waits_for_another_fetch_but_never_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for room would deadlock if a worker uses all of it and waits for its trainer, which waits for this reader's batch."""
    write_packed(tmp_path / "files", [5] * 2)
    shards = shards_in(LocalStore(tmp_path / "files"))
    sizes = [shard.nbytes for shard in shards.all]
    local = LocalShards(shards, tmp_path / "cache", max(sizes))
    others = BudgetedFolder(local.cache.path, max(sizes))
    held: list[Any] = []
    fetching = threading.Event()
    obtain = BudgetedFolder.obtain

    def noted(self: BudgetedFolder, name: str, nbytes: int, **options: Any) -> Any:
        """Lets another process begin to fetch the shard first."""
        monkeypatch.setattr(BudgetedFolder, "obtain", obtain)
        held.append(others.obtain(name, nbytes))
        fetching.set()
        return obtain(self, name, nbytes, **options)

    def pause(seconds: float) -> None:
        """Lets the other process's fetch fail, and another file take all the room."""
        assert fetching.is_set(), "it must only wait while another process fetches"
        fetching.clear()
        held.pop().abandon()
        held.append(others.obtain("all the room", max(sizes)))

    monkeypatch.setattr("shmload.storage.room_wait.sleep", pause)
    monkeypatch.setattr(BudgetedFolder, "obtain", noted)
    local._wanted, local._places = [0, 1], {0: 0, 1: 1}
    assert local.copy(0) is None
    held.pop().abandon()
    others.close()
    local.close()


def test_threads_that_readers_need_do_not_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packed(tmp_path / "files", [5] * 12)
    shards = shards_in(LocalStore(tmp_path / "files"))
    local = LocalShards(shards, tmp_path / "cache", 10 * NBYTES)
    others = BudgetedFolder(local.cache.path, 10 * NBYTES)
    all_the_room = others.obtain("all the room", 10 * NBYTES)
    waiting_threads: SimpleQueue[str] = SimpleQueue()
    go_on = threading.Event()

    def pause(seconds: float) -> None:
        waiting_threads.put(threading.current_thread().name)
        go_on.wait(30)

    monkeypatch.setattr("shmload.storage.room_wait.sleep", pause)
    local.announce(range(12), 9)
    waiting = waiting_threads.get(timeout=30)
    found = local.ranges([(number, 0, 512) for number in range(9)])
    go_on.set()
    all_the_room.abandon()  # type: ignore[union-attr]  # a reservation
    assert waiting == "shmload-fetch"
    assert [len(each) for each in found] == [512] * 9
    local.close()
    others.close()


def test_shard_shorter_than_in_its_manifest_is_an_error_that_names_it(tmp_path: Path) -> None:
    manifest = write_packed(tmp_path, [5])
    os.truncate(tmp_path / manifest.shards[0].name, NBYTES // 2)
    dataset, _ = watched(tmp_path)
    with pytest.raises(ShardCorrupt, match=r"shard-000000\.tar"):
        labels(dataset)
    dataset.close()


def test_keyboard_interrupt_during_a_copy_is_raised(tmp_path: Path) -> None:
    write_packed(tmp_path, [5])
    shards = shards_in(store := WatchedStore(LocalStore(tmp_path)))

    def interrupt(key: str, out: memoryview) -> None:
        raise KeyboardInterrupt

    store.spoil = interrupt
    cache = Cache(tmp_path / "cache", 1 << 20)
    with pytest.raises(KeyboardInterrupt):
        cache.open("x", NBYTES, fetch_of(shards, shards.all[0]), etag="1")
    cache.close()


def test_child_forked_during_a_copy_does_not_keep_its_lock(tmp_path: Path) -> None:
    write_packed(tmp_path, [5])
    shards = shards_in(store := WatchedStore(LocalStore(tmp_path)))
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:

        def fork_and_die(key: str, out: memoryview) -> None:
            if not os.fork():  # what a child does after a fork is done when this returns
                os.write(writing, b"%d" % os.getpid())
            signal.pause()

        store.spoil = fork_and_die
        Cache(tmp_path / "cache", 1 << 20).open("x", NBYTES, fetch_of(shards, shards.all[0]), etag="1")
        os._exit(1)
    child = int(os.read(reading, 20))
    os.kill(parent, signal.SIGKILL)
    try:
        os.waitpid(parent, 0)
        (half,) = (tmp_path / "cache" / NEW).iterdir()
        assert not is_locked(os.fspath(half))
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_full_disk_is_not_tried_at_each_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packed(tmp_path, [200])
    local = LocalShards(shards_in(LocalStore(tmp_path)), None, 1 << 30)
    num_tries = 0

    def full(*_: Any, **__: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        raise CacheFull("the disk has no room")

    monkeypatch.setattr(local.cache, "open", full)
    local._wanted, local._places = [0], {0: 0}
    assert [len(local.range(0, 100 * number, 100)) for number in range(200)] == [100] * 200
    assert 1 <= num_tries < 50  # one in half a second
    local.close()


def test_copies_of_passed_shards_are_released_where_the_disk_is_smaller_than_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_packed(tmp_path, [5] * 3)
    local = LocalShards(shards_in(LocalStore(tmp_path)), None, 1 << 30)
    opened = local.cache.open

    def of_small_disk(*given: Any, **options: Any) -> Any:
        if len(local._copies) == 2:
            raise CacheFull("the disk has no room")
        return opened(*given, **options)

    monkeypatch.setattr(local.cache, "open", of_small_disk)
    assert [local.copy(number) is None for number in range(3)] == [False, False, True]
    local._wanted, local._places = [1, 2], {1: 0, 2: 1}
    local.let_go_passed()
    num_held = len(local._copies)
    local.close()
    assert num_held == 1


def test_reader_displaces_shards_that_are_passed_or_needed_later(tmp_path: Path) -> None:
    write_packed(tmp_path, [5] * 5)
    local = LocalShards(shards_in(LocalStore(tmp_path)), None, 3 * NBYTES)
    local._wanted, local._places = [1, 2, 3], {1: 0, 2: 1, 3: 2}
    for number in (1, 3):
        assert local.copy(number) is not None
    local._wanted, local._places = [1, 4, 2, 3], {1: 0, 4: 1, 2: 2, 3: 3}
    assert local.copy(2) is not None  # now there is no more room
    assert local.copy(4) is not None
    held = sorted(local._copies)
    local.close()
    assert held == [1, 4]


def test_child_forked_while_a_thread_announces_shards_announces_its_own(tmp_path: Path) -> None:
    write_packed(tmp_path / "data", [5] * 2)
    dataset, _ = watched(tmp_path / "data", cache_folder=tmp_path / "cache")
    source, blocked = dataset._source, BlockedCall()
    order = source.order(shuffle=False)

    class Order:
        num_windows = order.num_windows
        window_of = order.window_of

        @staticmethod
        def shards_from(*place: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                blocked()
            return order.shards_from(*place, **options)

    def enter(epoch: int) -> bool:
        source.enter(Order, 0, seed=1, epoch=epoch)  # type: ignore[arg-type]  # has the methods that are called
        return source._now == (os.getpid(), 1, epoch, 0)

    assert exit_status_of_child_forked_while_blocked(blocked, lambda: enter(0), lambda: enter(1)) == 0
    dataset.close()


def test_worker_forked_after_the_trainer_has_read_the_epoch_announces_its_shards(tmp_path: Path) -> None:
    write_packed(tmp_path / "data", [5] * 2)
    dataset, _ = watched(tmp_path / "data", cache_folder=tmp_path / "cache")
    source = dataset._source
    order = source.order(shuffle=False)
    source.enter(order, 1, seed=1, epoch=0)
    child = os.fork()
    if not child:
        source.enter(order, 0, seed=1, epoch=0)
        os._exit(0 if source.local._wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dataset.close()
