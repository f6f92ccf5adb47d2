"""Lets several pytest processes run on one host (also by `pytest -n`): each has its own /dev/shm, and tests that share fixtures
stay in one process.

Tests check the content of /dev/shm, and some look for groups without an owner and remove them; in a shared /dev/shm they would
find each other's. So each process gets a mount namespace with its own /dev/shm. This requires root; otherwise tests run one after
another, in the common /dev/shm.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

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


class KeptTogether(LoadScopeScheduling):
    """Assigns tests that share fixtures to one process: those of a file, and all with a store, which share its server.

    xdist's own groups by markers have no effect since pytest 9. If slow tests run, those of files without a fixture that outlives a
    test are divided among the processes, since a file may take minutes.
    """

    def __init__(self, config: pytest.Config, log: Any, divides_files: bool) -> None:
        super().__init__(config, log)
        self._divides_files, self._root = divides_files, config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        path = self._root / nodeid.partition("::")[0]
        if path.parent.name in ("packing", "remote", "storage"):
            return "stores"
        return nodeid if self._divides_files and not has_lasting_fixtures(path) else str(path)


@cache
def has_lasting_fixtures(path: Path) -> bool:
    """Returns whether a file of tests, or the conftest.py beside it, has a fixture that outlives a test."""
    return any(
        re.search(r"""scope=["'](?!function)""", each.read_text())
        for each in (path, path.with_name("conftest.py"))
        if each.exists()
    )
