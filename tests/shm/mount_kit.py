"""Runs programs in their own mount namespace with a small /dev/shm. Requires root."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shmload.shm.names import SHM_DIR

READ_ONLY = f"mount -t tmpfs -o ro,size=64m shm {SHM_DIR}"
can_unshare = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
needs_unshare = pytest.mark.skipif(not can_unshare, reason="mount namespaces are not permitted here")


def of_size(size: str) -> str:
    """Returns the command that mounts a tmpfs of this size over /dev/shm."""
    return f"mount -t tmpfs -o size={size} shm {SHM_DIR}"


def in_mount_namespace(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments in a mount namespace that `script` has prepared."""
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{script} && exec "$0" "$@"', sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
