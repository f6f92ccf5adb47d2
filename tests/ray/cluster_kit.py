"""What the tests of a worker pool of Ray actors share."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmload import Ray, ShmLoader

START_S = 120
ELSEWHERE = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
SHARED_MEMORY = 'exec "$@"'
OWN_MEMORY = 'mount -t tmpfs -o mode=1777 shm /dev/shm && exec "$@"'


class Cluster:
    """The tests' end of `ray_host.py`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.address: str = connection.recv()

    def ask(self, name: str, *arguments: Any) -> Any:
        """What a command of the host gives."""
        self._connection.send((name, arguments))
        return self._connection.recv()


def elsewhere(memory: str = OWN_MEMORY) -> list[str]:
    """What a command begins with to run as on another machine, or in a container that shares /dev/shm; nothing where that is not
    permitted."""
    begin = [*ELSEWHERE, "sh", "-c", memory, "sh"]
    is_permitted = subprocess.run([*begin, "true"], capture_output=True).returncode == 0
    return begin if is_permitted else []


@contextmanager
def started(program: str = "ray_host.py", memory: str = OWN_MEMORY) -> Iterator[Cluster]:
    """A real Ray cluster of two nodes, or what another program starts, until the block ends.

    Where it may be, the nodes have a /dev/shm and a /proc of their own, as another machine has: what was only shared here is not
    found there.

    Args:
        memory: SHARED_MEMORY: they have this machine's /dev/shm, as the nodes of one machine have.
    Raises:
        RuntimeError: it has not started, or has ended; with its last words.
    """
    # sockets lie in it: a longer path would not fit their addresses
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    host = str(Path(__file__).with_name(program))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([path for path in sys.path if path]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": folder,  # where the address of the newest cluster is written, whatever temp_dir says
    }
    os.mkdir(f"{folder}/ray")
    end, held = os.pipe()  # the host holds it for as long as it lives
    try:
        with Listener(f"{folder}/host", "AF_UNIX") as listener, open(f"{folder}/log", "wb") as log:
            command = ["setsid", "--fork", *elsewhere(memory), sys.executable, host, f"{folder}/host", folder]
            try:
                subprocess.run(command, env=environment, stdout=log, stderr=log, check=True, pass_fds=[held])
            finally:
                os.close(held)
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]  # it has no timeout of its own
            try:
                connection = listener.accept()
                if not connection.poll(START_S):
                    raise TimeoutError
                cluster = Cluster(connection)
            except (TimeoutError, EOFError) as error:
                last = Path(folder, "log").read_text()[-2000:]
                raise RuntimeError(f"the Ray cluster has not started within {START_S} s, or has ended: {last}") from error
        with connection:
            yield cluster
    finally:
        select.select([end], [], [], START_S)  # Ray writes to the folder until then
        os.close(end)
        shutil.rmtree(folder, ignore_errors=True)


def on(cluster: Cluster, **options: Any) -> dict[str, Any]:
    """Return a loader's arguments for actors on this cluster.

    Args:
        options: other options of `shmload.Ray`.
    """
    return {"backend": Ray(address=cluster.address, **options)}


def kill_worker(loader: ShmLoader[Any], worker: int) -> None:
    """Ends the process that stands for a worker of a loader that has begun: an actor's is the agent."""
    engine = loader._builder.last
    assert engine is not None
    os.kill(engine.pool.pids[worker], signal.SIGKILL)


def assert_same(expected: Any, got: Any) -> None:
    """Batches are alike to the last bit, in type, structure and values."""
    assert type(expected) is type(got)
    if isinstance(expected, torch.Tensor):
        assert expected.dtype == got.dtype
        assert torch.equal(expected, got)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(expected, got, strict=True)
    elif isinstance(expected, dict):
        assert list(expected) == list(got)
        assert_same(list(expected.values()), list(got.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            assert_same(one, other)
    else:
        assert expected == got


def kept(loader: Any) -> list[Any]:
    """Copies of all batches: the batches themselves would keep their slots."""
    return [deepcopy(batch) for batch in loader]


def generator() -> torch.Generator:
    """The same order and base seed each time."""
    return torch.Generator().manual_seed(5)
