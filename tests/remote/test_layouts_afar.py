"""Existing datasets in real stores: read by ranks through small caches, through faults, and after readers were killed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from shmload.errors import StoreError
from shmload.remote import Client, RemoteDataset
from shmload.remote.listing import shards_in
from shmload.storage.local_store import LocalStore
from tests.remote.layout_kit import CASES, NUM_SAMPLES, Case, identity, numbers_by_content, same
from tests.remote.remote_kit import uploaded
from tests.remote.test_over_faults import random_fault
from tests.storage.fault_proxy import FaultProxy, Status
from tests.storage.store_kit import Server, web_server

NAMES = (
    *("jsonl", "jsonl.zst", "npy", "parquet", "tfrecord, schema", "tar.gz", "files"),
    *("mds", "mds.zstd", "litdata", "litdata.zstd", "litdata rows"),
)
EVERY = pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=lambda case: case.name)


@pytest.fixture
def place(case: Case, server: Server, tmp_path: Path) -> tuple[str, str]:
    """Uploads the case's shards; returns their bucket and folder. They are also in tmp_path / "files"."""
    (tmp_path / "files").mkdir()
    case.write(tmp_path / "files")
    return uploaded(server, tmp_path / "files")


@pytest.fixture(scope="session")
def impatient_client(server: Server, proxy: FaultProxy) -> Client:
    """Returns a client of the proxy with few retries. It outlives the errors, whose tracebacks would otherwise close its sockets
    in any order.
    """
    return server.client(proxy.url, retries=2)


def largest(case: Case, folder: Path) -> int:
    return shards_in(LocalStore(folder), case.layout).largest


def numbers(case: Case, dataset: RemoteDataset) -> list[int]:
    which = numbers_by_content(case)
    return [which[identity(sample)] for sample in dataset]


@EVERY
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_read_each_sample_once_through_a_small_cache(
    case: Case, world_size: int, place: tuple[str, str], server: Server, tmp_path: Path
) -> None:
    options = {"cache_folder": tmp_path / "cache", "cache_bytes": largest(case, tmp_path / "files") + 1, "uneven": "exact"}
    ranks = [
        RemoteDataset(server.client(), *place, rank=rank, world_size=world_size, **case.options(), **options)
        for rank in range(world_size)
    ]
    for _ in range(2):
        assert sorted(number for rank in ranks for number in numbers(case, rank)) == list(range(NUM_SAMPLES))
    for rank in ranks:
        rank.close()


@EVERY
def test_epoch_with_faults_equals_the_undisturbed_one(
    case: Case, place: tuple[str, str], server: Server, proxy: FaultProxy, growing_patience: list[float], tmp_path: Path
) -> None:
    undisturbed = RemoteDataset(server.client(), *place, seed=4, **case.options())
    expected = numbers(case, undisturbed)
    undisturbed.close()
    rng = random.Random(case.name)
    proxy.script()
    client = server.client(proxy.url, retries=30, stall_s=60)
    dataset = RemoteDataset(client, *place, seed=4, cache_folder=tmp_path / "cache", **case.options())
    proxy.script(*(random_fault(rng) for _ in range(10)))
    assert numbers(case, dataset) == expected
    dataset.close()


@EVERY
def test_long_outage_is_one_error(
    case: Case, place: tuple[str, str], impatient_client: Client, proxy: FaultProxy, pauses: list[float]
) -> None:
    proxy.script()
    dataset = RemoteDataset(impatient_client, *place, cache_bytes=1 << 20, **case.options())
    proxy.script(*[Status(503)] * 400)
    with pytest.raises(StoreError, match=r"503"):
        list(dataset)
    proxy.script()
    assert sorted(numbers(case, dataset)) == list(range(NUM_SAMPLES))
    dataset.close()


@EVERY
def test_cache_of_killed_readers_serves_the_epoch(case: Case, place: tuple[str, str], server: Server, tmp_path: Path) -> None:
    def opened(**more: Any) -> RemoteDataset:
        return RemoteDataset(server.client(), *place, seed=6, window=1, **case.options(), **more)

    undisturbed = opened()
    expected = numbers(case, undisturbed)
    undisturbed.close()
    options = {"cache_folder": tmp_path / "cache", "cache_bytes": largest(case, tmp_path / "files") * 2}
    for after in (1, 4, 9, 13, 22):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            for number, _ in enumerate(opened(**options)):
                if number == after:
                    os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    dataset = opened(**options)
    assert numbers(case, dataset) == expected
    dataset.close()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in NAMES and case.name != "files"], ids=lambda case: case.name
)
def test_data_on_a_web_server_without_listings_is_read_by_urls(case: Case, tmp_path: Path) -> None:
    case.write(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    with web_server(tmp_path) as url:
        urls: Any = url if "index.json" in names else [f"{url}/{name}" for name in names]
        dataset = RemoteDataset.from_urls(urls, shuffle=False, **case.options())
        found = [{name: value for name, value in sample.items() if name[:2] != "__"} for sample in dataset]
        dataset.close()
    assert len(found) == NUM_SAMPLES
    assert all(same(sample, case.sample(number)) for number, sample in enumerate(found))
