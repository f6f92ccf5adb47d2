"""Stores in several processes and threads: children can use a store that their parent has used."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shmload.storage import filesystem_store, web_reader
from shmload.storage.retry import RetryPolicy
from shmload.storage.store import Store
from tests.storage import store_kit
from tests.storage.store_fixtures import open_new_folder

DATA = np.random.default_rng(7).bytes(200_000)
DEADLINE_S = 60


def reads_and_writes(store: Store, number: int) -> bool:
    """Reads in every way and writes; returns whether all results are correct."""
    out = bytearray(len(DATA))
    store.read_into("x", out)
    store.put(f"of {number}", b"%d" % number)
    return (
        out == bytes(store.get("x")) == DATA
        and store_kit.read_range(store, "x", 150_000, 20) == DATA[150_000:150_020]
        and store.head("x").nbytes == len(DATA)
        and f"of {number}" in [each.key for each in store.list_objects()]
    )


@pytest.fixture(params=["s3", *store_kit.OTHERS])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Returns a store that this process has used, so that it has open connections."""
    monkeypatch.setattr(web_reader, "_PART_NBYTES", 50_000)
    monkeypatch.setattr(filesystem_store, "_PART_NBYTES", 50_000)
    made: Store
    if request.param == "s3":
        made = request.getfixturevalue("server").store("tests", f"processes {os.urandom(4).hex()}")
    else:
        made = open_new_folder(request.param)
    made.put("x", DATA)
    assert reads_and_writes(made, 0)
    if request.param == "sftp":  # a retry over a new connection would hide that two processes corrupted a shared one
        made.retry_policy = RetryPolicy(retries=0)
    return made


def forked(store: Store, number: int) -> int:
    """Forks a child that uses the store; its exit status tells whether that worked. A child that hangs is ended."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(DEADLINE_S)
        status = 2
        try:
            status = 0 if reads_and_writes(store, number) else 1
        finally:
            os._exit(status)
    return pid


def test_children_and_parent_use_a_store_at_the_same_time(store: Store) -> None:
    pids = [forked(store, number) for number in range(1, 4)]
    assert all(reads_and_writes(store, 9) for _ in range(5))
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    assert reads_and_writes(store, 10)


def test_child_forked_while_threads_read_uses_the_store(store: Store) -> None:
    stop = threading.Event()

    def read() -> bool:
        fine = True
        while not stop.is_set():
            fine &= bytes(store.get("x")) == DATA
        return fine

    with ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(read) for _ in range(3)]
        pids = [forked(store, number) for number in range(4)]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        stop.set()
        assert all(reader.result() for reader in readers)
    assert statuses == [0] * 4


def test_grandchild_uses_the_store(store: Store) -> None:
    pid = os.fork()
    if pid == 0:
        signal.alarm(DEADLINE_S)
        status = 2
        try:
            status = os.waitpid(forked(store, 1), 0)[1] or (0 if reads_and_writes(store, 2) else 1)
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_threads_share_one_store(store: Store) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda number: reads_and_writes(store, number), range(24)))


def use_and_report(pickled: bytes, ends: multiprocessing.connection.Connection) -> None:
    ends.send(reads_and_writes(pickle.loads(pickled), 5))


@pytest.mark.slow(reason="a process starts as a new interpreter and imports all modules")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_process_uses_an_unpickled_store(store: Store, method: str) -> None:
    context = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    child = context.Process(target=use_and_report, args=(pickle.dumps(store), theirs))
    child.start()
    try:
        assert mine.poll(DEADLINE_S)
        assert mine.recv() is True
    finally:
        child.join(DEADLINE_S)
        mine.close()
        theirs.close()
    assert child.exitcode == 0


def test_closed_store_leaves_no_threads(store: Store) -> None:
    before = threads()
    reads_and_writes(store, 3)
    assert threads() <= before


def threads() -> set[threading.Thread]:
    """Returns this process's threads, without those of fsspec's event loop, which remain after its first use."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")}
