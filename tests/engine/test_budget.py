"""Limits of "auto": processors by affinity, quota and ranks, memory by what is free; and the integer type of tuned values."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path

import pytest

from shmload.engine.tuning import tuning_limits
from shmload.engine.tuning.auto_number import AutoNumber, is_auto

NUM_CPUS = len(os.sched_getaffinity(0))


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> int:
    """Simulates 24 processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)))
    return 24


def machine(tmp_path: Path, *, quota: str = "max", free_kib: int = 1 << 20) -> Path:
    """Writes the file tree of a machine with one cgroup."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {free_kib} kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{quota} 100000\n")
    return tmp_path


def test_processors_are_those_of_the_affinity(tmp_path: Path) -> None:
    assert tuning_limits.num_cpus(machine(tmp_path), {}) == NUM_CPUS


@pytest.mark.parametrize(("quota", "count"), [("max", 24), ("600000", 6), ("650000", 6), ("50000", 1)])
def test_cgroup_quota_is_rounded_down_to_whole_processors(tmp_path: Path, cpus: int, quota: str, count: int) -> None:
    assert count == tuning_limits.num_cpus(machine(tmp_path, quota=quota), {})


@pytest.mark.parametrize(
    ("own", "quota", "count"),
    [("24", "max", 24), ("30", "max", 24), ("24", "2000000", 5), ("6", "max", 6), ("", "max", 6), ("?", "max", 6)],
)
def test_rank_with_its_own_processors_uses_all_of_them(tmp_path: Path, cpus: int, own: str, quota: str, count: int) -> None:
    """Divides a shared quota, and divides all processors again if the affinity no longer is the one that `shmload.launch` set."""
    root, environ = machine(tmp_path, quota=quota), {"LOCAL_WORLD_SIZE": "4", "SHMLOAD_RANK_CPUS": own}
    assert count == tuning_limits.num_cpus(root, environ)


@pytest.mark.parametrize(("ranks", "count"), [("", 24), ("4", 6), ("5", 4), ("100", 1), ("0", 24), ("many", 24)])
def test_ranks_on_one_node_divide_processors_and_memory(tmp_path: Path, cpus: int, ranks: str, count: int) -> None:
    root, environ = machine(tmp_path), {"LOCAL_WORLD_SIZE": ranks}
    assert count == tuning_limits.most_workers(root, environ)
    divisor = int(ranks) if ranks.isdecimal() and int(ranks) else 1
    assert (1 << 30) // divisor // 4 == tuning_limits.ring_budget(None, 0, root, environ)


@pytest.mark.parametrize(("first", "count"), [("3", 3), ("100", 100)])
def test_environment_variable_sets_the_number_of_workers(tmp_path: Path, cpus: int, first: str, count: int) -> None:
    root, environ = machine(tmp_path), {"SHMLOAD_MAX_WORKERS": first}
    assert count == tuning_limits.most_workers(root, environ) == tuning_limits.fixed_workers(root, environ)
    assert min(count, 4) == tuning_limits.first_workers(root, environ)


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5"])
def test_invalid_limit_is_an_error(given: str) -> None:
    words = (
        rf"SHMLOAD_MAX_WORKERS must be an integer of at least 1, the most workers that num_workers=\"auto\" takes; got '{given}'"
    )
    with pytest.raises(ValueError, match=words):
        tuning_limits.most_workers(environ={"SHMLOAD_MAX_WORKERS": given})


@pytest.mark.parametrize(("count", "fixed", "first"), [(1, 1, 1), (2, 1, 1), (4, 3, 2), (8, 7, 4), (64, 16, 4)])
def test_first_and_fixed_numbers_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, fixed: int, first: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))
    root = machine(tmp_path)
    assert fixed == tuning_limits.fixed_workers(root, {})
    assert first == tuning_limits.first_workers(root, {})


def test_ring_may_use_a_quarter_of_free_memory_including_its_own(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert tuning_limits.ring_budget(None, 0, root, {}) == (1 << 30) // 4
    assert tuning_limits.ring_budget(None, 400, root, {}) == ((1 << 30) + 400) // 4
    assert tuning_limits.ring_budget(12345, 400, root, {}) == 12345


def test_tuned_number_behaves_as_an_int() -> None:
    number = AutoNumber(4)
    assert number == 4
    assert number * 2 == 8
    assert f"{number} {number:2d} {[number]}" == "4  4 [auto (4)]"
    assert json.dumps(number) == "4"
    for again in (copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        assert is_auto(again)
        assert again == 4


@pytest.mark.parametrize(("value", "is_one"), [("auto", True), (AutoNumber(2), True), (2, False), (None, False), ("a", False)])
def test_is_auto(value: object, is_one: bool) -> None:
    assert is_one == is_auto(value)
