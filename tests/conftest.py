"""What every test here is held to: nothing of ours stays in /dev/shm, no child process stays."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import psutil
import pytest

from shmload.shm.janitor import find_leftovers
from shmload.shm.names import SHM_DIR, process_stem

DEADLINE_S = 5.0
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # they stay for the process's life


def names_in_shm() -> set[str]:
    """Our names in /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if name.removeprefix("sem.").startswith("shmload-")}


def ours_of(names: set[str]) -> set[str]:
    """Those that this process has made, or that a dead process has left: other live processes' are not ours to judge."""
    if not names:
        return names
    looks = [{path for leftover in find_leftovers(guard_s=0) for path in leftover.paths} for _ in range(2)]
    dead = looks[0] & looks[1]  # a group that is being made looks dead for a moment
    return {name for name in names if process_stem() in name or f"{SHM_DIR}/{name}" in dead}


def children() -> set[int]:
    """This process's children, multiprocessing's own helpers excepted."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if not any(name in " ".join(child.cmdline()) for name in _HELPERS):
                found.add(child.pid)
        except psutil.Error:
            pass
    return found


@pytest.fixture(autouse=True)
def shm_clean() -> Iterator[None]:
    """Names and child processes are the same after a test as before it."""
    before, alive_before = names_in_shm(), children()
    yield
    gc.collect()
    new = [psutil.Process(pid) for pid in children() - alive_before if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(new, timeout=DEADLINE_S)
    assert not alive, f"processes left: {[' '.join(p.cmdline())[:200] for p in alive]}"
    assert ours_of(names_in_shm() - before) == set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
