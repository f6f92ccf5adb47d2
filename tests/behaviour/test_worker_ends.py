"""Samples that end their worker: the trainer's error equals torch's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.behaviour import ending_programs
from tests.behaviour.behaviour_kit import run_program

pytestmark = pytest.mark.slow(reason="runs programs that import torch and start workers for every way to end")
TEXT = "DataLoader worker (pid(s) PID) exited unexpectedly"
MEMORY = "It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."


def killed(name: str, advice: str = "") -> str:
    return f"DataLoader worker (pid PID) is killed by signal: {name}. {advice}"


def left(code: int) -> str:
    return (
        f"DataLoader worker (pid PID) exited unexpectedly with exit code {code}. Details are lost due to multiprocessing. "
        "Rerunning with num_workers=0 may give better error trace."
    )


CAUSES: dict[str, str | None] = {  # None means that torch does not know the cause
    "SIGKILL": killed("Killed"),
    "SIGSEGV": killed("Segmentation fault"),
    "SIGBUS": killed("Bus error", MEMORY),
    "SIGABRT": killed("Aborted"),
    "SIGTERM": killed("Terminated"),
    "_exit 3": left(3),
    "_exit 0": None,
    "sys.exit 4": left(4),
    "sys.exit text": left(1),
    "sys.exit": None,
    "KeyboardInterrupt": None,
    "GeneratorExit": left(1),
    "BaseException": left(1),
}


def run(name: str) -> dict[str, Any]:
    """Returns the results of one loader for each way to end."""
    return dict(json.loads(line) for line in run_program(ending_programs, name))


@pytest.fixture(scope="module")
def torch_results() -> dict[str, Any]:
    return run("torch")


@pytest.fixture(scope="module")
def shmload_results() -> dict[str, Any]:
    return run("shmload")


def test_every_way_was_tried(torch_results: dict[str, Any], shmload_results: dict[str, Any]) -> None:
    assert list(CAUSES) == list(ending_programs.WAYS) == list(torch_results) == list(shmload_results)


@pytest.mark.parametrize("way", list(CAUSES))
def test_error_names_the_cause(way: str, torch_results: dict[str, Any], shmload_results: dict[str, Any]) -> None:
    got, cause = shmload_results[way], CAUSES[way]
    assert got["text"] == TEXT
    assert cause in (None, got["cause"])
    assert torch_results[way]["text"] in (TEXT, cause)  # sometimes its SIGCHLD handler raises first
    assert torch_results[way]["cause"] in (cause, "", "None")  # sometimes the handler has not run yet


@pytest.mark.parametrize("way", CAUSES)
def test_error_is_a_runtime_error_that_names_the_worker_after_complete_batches(
    way: str, torch_results: dict[str, Any], shmload_results: dict[str, Any]
) -> None:
    for found in (torch_results[way], shmload_results[way]):
        assert "RuntimeError" in found["kinds"]
        assert found["names a worker"]
        assert found["in order"]


@pytest.mark.parametrize("way", list(CAUSES))
def test_only_unexpected_exceptions_print_a_traceback(
    way: str, torch_results: dict[str, Any], shmload_results: dict[str, Any]
) -> None:
    assert torch_results[way]["prints"] == (way in ("GeneratorExit", "BaseException"))
    assert torch_results[way]["prints"] == shmload_results[way]["prints"]
