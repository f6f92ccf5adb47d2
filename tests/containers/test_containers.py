"""Loaders in the environments that containers create: little or no shared memory, limits, a trainer that is PID 1.

Namespaces, limits and cgroups are real. Not every machine allows a cgroup of version 2 with a memory controller, so its files are
also tested in tests/shm/test_preflight.py with file trees of other machines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from shmload.shm.names import SHM_DIR
from tests.containers import loader_program
from tests.faults.faults_kit import program_env

pytestmark = pytest.mark.slow(reason="each trainer is a process in new namespaces, and imports torch")
MIB = 1 << 20
TINY, LARGE = 1000, 4 * MIB  # bytes per sample; a ring of the second takes at least 96 MiB
DEADLINE_S = 200
# How workers start and who orders the samples do not affect each other here, so each of both is tried at least once.
METHODS_AND_SEEDS = pytest.mark.parametrize(("method", "seed"), [("fork", 1), ("fork", None), ("spawn", 1), ("forkserver", None)])


def can(*words: str) -> bool:
    return subprocess.run([*words, "true"], capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not can("unshare", "--mount"), reason="needs permission for mount namespaces")
needs_pids = pytest.mark.skipif(not can("unshare", "--mount", "--pid", "--fork"), reason="needs permission for PID namespaces")


def argument(num_workers: int = 2, seed: int | None = 1, method: str = "fork", sample_nbytes: int = TINY, action: str = "") -> str:
    return json.dumps(
        {"num_workers": num_workers, "seed": seed, "method": method, "sample_nbytes": sample_nbytes, "action": action}
    )


def run(script: str, words: str, unshare: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the program after a line of shell, in new namespaces."""
    prefix = ["unshare", *unshare] if unshare else []
    return subprocess.run(
        [*prefix, "sh", "-c", f'{script} exec "$0" "$1" "$2"', sys.executable, loader_program.__file__, words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=program_env(),
    )


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[int, list[str]]:
    """Returns the digests of an undisturbed run, by size of the samples."""
    return {size: result_of(run("", argument(sample_nbytes=size)))["digests"] for size in (TINY, LARGE)}


def shm(options: str) -> str:
    return f"mount -t tmpfs -o {options} shm {SHM_DIR} &&"


@needs_mounts
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_ring_larger_than_64_mib_of_dev_shm_delivers_the_same(expected: dict[int, list[str]], method: str) -> None:
    found = result_of(run(shm("size=64m"), argument(sample_nbytes=LARGE, method=method), ("--mount",)))
    assert expected[LARGE] == found["digests"]
    assert found["kinds"] == ["memfd", "shm"]  # the ring, and the small segments
    assert found["names"] == []


@needs_mounts
@METHODS_AND_SEEDS
def test_read_only_dev_shm_suffices(expected: dict[int, list[str]], method: str, seed: int | None) -> None:
    found = result_of(run(shm("ro,size=64m"), argument(method=method, seed=seed), ("--mount",)))
    assert len(expected[TINY]) == len(found["digests"])
    assert seed is None or expected[TINY] == found["digests"]
    assert found["kinds"] == ["memfd"]


@needs_mounts
def test_full_dev_shm_suffices(expected: dict[int, list[str]]) -> None:
    fill = f"dd if=/dev/zero of={SHM_DIR}/filler bs=1M 2>/dev/null;"
    found = result_of(run(shm("size=1m") + fill, argument(), ("--mount",)))
    assert expected[TINY] == found["digests"]
    assert found["names"] == []


@needs_mounts
@pytest.mark.parametrize("options", ["size=64m", "ro,size=64m"])
def test_killed_worker_is_replaced_with_little_dev_shm(expected: dict[int, list[str]], options: str) -> None:
    found = result_of(run(shm(options), argument(action="kill"), ("--mount",)))
    assert expected[TINY] == found["digests"]


@needs_pids
@pytest.mark.parametrize("options", [("--mount-proc",), ("--mount",)], ids=["its own /proc", "the host's /proc"])
@pytest.mark.parametrize("room", ["size=64m", "ro,size=64m"])
def test_trainer_can_be_pid_1(expected: dict[int, list[str]], options: tuple[str, ...], room: str) -> None:
    found = result_of(run(shm(room), argument(action="kill"), ("--pid", "--fork", *options)))
    assert found["pid"] == 1
    assert expected[TINY] == found["digests"]
    assert found["zombies"] == 0
    assert found["names"] == []


@needs_pids
def test_trainer_that_is_pid_1_ends_cleanly_by_its_sigterm_handler() -> None:
    found = result_of(run("", argument(action="term"), ("--pid", "--fork", "--mount-proc")))
    assert (found["stopped"], len(found["digests"]), found["zombies"]) == (True, 2, 0)


@METHODS_AND_SEEDS
def test_64_descriptors_suffice_for_a_few_workers(expected: dict[int, list[str]], method: str, seed: int | None) -> None:
    found = result_of(run("ulimit -n 64 &&", argument(method=method, seed=seed, action="kill" if seed else "")))
    assert len(expected[TINY]) == len(found["digests"])
    assert seed is None or expected[TINY] == found["digests"]


def test_too_few_descriptors_are_a_clear_error_that_leaves_nothing() -> None:
    done = run("ulimit -n 64 &&", argument(num_workers=40))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "Too many open files" in last, done.stderr


def cgroup() -> tuple[Path, str] | None:
    """Makes a cgroup with a memory controller. Returns its folder and the name of its limit, or None."""
    for top, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(top, f"shmload-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists():
            return folder, limit
        folder.rmdir()
    return None


@pytest.fixture
def limited() -> Iterator[str]:
    """Returns a line of shell that enters a cgroup of 600 MiB."""
    made = cgroup()
    if made is None:
        pytest.skip("needs permission to make a cgroup with a memory controller")
    folder, limit = made
    (folder / limit).write_text(str(600 * MIB))
    yield f"echo $$ > {folder}/cgroup.procs &&"
    until, pause = monotonic() + DEADLINE_S, threading.Event()
    while True:  # the program's resource tracker ends a little later
        try:
            folder.rmdir()
            return
        except OSError:
            assert monotonic() < until, (folder / "cgroup.procs").read_text()
            pause.wait(0.02)


def test_ring_that_fits_into_a_cgroup_delivers_the_same(limited: str, expected: dict[int, list[str]]) -> None:
    assert expected[TINY] == result_of(run(limited, argument()))["digests"]


@pytest.mark.parametrize("place", ["", "ro"])
def test_ring_that_does_not_fit_into_a_cgroup_is_an_error_and_not_killed(limited: str, place: str) -> None:
    if place and not can("unshare", "--mount"):
        pytest.skip("needs permission for mount namespaces")
    script = (shm("ro,size=64m") if place else "") + limited
    done = run(script, argument(sample_nbytes=40 * MIB), ("--mount",) if place else ())
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("shmload.errors.RingTooSmall: the ring needs "), done.stderr
    assert " bytes are available" in last
    assert "Lower prefetch_factor, num_workers or batch_size" in last
