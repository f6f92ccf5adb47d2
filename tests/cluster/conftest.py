"""A real Ray cluster of two nodes for all tests of this folder.

Ray wants the machine's own address; where that is of no use, run these tests in a network of their own:

    unshare -rn sh -c 'ip link set lo up; python -m pytest tests/cluster'

Where it may be, the nodes have a /dev/shm and a /proc of their own, as another machine has: what was only shared here is not found
there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from tests.cluster.cluster_kit import Cluster

START_S = 60
ELSEWHERE = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
OWN_MEMORY = 'mount -t tmpfs -o mode=1777 shm /dev/shm && exec "$@"'


def elsewhere() -> list[str]:
    """What a command begins with to run as on another machine; nothing where that is not permitted."""
    begin = [*ELSEWHERE, "sh", "-c", OWN_MEMORY, "sh"]
    is_permitted = subprocess.run([*begin, "true"], capture_output=True).returncode == 0
    return begin if is_permitted else []


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip('Ray is not installed: pip install "shmload[ray]"')
    folder = tempfile.mkdtemp(
        prefix="ray", dir="/tmp"
    )  # sockets lie in it: a longer path would not fit their addresses
    host = str(Path(__file__).with_name("ray_host.py"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([path for path in sys.path if path]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": folder,  # where the address of the newest cluster is written, whatever temp_dir says
    }
    os.mkdir(f"{folder}/ray")
    try:
        with Listener(f"{folder}/host", "AF_UNIX") as listener, open(f"{folder}/log", "wb") as log:
            command = ["setsid", "--fork", *elsewhere(), sys.executable, host, f"{folder}/host", folder]
            subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]  # it has no timeout of its own
            try:
                connection = listener.accept()
            except TimeoutError:
                pytest.fail(f"the Ray cluster has not started: {Path(folder, 'log').read_text()[-2000:]}")
        with connection:
            assert connection.poll(START_S), Path(folder, "log").read_text()[-2000:]
            try:
                running = Cluster(connection)
            except EOFError:
                pytest.fail(f"the Ray cluster has ended: {Path(folder, 'log').read_text()[-2000:]}")
            yield running
            connection.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, in which a test leaves no actor."""
    yield running_cluster
    assert running_cluster.ask("wait_for_none", 10.0) == []
