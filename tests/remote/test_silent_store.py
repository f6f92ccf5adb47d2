"""A store that stops answering while a dataset is read: the error comes after one object's retries, for any number of objects and
readers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from shmload import ShmLoader
from shmload.errors import StoreError
from shmload.remote import RemoteDataset, make_client
from shmload.remote.local_shards import LocalShards
from tests.remote.remote_kit import labels, write_plain
from tests.storage.fault_proxy import Fault, FaultProxy, Stall, Status, fault_proxy
from tests.storage.store_kit import web_server

NUM_SHARDS = 6
COUNTS = [3] * NUM_SHARDS
RETRIES = 2
FOREVER = 10_000


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[FaultProxy]:
    files = tmp_path / "files"
    files.mkdir()
    write_plain(files, COUNTS)
    with web_server(files) as url, fault_proxy(url) as made:
        yield made


def dataset_through(proxy: FaultProxy, cache_bytes: float) -> RemoteDataset:
    """Returns a dataset whose shards are all indexed. Its tries stall for a short time, and an outage lasts for a long one."""
    client = make_client(proxy.url, "key", "secret", retries=RETRIES, stall_s=60)
    found = RemoteDataset.from_urls(
        f"{proxy.url}/part-{{000000..{NUM_SHARDS - 1:06d}}}.tar", client, shuffle=False, cache_bytes=cache_bytes
    )
    assert found.num_samples == sum(COUNTS)
    store: Any = found._source.local.shards.all[0].store
    store.close()
    store._transport(proxy.url).stall_s = 0.05
    return found


def test_after_the_first_failure_of_a_silent_store_no_other_object_is_requested(proxy: FaultProxy, pauses: list[float]) -> None:
    view = dataset_through(proxy, cache_bytes=0).indexed()
    proxy.script(*[Stall()] * FOREVER)
    for number in range(0, sum(COUNTS), 3):
        with pytest.raises(StoreError, match=r"cannot read .*part-000000\.tar: no answer from http.*failed 3 times"):
            view[number]
    assert proxy.num_requests == 1 + RETRIES


def test_after_the_first_failure_of_a_refusing_store_other_objects_are_requested_once(
    proxy: FaultProxy, pauses: list[float]
) -> None:
    view = dataset_through(proxy, cache_bytes=0).indexed()
    proxy.script(*[Status(503)] * FOREVER)
    for number in range(0, sum(COUNTS), 3):
        with pytest.raises(StoreError, match="503"):
            view[number]
    # after a failed read of an object, one request checks whether the object has changed
    assert proxy.num_requests == 1 + RETRIES + 1 + 2 * (NUM_SHARDS - 1)


def test_readers_that_wait_for_a_fetch_fail_with_it(proxy: FaultProxy, pauses: list[float]) -> None:
    dataset = dataset_through(proxy, cache_bytes=60_000)
    assert not dataset._source.local.keeps_all  # so that nothing has been copied yet
    locals_ = [dataset._source.local.another() for _ in range(3)]
    barrier = Barrier(len(locals_))
    errors: list[str] = []

    def read(local: LocalShards) -> None:
        barrier.wait()
        try:
            local._obtain(0, 60)
        except StoreError as error:
            errors.append(str(error))

    proxy.script(*[Stall()] * FOREVER)
    threads = [Thread(target=read, args=(local,)) for local in locals_]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == len(locals_)
    assert proxy.num_requests == 1 + RETRIES


@pytest.mark.parametrize("fault", [Stall(), Status(503)], ids=repr)
def test_pass_after_the_store_is_back_reads_everything(proxy: FaultProxy, fault: Fault, pauses: list[float]) -> None:
    dataset = dataset_through(proxy, cache_bytes=0)
    for _ in range(2):
        proxy.script(*[fault] * FOREVER)
        with pytest.raises(StoreError):
            labels(dataset)
        proxy.script()
        assert labels(dataset) == list(range(sum(COUNTS)))


@pytest.mark.slow(reason="starts worker processes")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_fail_within_the_retries_of_their_first_objects(proxy: FaultProxy, num_workers: int, pauses: list[float]) -> None:
    view = dataset_through(proxy, cache_bytes=0).indexed()
    loader = ShmLoader(view, batch_size=1, num_workers=num_workers, seed=1, collate_fn=list)
    proxy.script(*[Stall()] * FOREVER)
    with pytest.raises(StoreError, match="no answer from"):
        list(loader)
    assert proxy.num_requests <= num_workers * (1 + RETRIES)
