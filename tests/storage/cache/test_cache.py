"""The cache of a store's objects: found by key and version, fetched once, checked, and evicted according to the announcements of
readers.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shmload import CacheFull, StoreError
from shmload.storage.cache import Cache
from tests.storage.cache.folder_kit import being_written, files_on_disk


def cache_at(place: str) -> Cache:
    return Cache(place, 100, durable=False)


def filled(text: bytes) -> Callable[[int], None]:
    def fetch(fd: int) -> None:
        nbytes = os.fstat(fd).st_size
        os.pwrite(fd, (text * (nbytes // len(text) + 1))[:nbytes], 0)

    return fetch


def no_fetch(fd: int) -> None:
    raise AssertionError("the object must be cached already")


def keys_in(place: str) -> list[str]:
    return sorted(name.rsplit("-", 1)[1] for name in files_on_disk(place))


def test_object_is_fetched_once_and_then_found(place: str) -> None:
    cache = cache_at(place)
    with cache.open("s3://b/x.tar", 7, filled(b"payload"), etag="1") as lease:
        assert os.pread(lease.fd, 100, 0) == b"payload"
        assert lease.path.endswith("-x.tar")
    with cache.open("s3://b/x.tar", 7, no_fetch, etag="1"), cache_at(place).open("s3://b/x.tar", 7, no_fetch, etag="1"):
        pass
    found = cache.statistics()
    assert (found.num_hits, found.num_fetched, found.nbytes_fetched, found.folder.nbytes) == (1, 1, 7, 7)
    assert (place, 100, f"<Cache {place} of 100 bytes>") == (cache.path, cache.capacity_bytes, repr(cache))


def test_changed_object_is_another_file_and_the_old_one_is_removed_once_unused(place: str) -> None:
    cache = cache_at(place)
    old = cache.open("x", 10, filled(b"old"), etag="1")
    with cache.open("x", 12, filled(b"new"), etag="2") as lease:
        assert os.pread(lease.fd, 100, 0) == b"newnewnewnew"
        assert os.pread(old.fd, 100, 0) == b"oldoldoldo"
    old.release()
    cache.open("x", 10, filled(b"old"), etag="3").release()
    assert keys_in(place) == ["x"]


def test_objects_with_the_same_name_in_different_stores_are_distinct(place: str) -> None:
    cache = cache_at(place)
    cache.open("s3://one/x", 3, filled(b"a"), etag="1").release()
    cache.open("s3://two/x", 3, filled(b"b"), etag="1").release()
    assert keys_in(place) == ["x", "x"]


def test_empty_object_is_cached(place: str) -> None:
    with cache_at(place).open("x", 0, filled(b"x"), etag="1") as lease:
        assert os.pread(lease.fd, 1, 0) == b""


def test_failed_fetch_leaves_nothing(place: str) -> None:
    cache = cache_at(place)

    def fails(fd: int) -> None:
        os.pwrite(fd, b"abc", 0)
        raise ConnectionError("reset")

    with pytest.raises(ConnectionError, match="reset"):
        cache.open("x", 10, fails, etag="1")
    assert (files_on_disk(place), being_written(place)) == ({}, {})
    cache.open("x", 10, filled(b"x"), etag="1").release()


def test_truncated_file_is_fetched_again(place: str) -> None:
    cache = cache_at(place)
    cache.open("x", 10, filled(b"x"), etag="1").release()
    (name,) = files_on_disk(place)
    os.truncate(f"{place}/{name}", 5)
    with cache.open("x", 10, filled(b"x"), etag="1") as lease:
        assert os.pread(lease.fd, 100, 0) == b"x" * 10
        os.truncate(f"{place}/{name}", 5)
        with pytest.raises(StoreError, match="has 5 bytes, but x has 10, and other processes are reading the file: it was changed"):
            cache.open("x", 10, no_fetch, etag="1")


def test_errors_for_too_large_objects_contain_figures(place: str) -> None:
    cache = cache_at(place)
    with pytest.raises(CacheFull, match=r"a file of 101 bytes can never fit in .*, whose budget is 100 bytes"):
        cache.open("x", 101, filled(b"x"), etag="1")
    with (
        cache.open("x", 60, filled(b"x"), etag="1"),
        pytest.raises(
            CacheFull, match=r"no room for 60 more bytes: 60 of its budget of 100 bytes are in use .*, 60 of them are leased"
        ),
    ):
        cache.open("y", 60, filled(b"y"), etag="1", timeout_s=0)


def test_second_reader_of_an_object_waits_for_the_first_ones_fetch(place: str) -> None:
    cache, other = cache_at(place), cache_at(place)
    fetching, goes_on, found = threading.Event(), threading.Event(), []

    def fetch(fd: int) -> None:
        fetching.set()
        goes_on.wait()
        os.pwrite(fd, b"x" * 10, 0)

    one = threading.Thread(target=lambda: found.append(cache.open("x", 10, fetch, etag="1")))
    one.start()
    fetching.wait()
    with pytest.raises(TimeoutError, match="another process was still writing"):
        other.open("x", 10, no_fetch, etag="1", timeout_s=0)
    two = threading.Thread(target=lambda: found.append(other.open("x", 10, no_fetch, etag="1")))
    two.start()
    goes_on.set()
    one.join()
    two.join()
    assert (len({lease.path for lease in found}), len(found)) == (1, 2)


def test_waiter_fetches_after_another_reader_fails(place: str) -> None:
    cache, other = cache_at(place), cache_at(place)
    fetching, goes_on, found = threading.Event(), threading.Event(), []

    def fetch(fd: int) -> None:
        fetching.set()
        goes_on.wait()
        raise ConnectionError

    def try_it() -> None:
        with pytest.raises(ConnectionError):
            cache.open("x", 10, fetch, etag="1")

    one = threading.Thread(target=try_it)
    one.start()
    fetching.wait()
    two = threading.Thread(target=lambda: found.append(other.open("x", 10, filled(b"y"), etag="1")))
    two.start()
    goes_on.set()
    one.join()
    two.join()
    assert Path(found[0].path).read_bytes() == b"y" * 10


def fill(cache: Cache, keys: str, nbytes: int = 30) -> None:
    for key in keys:
        cache.open(key, nbytes, filled(key.encode()), etag="1").release()


def test_least_recently_used_object_is_evicted_without_announcements(place: str) -> None:
    cache = cache_at(place)
    fill(cache, "abcad")
    assert keys_in(place) == ["a", "c", "d"]


def test_unannounced_object_is_evicted_before_announced_ones(place: str) -> None:
    cache = cache_at(place)
    fill(cache, "abc")
    cache.expect("xayc")
    fill(cache, "x")
    assert keys_in(place) == ["a", "c", "x"]
    fill(cache, "a")
    fill(cache, "y")
    assert "c" in keys_in(place)


def test_object_needed_last_is_evicted_first(place: str) -> None:
    cache = cache_at(place)
    fill(cache, "abc")
    cache.expect("xabc")
    fill(cache, "x")
    assert keys_in(place) == ["a", "b", "x"]


def test_object_needed_sooner_is_not_evicted_for_one_needed_later(place: str) -> None:
    cache = cache_at(place)
    fill(cache, "abc")
    cache.expect("abcd")
    with pytest.raises(CacheFull, match="0 of them are leased, 0 by this process, and 0 may be evicted"):
        cache.open("d", 30, filled(b"x"), etag="1", timeout_s=0)
    cache.expect("abcd")
    fill(cache, "a")
    cache.open("d", 30, filled(b"x"), etag="1", timeout_s=0).release()
    assert keys_in(place) == ["b", "c", "d"]


def test_old_version_of_a_needed_object_is_evicted(place: str) -> None:
    cache = cache_at(place)
    with cache.open("x", 30, filled(b"x"), etag="1"):
        cache.open("x", 30, filled(b"y"), etag="2").release()
    fill(cache, "a")
    cache.expect("ax")
    fill(cache, "b")
    with cache.open("x", 30, no_fetch, etag="2"):
        assert keys_in(place) == ["a", "b", "x"]


def test_key_announced_twice_is_kept_until_opened_twice(place: str) -> None:
    cache = cache_at(place)
    cache.expect("abcab")
    fill(cache, "abcx")
    assert keys_in(place) == ["a", "b", "x"]


def test_unpickled_cache_uses_the_same_folder_with_its_own_announcements(place: str) -> None:
    cache = cache_at(place)
    fill(cache, "a")
    cache.expect("a")
    again = pickle.loads(pickle.dumps(cache))
    again.open("a", 30, no_fetch, etag="1").release()
    assert (again.statistics().num_hits, again.statistics().num_fetched) == (1, 0)
    cache.close()
    cache.open("a", 30, no_fetch, etag="1").release()


def test_forked_child_starts_without_announcements(place: str) -> None:
    cache = cache_at(place)
    fill(cache, "abc")
    cache.expect("a")
    pid = os.fork()
    if pid == 0:
        try:
            fill(cache, "d")
            os._exit(0 if cache.statistics().num_fetched == 1 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert keys_in(place) == ["b", "c", "d"]


def test_full_cache_evicts_many_small_files_together(place: str) -> None:
    cache = Cache(place, 1280, durable=False)
    for number in range(1280):
        cache.open(f"{number}", 1, filled(b"x"), etag="1").release()
    passes = []
    for number in range(1280, 1300):
        before = cache.statistics().folder.num_evicted
        cache.open(f"{number}", 1, filled(b"x"), etag="1").release()
        passes.append(cache.statistics().folder.num_evicted - before)
    assert passes == [10, *[0] * 9] * 2  # a 128th of the budget


def test_file_larger_than_a_128th_of_the_budget_is_evicted_alone(place: str) -> None:
    cache = Cache(place, 1280, durable=False)
    for number in range(70):
        cache.open(f"{number}", 20, filled(b"x"), etag="1").release()
    assert cache.statistics().folder.num_evicted == 6
