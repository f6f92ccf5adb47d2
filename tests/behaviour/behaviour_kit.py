"""Run one program with torch's DataLoader and with ShmLoader, and compare what can be observed of both runs.

`same_as_torch(program)` calls `program(kind)` for both classes and asserts that they return the same, give the same warnings and
leave the global generators in the same state. It returns what torch's class gave, so that a test can check that as well. A program
catches exceptions that it expects with `raised`; any other exception fails the test.
"""

from __future__ import annotations

import gc
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import shmload
from shmload import ShmLoader

KINDS = pytest.mark.parametrize("kind", [DataLoader, ShmLoader])
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
DEADLINE_S = 60
# since Python 3.12 torch's own workers give this warning, and shmload's do not
FORK_WARNING = re.compile("multi-threaded, use of fork")


class ErrorSummary(NamedTuple):
    """An exception's type, and the first and last line of its text, without pids and the loader's class."""

    kind: type[BaseException]
    first: str
    last: str


def error_summary(error: BaseException) -> ErrorSummary:
    """Returns the summary of an exception, and drops its traceback, which would keep the loader's iterator in a cycle."""
    error.__traceback__ = None
    text = re.sub(r"\b(pids?(?:\(s\))?) [\d, ]*\d", r"\1 PID", str(error)).replace("ShmLoader", "DataLoader")
    lines = re.sub(r"(\\n  .*)+\\n", "...", text).splitlines() or [""]  # a traceback within a repr, on one line
    return ErrorSummary(type(error), lines[0], lines[-1])


def raised(call: Callable[[], Any]) -> ErrorSummary | None:
    """Returns the summary of the exception that `call` raises, or None."""
    try:
        call()
    except Exception as error:
        return error_summary(error)
    return None


def error_text(call: Callable[[], Any]) -> str:
    """Returns the text of the exception that `call` raises."""
    try:
        call()
    except Exception as error:
        error.__traceback__ = None
        return str(error)
    raise AssertionError("nothing was raised")


def plain(value: Any) -> Any:
    """Returns the value with lists in place of tensors and arrays, so that it can be compared and keeps no batch alive."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, BaseException):
        return error_summary(value)
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(part) for part in value)
    return value


def batches(loader: Any) -> list[Any]:
    """Returns every batch of an epoch."""
    return [plain(batch) for batch in loader]


def outcomes(stream: Iterator[Any], limit: int = 50) -> list[Any]:
    """Returns every batch or exception in turn, until the stream ends."""
    found: list[Any] = []
    for _ in range(limit):
        try:
            found.append(plain(next(stream)))
        except StopIteration as end:
            return found if end.value is None else [*found, error_summary(end)]
        except Exception as error:
            found.append(error_summary(error))
    raise AssertionError(f"no end after {limit} batches: {found[-3:]}")


def observed(program: Callable[[Any], Any], kind: Any) -> tuple[Any, list[Any], list[Any]]:
    """Returns a program's result with one kind of loader, its warnings, and random numbers drawn afterwards."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = plain(program(kind))
        gc.collect()
    given = [(w.category, text) for w in caught if not FORK_WARNING.search(text := str(w.message))]
    return result, given, [torch.rand(()).item(), np.random.rand(), random.random()]


def same_as_torch(program: Callable[[Any], Any], *, num_warnings: int = 0) -> Any:
    """Asserts that both loaders give the same observations. Returns the result of the program."""
    expected, expected_warnings, expected_draws = observed(program, DataLoader)
    assert num_warnings == len(expected_warnings), expected_warnings
    got, got_warnings, draws = observed(program, ShmLoader)
    assert expected == got
    assert expected_warnings == got_warnings
    assert expected_draws == draws
    return expected


def run_program(program: ModuleType, name: str) -> list[bytes]:
    """Returns the lines that a module prints when it is run with this argument."""
    path = os.pathsep.join(str(p) for p in (Path(shmload.__file__).parents[1], Path(__file__).parents[2]))
    command = [sys.executable, str(program.__file__), name]
    done = subprocess.run(command, capture_output=True, timeout=220, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.splitlines()


class Numbers:
    """A dataset whose sample i is i."""

    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index


class Failing(Numbers):
    """A dataset whose sample 3 raises an exception."""

    def __init__(self, error: BaseException, n: int = 8) -> None:
        super().__init__(n)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise self.error
        return index


class Shards(IterableDataset):
    """A dataset of which worker i of n yields every n-th shard from the i-th on; without workers, all shards."""

    def __init__(self, *shards: list[Any]) -> None:
        self.shards = shards

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for shard in self.shards[first::step]:
            yield from shard


class Sized(Shards):
    """The same with a length, which may be wrong."""

    def __init__(self, length: int, *shards: list[Any]) -> None:
        super().__init__(*shards)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Sized({self.length})"


def as_list(samples: Any) -> Any:
    """Collates to the list of samples, unchanged."""
    return samples
