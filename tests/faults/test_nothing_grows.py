"""Descriptors, mappings, threads, children and memory do not grow over many epochs, breaks, engines and deaths."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator

import psutil
import pytest

from shmload import ShmLoader
from tests.faults.faults_kit import COLLATE, DATASETS, FaultFolder, Rows

pytestmark = pytest.mark.slow(reason="runs many epochs, breaks or engines")
TIMES = 50
SLACK_BYTES = 8 << 20


def footprint() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/maps") as file:
        maps = sum("shmload" in line for line in file)
    return {"fds": len(os.listdir("/proc/self/fd")), "maps": maps, "threads": threading.active_count()}


def loader_of(kind: str, *, seed: int | None = 3, **options: object) -> ShmLoader:
    return ShmLoader(DATASETS[kind](16), batch_size=4, seed=seed, num_workers=2, collate_fn=COLLATE.get(kind), **options)


def epochs(kind: str, seed: int | None) -> Iterator[None]:
    with loader_of(kind, seed=seed, persistent_workers=True) as loader:
        for _ in range(TIMES + 5):
            for _ in loader:
                pass
            yield


def breaks(kind: str, seed: int | None) -> Iterator[None]:
    with loader_of(kind, seed=seed, persistent_workers=True) as loader:
        for i in range(TIMES + 5):
            for step, _ in enumerate(loader):
                if step == i % 3:
                    break
            yield


def engines(kind: str, seed: int | None) -> Iterator[None]:
    for i in range(TIMES + 5):
        with loader_of(kind, seed=seed) as loader:
            for step, _ in enumerate(loader):
                if step == i % 3:
                    break
        yield


@pytest.mark.parametrize("kind", ["rows", "texts"])
@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("what", [epochs, breaks, engines])
def test_nothing_grows(what: Callable[[str, int | None], Iterator[None]], seed: int | None, kind: str) -> None:
    process = psutil.Process()
    before = after = (footprint(), 0)
    for i, _ in enumerate(what(kind, seed)):
        if i == 4:
            before = (footprint(), process.memory_info().rss)
        if i == TIMES + 4:
            after = (footprint(), process.memory_info().rss)
    assert before[0] == after[0]
    assert after[1] - before[1] < SLACK_BYTES


def test_nothing_grows_with_deaths(fault_folder: FaultFolder) -> None:
    with ShmLoader(Rows(400), batch_size=4, seed=3, num_workers=2) as loader:
        before = None
        quiet_for = 0
        while fault_folder.num_triggered < 30:
            for _ in loader:
                quiet_for = 0 if fault_folder.num_armed else quiet_for + 1
                if quiet_for >= 6:
                    quiet_for = 0
                    fault_folder.arm("mid_decode", signal.SIGKILL)
            if before is None:
                before = footprint()
        next(iter(loader))
        assert before == footprint()


def test_forked_child_that_closes_the_loader_does_not_affect_it() -> None:
    loaders = [ShmLoader(Rows(40), batch_size=4, seed=seed, num_workers=2) for seed in (3, None)]
    streams = [iter(loader) for loader in loaders]
    for stream in streams:
        next(stream)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for loader in loaders:
                loader._builder.last.close()
                loader.close()
            status = 0
        finally:
            os._exit(status)
    assert (pid, 0) == os.waitpid(pid, 0)
    for stream in streams:
        assert sum(1 for _ in stream) == 9
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("seed", [3, None])
def test_dataset_is_freed_with_its_loader_without_the_garbage_collector(seed: int | None, persistent_workers: bool) -> None:
    gc.collect()
    gc.disable()  # a large dataset must not stay until the collector happens to run
    try:
        dataset = Rows(16)
        alive = weakref.ref(dataset)
        loader = ShmLoader(dataset, batch_size=4, seed=seed, num_workers=2, persistent_workers=persistent_workers)
        del dataset
        for step, batch in enumerate(loader):  # noqa: B007  # a batch outlives the loader
            if step == 1:
                break
        del loader
        assert alive() is None
        del batch
    finally:
        gc.enable()
