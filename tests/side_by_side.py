"""Lets several pytest processes run on one host (also by `pytest -n`): each has its own /dev/shm, and the tests of a file stay in
one process.

Tests check the content of /dev/shm, and some look for groups without an owner and remove them; in a shared /dev/shm they would
find each other's. So each process gets a mount namespace with its own /dev/shm. This requires root; otherwise tests run one after
another, in the common /dev/shm.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


def can_own_shared_memory() -> bool:
    """Returns whether a process may have its own /dev/shm on this machine."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def own_shared_memory() -> None:
    """Mounts an empty tmpfs over /dev/shm for this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result:
            problem = os.strerror(ctypes.get_errno())
            pytest.exit(f"tests in parallel need a /dev/shm each, which takes root ({problem}); run them without -n", 4)

    checked(libc.unshare(_CLONE_NEWNS))
    checked(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    checked(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777"))


def keep_together(items: list[pytest.Item]) -> None:
    """Assigns a file's quick tests to one process, and its slow ones to one, because they share fixtures. All tests with a store
    share its server.
    """
    for item in items:
        place = "stores" if item.path.parent.name in ("packing", "remote", "storage") else item.path
        slow = "/slow" if item.get_closest_marker("slow") else ""
        item.add_marker(pytest.mark.xdist_group(f"{place}{slow}"))
