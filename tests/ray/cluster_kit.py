"""Helpers for the tests of Ray actors as workers."""

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
    """A connection to the Ray cluster that `ray_host.py` runs."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.address: str = connection.recv()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Runs a command of `ray_host.py` and returns its result."""
        self._connection.send((name, arguments))
        return self._connection.recv()


def other_machine_command(memory: str = OWN_MEMORY) -> list[str]:
    """Returns the beginning of a command that runs as on another machine, or in a container that shares /dev/shm; empty if not
    permitted.
    """
    begin = [*ELSEWHERE, "sh", "-c", memory, "sh"]
    is_permitted = subprocess.run([*begin, "true"], capture_output=True).returncode == 0
    return begin if is_permitted else []


@contextmanager
def started(program: str = "ray_host.py", memory: str = OWN_MEMORY) -> Iterator[Cluster]:
    """Runs a real Ray cluster of two nodes (or `program`) until the block ends.

    Where namespaces are permitted, the nodes get their own /dev/shm and /proc, as on other machines, so that a test fails if data
    that is only shared on this machine is expected there.

    Args:
        program: the program in this folder that runs the cluster.
        memory: with SHARED_MEMORY, the nodes use this machine's /dev/shm.
    Raises:
        RuntimeError: the cluster did not start, or ended; the message has its last output.
    """
    # a short path, because Ray puts UNIX sockets there and their addresses are limited to about 100 bytes
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    host = str(Path(__file__).with_name(program))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([path for path in sys.path if path]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": folder,  # Ray writes the address of the newest cluster there, regardless of temp_dir
    }
    os.mkdir(f"{folder}/ray")
    end, held = os.pipe()  # the host keeps its end open as long as it lives
    try:
        with Listener(f"{folder}/host", "AF_UNIX") as listener, open(f"{folder}/log", "wb") as log:
            command = ["setsid", "--fork", *other_machine_command(memory), sys.executable, host, f"{folder}/host", folder]
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
        select.select([end], [], [], START_S)  # Ray writes to the folder until the host has ended
        os.close(end)
        shutil.rmtree(folder, ignore_errors=True)


def on(cluster: Cluster, **options: Any) -> dict[str, Any]:
    """Return a loader's arguments for actors on this cluster.

    Args:
        options: other options of `shmload.Ray`.
    """
    return {"backend": Ray(address=cluster.address, **options)}


def kill_worker(loader: ShmLoader[Any], worker: int) -> None:
    """Kills the process that serves a worker of a running loader: for an actor, this is the agent."""
    engine = loader._builder.last
    assert engine is not None
    os.kill(engine.pool.pids[worker], signal.SIGKILL)


def assert_same(expected: Any, got: Any) -> None:
    """Asserts that batches are equal bit for bit, in type, structure and values."""
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


def copied_batches(loader: Any) -> list[Any]:
    """Returns copies of all batches, because the batches themselves would keep their slots."""
    return [deepcopy(batch) for batch in loader]


def generator() -> torch.Generator:
    """Returns a generator with a fixed seed: the same order and base seed each time."""
    return torch.Generator().manual_seed(5)
