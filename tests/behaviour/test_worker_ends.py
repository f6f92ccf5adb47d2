"""Samples that end their worker: what the trainer is told, in torch's words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.behaviour import ending_programs
from tests.behaviour.behaviour_kit import run_program

pytestmark = pytest.mark.slow(reason="programs that import torch start workers for every way to end")
TEXT = "DataLoader worker (pid(s) PID) exited unexpectedly"
MEMORY = "It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."


def killed(name: str, advice: str = "") -> str:
    return f"DataLoader worker (pid PID) is killed by signal: {name}. {advice}"


def left(code: int) -> str:
    return (
        f"DataLoader worker (pid PID) exited unexpectedly with exit code {code}. Details are lost due to multiprocessing. "
        "Rerunning with num_workers=0 may give better error trace."
    )


CAUSES: dict[str, str | None] = {  # None: torch knows none
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
    """What that loader says about each way to end."""
    return dict(json.loads(line) for line in run_program(ending_programs, name))


@pytest.fixture(scope="module")
def torchs() -> dict[str, Any]:
    return run("torch")


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return run("shmload")


def test_every_way_was_tried(torchs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert list(CAUSES) == list(ending_programs.WAYS) == list(torchs) == list(ours)


@pytest.mark.parametrize("way", list(CAUSES))
def test_an_end_is_told_with_its_cause(way: str, torchs: dict[str, Any], ours: dict[str, Any]) -> None:
    got, cause = ours[way], CAUSES[way]
    assert got["text"] == TEXT
    assert cause in (None, got["cause"])
    assert torchs[way]["text"] in (TEXT, cause)  # at times its SIGCHLD handler raises by itself
    assert torchs[way]["cause"] in (cause, "", "None")  # at times nothing has told the handler


@pytest.mark.parametrize("way", CAUSES)
def test_it_is_a_runtime_error_that_names_the_worker_after_whole_batches_in_order(
    way: str, torchs: dict[str, Any], ours: dict[str, Any]
) -> None:
    for found in (torchs[way], ours[way]):
        assert "RuntimeError" in found["kinds"]
        assert found["names a worker"]
        assert found["in order"]


@pytest.mark.parametrize("way", list(CAUSES))
def test_only_what_is_unforeseen_prints_a_traceback(way: str, torchs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert torchs[way]["prints"] == (way in ("GeneratorExit", "BaseException"))
    assert torchs[way]["prints"] == ours[way]["prints"]
