"""What lets several pytest processes share a host (`pytest -n`): each has a /dev/shm of its own, and each file's tests stay together.

Tests here ask what lies in /dev/shm, and some look for groups without an owner and remove them; beside one another they would find
each other's. So every one of pytest-xdist's processes gets a mount namespace with a /dev/shm that only its own children see. That
takes root; without it tests run one after the other.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


def can_own_shared_memory() -> bool:
    """Whether a process may have a /dev/shm of its own here."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def own_shared_memory() -> None:
    """Puts an empty tmpfs over /dev/shm, for this process and those it starts."""
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result:
            problem = os.strerror(ctypes.get_errno())
            pytest.exit(f"tests in parallel need a /dev/shm each, which takes root ({problem}); run them without -n", 4)

    checked(libc.unshare(_CLONE_NEWNS))
    checked(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    checked(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777"))


def keep_together(items: list[pytest.Item]) -> None:
    """A file's quick tests go to one process, and its slow ones to one: they share fixtures. All that need a store share its server."""
    for item in items:
        place = "stores" if item.path.parent.name in ("packing", "remote", "storage") else item.path
        slow = "/slow" if item.get_closest_marker("slow") else ""
        item.add_marker(pytest.mark.xdist_group(f"{place}{slow}"))
