"""Constructed snapshots, and programs with loaders (live_program.py) that are observed from outside."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from shmload.tools.top.watch import Watch
from tests.faults.faults_kit import DEADLINE_S, await_readable, program_env
from tests.top import live_program

SECOND = 1_000_000_000


def snapshot_with(at_s: float = 10.0, **words: Any) -> dict[str, Any]:
    found = {
        "time_ns": int(at_s * SECOND),
        "owner_pid": 42,
        "owner_start_ns": 0,
        "is_static": False,
        "control_nbytes": 4096,
        "is_packed": False,
        "is_closing": False,
        "awaited": 0,
        "num_steps": 0,
        "step_stride": 1,
        "rank": 0,
        "world_size": 1,
        "dataset_name": "Rows",
        "read_path": "read_into",
        "generation": 0,
        "workers": [worker(), worker()],
        "slots": [slot() for _ in range(4)],
        **dict.fromkeys(("batches", "samples", "nbytes", "wait_ns", "waiting_since_ns", "num_waits", "num_copied_out"), 0),
        **dict.fromkeys(("num_grown", "num_restarts", "num_bad_samples", "epoch", "step"), 0),
        **words,
    }
    num_workers = len(found["workers"])
    return {"num_slots": len(found["slots"]), "num_workers": num_workers, "num_wanted": num_workers, **found}


def worker(**words: Any) -> dict[str, Any]:
    zeros = (
        "now",
        "since_ns",
        "index",
        "busy_ns",
        "claimed_ns",
        "num_chunks",
        "num_samples",
        "num_foreign",
        "num_irregular",
        "num_restarts",
        "nbytes_fetched",
        "nbytes_remote",
        "num_actors",
    )
    return {**dict.fromkeys(zeros, 0), "pid": 43, "started_ns": SECOND, "is_waiting": False, "node": "", **words}


def slot(**words: Any) -> dict[str, Any]:
    zeros = ("state", "order", "epoch", "step", "nrows", "num_chunks", "num_open", "num_claimed", "num_final", "num_lost")
    payload = {"payload_path": "/dev/shm/x", "payload_offset": 0, "payload_nbytes": 0}
    return {**dict.fromkeys(zeros, 0), "ordered_ns": 0, "claims": [], **payload, **words}


@contextmanager
def running(scenario: str, prefix: tuple[str, ...] = (), **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program in its own session until it has reached its scenario; kills it and its children at the end."""
    program = subprocess.Popen(
        [*prefix, sys.executable, "-u", live_program.__file__, scenario],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**program_env(), **environment},
    )
    with program:
        try:
            assert program.stdout is not None
            await_readable(program.stdout.fileno(), 4 * DEADLINE_S)
            assert program.stdout.readline() == b"ready\n"
            yield program
        finally:
            os.killpg(program.pid, signal.SIGKILL)


def look_until(watch: Watch, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Returns the first look that satisfies the condition."""
    until = monotonic() + DEADLINE_S
    while not condition(look := watch.look()):
        assert monotonic() < until, look
        select.select([], [], [], 0.01)
    return look


def only_loader(look: dict[str, Any]) -> dict[str, Any]:
    (loader,) = look["loaders"]
    return loader  # type: ignore[no-any-return]
