"""Cgroups, read from file trees as on other machines: limits in containers, hybrid hierarchies and nested groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmload.shm import cgroups, names

MIB = 1 << 20


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_containers_cgroup_is_mounted_at_the_root(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/not-to-be-seen-here",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 64 * MIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 16 * MIB,
            "sys/fs/cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {MIB}",
        },
    )
    (found,) = cgroups.memory_cgroups(root)
    assert (found.version, found.limit, found.used, found.rest) == (1, 64 * MIB, 16 * MIB, 49 * MIB)


def test_both_versions_of_a_hybrid_hierarchy_are_read(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a\n0::/b",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 64 * MIB,
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": 0,
            "sys/fs/cgroup/unified/b/memory.max": 32 * MIB,
            "sys/fs/cgroup/unified/b/memory.current": 40 * MIB,
        },
    )
    assert [(found.version, found.rest) for found in cgroups.memory_cgroups(root)] == [(1, 64 * MIB), (2, 0)]


def test_v1_value_for_unlimited_is_none(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 1,
        },
    )
    assert cgroups.memory_cgroups(root) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "0::/pod/job",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000",
                "sys/fs/cgroup/pod/job/cpu.max": "max 100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
            },
            None,
        ),
    ],
)
def test_cpu_quota_is_read(tmp_path: Path, files: dict[str, object], expected: float | None) -> None:
    assert expected == cgroups.cpu_limit(tree(tmp_path, files))


def test_pid_under_proc_is_read_from_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.readlink", lambda path: "4711")  # as in a PID namespace with an outer namespace's /proc
    assert names.proc_self() == "/proc/4711"


def test_pid_is_used_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr("os.readlink", refuse)
    monkeypatch.setattr("os.getpid", lambda: 12)
    assert names.proc_self() == "/proc/12"
