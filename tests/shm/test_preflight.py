"""The amount of available memory, read from file trees as on other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmload.errors import RingTooSmall
from shmload.shm.free_memory import available_bytes, check_fits

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {64 * 1024} kB\nMemAvailable: {32 * 1024} kB\n"}


def test_without_a_cgroup_free_memory_counts(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path, MEMINFO)) == 32 * MIB


def test_v2_limit_minus_unreclaimable_usage_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/pod/job\n",
            "sys/fs/cgroup/pod/job/memory.max": str(10 * MIB),
            "sys/fs/cgroup/pod/job/memory.current": str(6 * MIB),
            "sys/fs/cgroup/pod/job/memory.stat": f"anon 1\ninactive_file {2 * MIB}\n",
        },
    )
    assert available_bytes(root) == 6 * MIB


def test_v2_limit_of_a_parent_counts_too(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/pod/job\n",
            "sys/fs/cgroup/pod/job/memory.max": "max",
            "sys/fs/cgroup/pod/job/memory.current": "0",
            "sys/fs/cgroup/pod/memory.max": str(3 * MIB),
            "sys/fs/cgroup/pod/memory.current": str(MIB),
        },
    )
    assert available_bytes(root) == 2 * MIB


def test_v1_limit_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(8 * MIB),
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": str(7 * MIB),
        },
    )
    assert available_bytes(root) == MIB


def test_ring_larger_than_memory_is_refused_with_figures(tmp_path: Path) -> None:
    with pytest.raises(RingTooSmall) as caught:
        check_fits(80 * MIB, (8, 10 * MIB), tree(tmp_path, MEMINFO))
    assert f"needs {80 * MIB} bytes, 8 slots of {10 * MIB}" in str(caught.value)
    assert f"only {32 * MIB} bytes are available, enough for 3 slots" in str(caught.value)
    assert "Lower prefetch_factor" in str(caught.value)
