"""Loaders inside what containers make of a host: little or no shared memory, limits, a trainer that is PID 1.

The namespaces, limits and cgroups are the kernel's own. A cgroup of version 2 with a memory controller is not to be had on every
machine; how its files are read is tested in tests/shm/test_preflight.py from trees of other machines.
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

pytestmark = pytest.mark.slow(reason="each trainer is a process in namespaces of its own, and imports torch")
MIB = 1 << 20
TINY, LARGE = 1000, 4 * MIB  # bytes a sample; a ring of the second takes 96 MiB and more
DEADLINE_S = 200


def can(*words: str) -> bool:
    return subprocess.run([*words, "true"], capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not can("unshare", "--mount"), reason="mount namespaces are not permitted here")
needs_pids = pytest.mark.skipif(not can("unshare", "--mount", "--pid", "--fork"), reason="PID namespaces are not permitted here")


def argument(num_workers: int = 2, seed: int | None = 1, method: str = "fork", sample_nbytes: int = TINY, action: str = "") -> str:
    return json.dumps(
        {"num_workers": num_workers, "seed": seed, "method": method, "sample_nbytes": sample_nbytes, "action": action}
    )


def run(script: str, words: str, unshare: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the program behind a line of shell, in namespaces of its own."""
    prefix = ["unshare", *unshare] if unshare else []
    return subprocess.run(
        [*prefix, "sh", "-c", f'{script} exec "$0" "$1" "$2"', sys.executable, loader_program.__file__, words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=program_env(),
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[int, list[str]]:
    """The digests of an undisturbed run, by the samples' size."""
    return {size: told(run("", argument(sample_nbytes=size)))["digests"] for size in (TINY, LARGE)}


def shm(options: str) -> str:
    return f"mount -t tmpfs -o {options} shm {SHM_DIR} &&"


@needs_mounts
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_in_64_mib_of_dev_shm_a_larger_ring_delivers_the_same(expected: dict[int, list[str]], method: str) -> None:
    found = told(run(shm("size=64m"), argument(sample_nbytes=LARGE, method=method), ("--mount",)))
    assert expected[LARGE] == found["digests"]
    assert found["kinds"] == ["memfd", "shm"]  # the ring; what is small
    assert found["names"] == []


@needs_mounts
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("seed", [1, None])
def test_a_read_only_dev_shm_is_enough(expected: dict[int, list[str]], method: str, seed: int | None) -> None:
    found = told(run(shm("ro,size=64m"), argument(method=method, seed=seed), ("--mount",)))
    assert len(expected[TINY]) == len(found["digests"])
    assert seed is None or expected[TINY] == found["digests"]
    assert found["kinds"] == ["memfd"]


@needs_mounts
def test_a_full_dev_shm_is_enough(expected: dict[int, list[str]]) -> None:
    fill = f"dd if=/dev/zero of={SHM_DIR}/filler bs=1M 2>/dev/null;"
    found = told(run(shm("size=1m") + fill, argument(), ("--mount",)))
    assert expected[TINY] == found["digests"]
    assert found["names"] == []


@needs_mounts
@pytest.mark.parametrize("options", ["size=64m", "ro,size=64m"])
def test_a_killed_worker_is_replaced_there_too(expected: dict[int, list[str]], options: str) -> None:
    found = told(run(shm(options), argument(action="kill"), ("--mount",)))
    assert expected[TINY] == found["digests"]


@needs_pids
@pytest.mark.parametrize("options", [("--mount-proc",), ("--mount",)], ids=["its own /proc", "the host's /proc"])
@pytest.mark.parametrize("room", ["size=64m", "ro,size=64m"])
def test_a_trainer_can_be_pid_1(expected: dict[int, list[str]], options: tuple[str, ...], room: str) -> None:
    found = told(run(shm(room), argument(action="kill"), ("--pid", "--fork", *options)))
    assert found["pid"] == 1
    assert expected[TINY] == found["digests"]
    assert found["zombies"] == 0
    assert found["names"] == []


@needs_pids
def test_a_trainer_that_is_pid_1_ends_orderly_on_sigterm_if_it_has_a_handler() -> None:
    found = told(run("", argument(action="term"), ("--pid", "--fork", "--mount-proc")))
    assert (found["stopped"], len(found["digests"]), found["zombies"]) == (True, 2, 0)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("seed", [1, None])
def test_64_descriptors_are_enough_for_a_few_workers(expected: dict[int, list[str]], method: str, seed: int | None) -> None:
    found = told(run("ulimit -n 64 &&", argument(method=method, seed=seed, action="kill" if seed else "")))
    assert len(expected[TINY]) == len(found["digests"])
    assert seed is None or expected[TINY] == found["digests"]


def test_too_few_descriptors_are_an_error_that_says_so_and_nothing_stays() -> None:
    done = run("ulimit -n 64 &&", argument(num_workers=40))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "Too many open files" in last, done.stderr


def cgroup() -> tuple[Path, str] | None:
    """A new cgroup with a memory controller and the name of its limit; None where none can be made."""
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
    """A line of shell that enters a cgroup of 600 MiB."""
    made = cgroup()
    if made is None:
        pytest.skip("no cgroup with a memory controller can be made here")
    folder, limit = made
    (folder / limit).write_text(str(600 * MIB))
    yield f"echo $$ > {folder}/cgroup.procs &&"
    until, pause = monotonic() + DEADLINE_S, threading.Event()
    while True:  # the program's resource tracker ends a little after it
        try:
            folder.rmdir()
            return
        except OSError:
            assert monotonic() < until, (folder / "cgroup.procs").read_text()
            pause.wait(0.02)


def test_in_a_cgroup_a_ring_that_fits_delivers_the_same(limited: str, expected: dict[int, list[str]]) -> None:
    assert expected[TINY] == told(run(limited, argument()))["digests"]


@pytest.mark.parametrize("place", ["", "ro"])
def test_in_a_cgroup_a_ring_that_does_not_fit_is_refused_and_not_killed(limited: str, place: str) -> None:
    if place and not can("unshare", "--mount"):
        pytest.skip("mount namespaces are not permitted here")
    script = (shm("ro,size=64m") if place else "") + limited
    done = run(script, argument(sample_nbytes=40 * MIB), ("--mount",) if place else ())
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("shmload.errors.RingTooSmall: the ring needs "), done.stderr
    assert " bytes are available" in last
    assert "Lower prefetch_factor, num_workers or batch_size" in last
