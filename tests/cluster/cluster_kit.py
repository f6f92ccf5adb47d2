"""What the tests of a crew of Ray actors share."""

from __future__ import annotations

import os
import signal
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from shmload import ShmLoader


class Cluster:
    """The tests' end of `ray_host.py`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.address: str = connection.recv()

    def ask(self, name: str, *arguments: Any) -> Any:
        """What a command of the host gives."""
        self._connection.send((name, arguments))
        return self._connection.recv()


def kill_worker(loader: ShmLoader[Any], worker: int) -> None:
    """Ends the process that stands for a worker of a loader that has begun: an actor's is the agent."""
    engine = loader._last_engine
    assert engine is not None
    os.kill(engine.crew.pids[worker], signal.SIGKILL)


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
