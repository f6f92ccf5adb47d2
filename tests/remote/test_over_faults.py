"""An epoch from a real store through a proxy that disturbs answers is exactly the undisturbed epoch, or one clear error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shmload.errors import ShardCorrupt, StoreError
from shmload.remote import RemoteDataset
from tests.remote.remote_kit import labels, uploaded, write_packed, write_plain
from tests.storage.fault_proxy import Fault, FaultProxy, Header, Length, Refuse, Reset, Stall, Status, Truncate
from tests.storage.store_kit import Server

COUNTS = (30, 7, 22, 16)


@pytest.fixture(scope="session")
def packed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Returns bucket and folder of a packed dataset in the store."""
    files = tmp_path_factory.mktemp("packed")
    write_packed(files, COUNTS)
    return uploaded(server, files)


@pytest.fixture(scope="session")
def plain(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Returns bucket and folder of the same shards without a manifest."""
    files = tmp_path_factory.mktemp("plain")
    write_plain(files, COUNTS)
    return uploaded(server, files)


def random_fault(rng: random.Random) -> Fault | None:
    """Returns a random fault that passes, or None half of the time."""
    after = rng.randrange(40_000)
    passing = (
        Refuse(),
        Reset(after),
        Truncate(after),
        Stall(after),
        Status(503),
        Status(500),
        Length(-100),
        Header("Content-Range", "bytes 0-5/7"),
    )
    return rng.choice(passing) if rng.random() < 0.5 else None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_epoch_with_faults_equals_the_undisturbed_epoch(
    kind: str,
    seed: int,
    server: Server,
    proxy: FaultProxy,
    growing_patience: list[float],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    place = request.getfixturevalue(kind)
    expected = labels(RemoteDataset(server.client(), *place, seed=seed))
    rng = random.Random(seed)
    proxy.script()
    client = server.client(proxy.url, retries=30, stall_s=60)
    dataset = RemoteDataset(client, *place, seed=seed, cache_folder=tmp_path)  # a prefetcher may continue to retry after the test
    proxy.script(*(random_fault(rng) for _ in range(12)))
    assert expected == labels(dataset)
    assert list(range(sum(COUNTS))) == sorted(expected)
    assert growing_patience


def test_broken_store_is_one_error_and_reading_continues_once_it_is_repaired(
    packed: tuple[str, str], server: Server, proxy: FaultProxy, pauses: list[float]
) -> None:
    proxy.script()
    dataset = RemoteDataset(server.client(proxy.url, retries=1), *packed)
    proxy.script(*[Status(503)] * 1000)
    with pytest.raises(StoreError, match="503"):
        labels(dataset)
    proxy.script()
    assert list(range(sum(COUNTS))) == sorted(labels(dataset))


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_shard_changed_before_it_is_read_is_an_error(kind: str, server: Server, tmp_path: Path) -> None:
    (write_packed if kind == "packed" else write_plain)(tmp_path, COUNTS)
    bucket, folder = uploaded(server, tmp_path)
    dataset = RemoteDataset(server.client(), bucket, folder, shuffle=False)
    last = sorted(tmp_path.rglob("*.tar"))[-1]
    data = bytearray(last.read_bytes())
    data[600] ^= 1  # within the first member
    server.store(bucket, folder).put(str(last.relative_to(tmp_path)), bytes(data))
    told = "its checksum is .* but the manifest says" if kind == "packed" else "was removed or written to since"
    with pytest.raises(ShardCorrupt, match=told):
        labels(dataset)


def test_dataset_repacked_during_a_pass_is_an_error_that_says_so(server: Server, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    write_packed(tmp_path / "old", COUNTS)
    bucket, folder = uploaded(server, tmp_path / "old")
    dataset = RemoteDataset(server.client(), bucket, folder)
    store = server.store(bucket, folder)
    (tmp_path / "new").mkdir()
    write_packed(tmp_path / "new", [5], generation="1" * 16)
    store.delete([entry.key for entry in store.list_objects()])
    for path in (tmp_path / "new").rglob("*.*"):
        store.put_file(str(path.relative_to(tmp_path / "new")), path)
    with pytest.raises(ShardCorrupt, match="the dataset was packed again while it was read"):
        labels(dataset)
