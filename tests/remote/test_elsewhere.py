"""Datasets in stores that fsspec reaches, with a server for each: packed, read by ranks and workers, with kills and faults."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shmload
from shmload import ShmLoader
from shmload.errors import ObjectMissing, ShardCorrupt, StoreError
from shmload.formats import ImageFolder
from shmload.remote import RemoteDataset, upload_cv_dataset
from shmload.remote.listing import shards_in
from shmload.storage import retry
from shmload.storage.filesystem_store import FilesystemStore
from shmload.storage.open_store import open_store
from shmload.storage.store import Store
from tests.free_ports import free_port
from tests.remote.killed import Readers
from tests.remote.remote_kit import concatenated, labels, upload, write_packed, write_plain
from tests.storage import store_kit
from tests.storage.fault_proxy import FaultProxy, Refuse, Reset, Status, fault_proxy
from tests.storage.store_fixtures import open_new_folder

COUNTS = (11, 30, 23)
NUM_SAMPLES = sum(COUNTS)
PICTURES = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))


@pytest.fixture(params=store_kit.OTHERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Returns a store with packed shards."""
    made = open_new_folder(request.param)
    (tmp_path / "files").mkdir()
    write_packed(tmp_path / "files", COUNTS, nbytes=4000)
    upload(made, tmp_path / "files")
    return made


@pytest.mark.parametrize("scheme", store_kit.OTHERS)
def test_images_packed_into_the_store_are_read_back(scheme: str, tmp_path: Path) -> None:
    for number, path in enumerate(PICTURES):
        (tmp_path / f"{number:02d}").mkdir()
        shutil.copy(path, tmp_path / f"{number:02d}" / "0.jpg")
    store: Any = open_new_folder(scheme)
    manifest = upload_cv_dataset(ImageFolder(tmp_path), store.options, store.url, "packed", maxcount=2, workers=0)
    assert manifest.num_samples == len(PICTURES)
    dataset = RemoteDataset.from_urls(f"{store.url}/packed", store.options).decode("rgb8").to_tuple("jpg;png", "cls")
    found = {int(number): picture for picture, number in dataset}
    assert sorted(found) == list(range(len(PICTURES)))
    assert all(np.array_equal(found[number], np.asarray(Image.open(path).convert("RGB"))) for number, path in enumerate(PICTURES))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_read_every_sample_exactly_once_through_a_small_cache(store: Store, world_size: int, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in (tmp_path / "files").rglob("*.tar"))
    options = {"cache_folder": tmp_path / "cache", "cache_bytes": largest * 3 // 2, "window": 1, "uneven": "exact"}
    ranks = [RemoteDataset(None, shards_in(store), rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for _ in range(2):
        assert sorted(concatenated(labels(rank) for rank in ranks)) == list(range(NUM_SAMPLES))


def test_loader_with_workers_resumes_at_its_position(store: Store) -> None:
    def made() -> ShmLoader[Any]:
        dataset = RemoteDataset(None, shards_in(store), seed=3).decode().to_tuple("npy", "cls").batched(4)
        return ShmLoader(dataset, batch_size=None, num_workers=2)

    def numbers(batches: Any) -> list[int]:
        return concatenated(np.asarray(cls).tolist() for _, cls in batches)

    with made() as loader:
        expected = numbers(loader)
    assert sorted(expected) == list(range(NUM_SAMPLES))
    with made() as loader:
        batches = iter(loader)
        begun = numbers(next(batches) for _ in range(5))
        state = loader.state_dict()
    with made() as loader:
        loader.load_state_dict(state)
        assert begun + numbers(loader) == expected


def test_single_samples_are_read_with_range_requests(store: Store) -> None:
    samples = RemoteDataset(None, shards_in(store), cache_bytes=0).indexed()
    assert [int(samples[index]["cls"]) for index in (0, 40, 63, 10)] == [0, 40, 63, 10]


@pytest.mark.slow(reason="readers are processes that are killed, over three servers")
@pytest.mark.parametrize("scheme", store_kit.OTHERS)
def test_reader_restarted_after_a_kill_reads_exactly_the_epoch(scheme: str, tmp_path: Path) -> None:
    readers = Readers(open_new_folder(scheme), tmp_path, seed=1)
    readers.run_round()
    assert sum(readers.kills.values()) >= 1, readers.kills


def test_damaged_shard_is_an_error(store: Store, tmp_path: Path) -> None:
    (path, *_) = (tmp_path / "files").rglob("shard-000001.tar")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    store.put(str(path.relative_to(tmp_path / "files")), data)
    with pytest.raises(ShardCorrupt, match=r"shard-000001\.tar: its checksum is .* this repairs damaged shards"):
        labels(RemoteDataset(None, shards_in(store)))


@pytest.mark.parametrize("scheme", store_kit.OTHERS)
def test_plain_shards_replaced_while_they_are_read_are_never_mixed(scheme: str, tmp_path: Path) -> None:
    store = open_new_folder(scheme)
    store.put("x.tar", tar(tmp_path, 9))
    dataset = RemoteDataset(None, shards_in(store), cache_bytes=0)
    samples = iter(dataset)
    next(samples)
    store.put("x.tar", tar(tmp_path, 12))
    with pytest.raises(ShardCorrupt, match=r"x\.tar: was removed or written to since the dataset was created"):
        list(samples)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields a hub whose dataset has packed shards in one commit, and others in a second commit that is not the newest yet."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # other tests set it
    for commit, counts in (("a" * 40, COUNTS), ("b" * 40, (5, 4))):
        (tmp_path / commit / "packed").mkdir(parents=True)
        write_packed(tmp_path / commit / "packed", counts, nbytes=4000)
    with store_kit.hub_server(tmp_path) as server:
        server.main = "a" * 40
        yield server


def on_hub(server: Any, revision: str = "") -> Store:
    options = {"endpoint": f"http://127.0.0.1:{server.server_port}", "token": False}
    return open_store(f"hf://datasets/team/photos{revision}/packed", options)


def test_hub_dataset_stays_at_its_commit_in_all_processes(hub: Any) -> None:
    dataset = RemoteDataset(None, shards_in(on_hub(hub)))
    hub.main = "b" * 40
    with ShmLoader(dataset.decode().to_tuple("npy", "cls").batched(4), batch_size=None, num_workers=2) as loader:
        assert sorted(concatenated(np.asarray(cls).tolist() for _, cls in loader)) == list(range(NUM_SAMPLES))
    assert sorted(labels(RemoteDataset(None, shards_in(on_hub(hub))))) == list(range(9))
    old = RemoteDataset(None, shards_in(on_hub(hub, "@" + "a" * 40)), cache_bytes=0).indexed()
    assert [int(old[index]["cls"]) for index in (40, 3)] == [40, 3]


def test_object_missing_on_the_hub_raises_object_missing(hub: Any) -> None:
    for store, key in ((on_hub(hub), "nothing"), (on_hub(hub, "@nowhere"), "x")):
        with pytest.raises(ObjectMissing, match=rf"no such object: hf://datasets/team/photos.*/packed/{key}"):
            store.get(key)
    assert [each.key for each in on_hub(hub).list_objects()][-1] == "manifest.json"


def tar(folder: Path, count: int) -> bytes:
    """Returns the bytes of a plain shard with `count` samples."""
    (place := folder / f"plain{count}").mkdir()
    write_plain(place, [count])
    return next(place.glob("*.tar")).read_bytes()


# ---------------------------------------------------------------- a store that does not answer correctly


@pytest.mark.slow(reason="the libraries' own pauses between tries: some seconds")
# gcsfs leaves broken connections
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_short_outage_loses_nothing(scheme: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        proxies: list[FaultProxy] = []

        def through(endpoint: str) -> str:
            proxies.append(stack.enter_context(fault_proxy(endpoint)))
            return proxies[0].url

        store = open_new_folder(scheme, through)
        write_packed(tmp_path, COUNTS)
        upload(store, tmp_path)
        proxies[0].script(Refuse(), None, Reset(after=300), None, Status(503))
        dataset = RemoteDataset(None, shards_in(store))
        assert sorted(labels(dataset)) == list(range(NUM_SAMPLES))
        dataset.close()


@contextmanager
def store_and_server_switch(scheme: str) -> Iterator[tuple[FilesystemStore, Callable[[], None], Callable[[], None]]]:
    """Yields an impatient store, and functions that stop its server and start it again."""
    with ExitStack() as stack:
        patience = {"retries": 2, "timeout_s": 1.5}
        if scheme == "sftp":
            port, folder = free_port(), stack.enter_context(TemporaryDirectory())
            program = [sys.executable, str(Path(store_kit.__file__).with_name("sftp_server.py")), str(port), folder]
            servers: list[subprocess.Popen[bytes]] = []

            def start() -> None:
                servers.append(subprocess.Popen([*program, store_kit.SECRET_KEY]))
                store_kit._until_open(port)

            def stop() -> None:
                servers[-1].kill()
                servers[-1].wait()

            start()
            stack.callback(stop)
            login = {"username": "tests", "password": store_kit.SECRET_KEY, "look_for_keys": False, "allow_agent": False}
            store = FilesystemStore(f"sftp://127.0.0.1:{port}/x", {**login, **patience})
            stack.callback(store.close)
            yield store, stop, start
            return
        proxies: list[FaultProxy] = []

        def through(endpoint: str) -> str:
            proxies.append(stack.enter_context(fault_proxy(endpoint)))
            return proxies[0].url

        made: Any = open_new_folder(scheme, through)
        store = FilesystemStore(made.url, {**made.options, **patience})
        yield store, lambda: proxies[0].script(*[Refuse()] * 10_000), proxies[0].script


@pytest.mark.slow(reason="a server of each kind goes away, and is waited for")
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)  # the libraries leave broken connections
@pytest.mark.parametrize("scheme", store_kit.OTHERS)
def test_long_outage_is_one_error_within_the_retry_limits(scheme: str, tmp_path: Path) -> None:
    with store_and_server_switch(scheme) as (store, stop, start):
        write_packed(tmp_path, COUNTS)
        upload(store, tmp_path)
        dataset = RemoteDataset(None, shards_in(store), cache_bytes=0, seed=1)
        place = re.escape(store.url)
        stop()
        remedy = r".+; (no progress in|failed 3 times) .+ Check the server, or give the client (a longer timeout_s|more retries)"
        with pytest.raises(StoreError, match=rf"cannot (read|look at) {place}/[0-9a-f]{{16}}/shard-00000\d.tar(.index)?: {remedy}"):
            list(dataset)
        with pytest.raises(StoreError, match=rf"cannot write {place}/x: {remedy}"):
            store.put("x", b"x")
        with pytest.raises(StoreError, match=rf"cannot list {place}: {remedy}"):
            list(store.list_objects())
        start()
        assert sorted(labels(dataset)) == list(range(NUM_SAMPLES))
        dataset.close()


def test_library_with_its_own_retries_gets_no_more_time_than_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        async_impl, protocol = True, ("gs",)
        waits: list[float] = []  # class attribute: used by one test only

        def _strip_protocol(self, path: str) -> str:
            return path

        def invalidate_cache(self) -> None:
            pass

        def cat_ranges(self, paths: Any, starts: Any, ends: Any, *, on_error: str, timeout: float) -> Any:
            self.waits.append(timeout)
            return [bytes(end - start) for start, end in zip(starts, ends, strict=True)]

        def info(self, path: str, *data: bytes, timeout: float) -> Any:
            self.waits.append(timeout)
            raise TimeoutError

        pipe_file = info

    monkeypatch.setattr(FilesystemStore, "_opened", lambda self: Slow())
    store = FilesystemStore("gs://bucket/x", {"retries": 2, "timeout_s": 7.0})
    assert (store.options, store.retry_policy.retries) == ({}, 2)
    monkeypatch.setattr(retry, "_wait", lambda seconds: None)
    for ask in (lambda: store.head("x"), lambda: store.put("x", bytes(1 << 16))):
        with pytest.raises(StoreError, match=r"it did not answer in time; failed 3 times in"):
            ask()
    store.read_into("x", bytearray(3 << 16))
    assert [round(wait) for wait in Slow.waits] == [7, 7, 7, 8, 8, 8, 10]


def test_error_for_wrong_credentials_contains_no_credentials(tmp_path: Path) -> None:
    wrong = "d3Jvbmcga2V5IG9mIGFuIGFjY291bnQ="
    try:
        stores = [FilesystemStore("az://tests/x", store_kit.azure_options(store_kit.azure_endpoint(), wrong))]
    except LookupError:
        stores = []
    url, options = store_kit.new_folder_url("sftp")
    stores.append(FilesystemStore(url, {**options, "password": wrong}))
    for store in stores:
        with pytest.raises(StoreError, match=r"cannot read|cannot look at .*; check the credentials") as caught:
            store.head("x")
        assert wrong not in str(caught.value)


def test_url_with_a_password_is_refused() -> None:
    with pytest.raises(StoreError, match=r"contains a password: give it in client=\{'password': \.\.\.\}") as caught:
        FilesystemStore("sftp://me:secret@host/folder")
    assert "secret@" not in str(caught.value)


def test_unknown_scheme_and_missing_library_are_named_in_the_error() -> None:
    with pytest.raises(StoreError, match=r"nonsense:// is not a known kind of store"):
        FilesystemStore("nonsense://x")
    with pytest.raises(StoreError, match=r"oci:// needs a library that is not installed .*: install it"):
        FilesystemStore("oci://bucket@namespace/x")
    with pytest.raises(TypeError, match=r"gs:// takes client=\{...\}, a dict of its library's options, not int"):
        RemoteDataset.from_urls("gs://tests", client=7)
