"""A random sample of the fault matrix (its seed is printed), and tests that the judge of cells finds defects."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmload
from tests.faults import matrix_cells
from tests.faults.faults_kit import program_env
from tests.faults.matrix_cells import HARMS, IMPOSSIBLE, METHODS, MODES, Cell, all_cells, chosen
from tests.faults.matrix_data import NUM_BATCHES_READ
from tests.faults.matrix_judge import Outcome, defects, delays
from tests.faults.points import HELPER_POINTS, PACKER_POINTS, STORAGE_POINTS, TRAINER_POINTS, WORKER_POINTS

slow = pytest.mark.slow(reason="each cell runs a trainer, which imports torch and starts workers")
ROOT = Path(__file__).parents[2]
EXPECTED = [[f"{epoch}.{step}" for step in range(NUM_BATCHES_READ[0])] for epoch in range(3)]
SEED = int(os.environ.get("SHMLOAD_MATRIX_SEED", random.SystemRandom().randrange(10**6)))


def run_sample(number: int, *only: str) -> None:
    """Runs `number` cells with the command, which prints which ones it chose."""
    command = [sys.executable, "-m", "tests.faults.matrix", "--sample", str(number), "--seed", str(SEED), "--time-factor", "10"]
    done = subprocess.run(
        [*command, *(["--only", *only] if only else [])], capture_output=True, text=True, timeout=220, cwd=ROOT, env=program_env()
    )
    print(done.stdout)
    assert done.returncode == 0, f"SHMLOAD_MATRIX_SEED={SEED}\n{done.stdout}{done.stderr}"
    assert f"{number} cells in" in done.stdout


@slow
def test_a_few_cells_keep_their_promise(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nfault matrix: SHMLOAD_MATRIX_SEED={SEED}")
    run_sample(4, "fork", "seed")


@slow
@pytest.mark.parametrize(("method", "number"), [("fork", 16), ("forkserver", 6), ("spawn", 2)])
def test_more_cells_keep_their_promise(method: str, number: int) -> None:
    run_sample(number, method)


def test_matrix_has_every_point_harm_method_and_mode_except_impossible_ones() -> None:
    cells = all_cells()
    assert len(set(cells)) == len(cells)
    whole = len((*WORKER_POINTS, *TRAINER_POINTS)) * len(HARMS) * len(METHODS) * len(MODES)
    # no exceptions and no os._exit in C in six kinds of loaders; two points fewer in torch mode
    assert whole - 3 * 6 - 2 * len(HARMS) * 3 == len(cells)
    assert len(IMPOSSIBLE) == 3


def test_every_point_in_the_source_is_listed() -> None:
    package = Path(shmload.__file__).parent
    found = {name for path in package.rglob("*.py") for name in re.findall(r'faults\.(?:hit|at)\("(\w+)"\)', path.read_text())}
    assert {*WORKER_POINTS, *HELPER_POINTS, *TRAINER_POINTS, *STORAGE_POINTS, *PACKER_POINTS} == found | {"releasing"}


def test_seed_determines_the_chosen_cells() -> None:
    assert chosen([], 20, 1) == chosen([], 20, 1) != chosen([], 20, 2)
    assert {"torch"} == {cell.mode for cell in chosen(["torch"], 10, 1)}


# ------------------------------------------------------------ the judge

IDENTICAL = Cell("after_claim", "SIGKILL", "fork", "seed")
ERROR = Cell("mid_decode", "MemoryError", "fork", "seed")
LOST = Cell("after_claim", "SIGKILL", "fork", "torch")
GONE = Cell("mapping", "SIGKILL", "fork", "seed")


def good_events() -> list[dict[str, Any]]:
    """Returns the events of an undisturbed trainer, a tenth of a second apart."""
    events: list[dict[str, Any]] = [{"kind": "stem", "stem": "x"}]
    for epoch, number in enumerate(NUM_BATCHES_READ):
        events.append({"kind": "epoch", "epoch": epoch})
        events += [{"kind": "batch", "digest": EXPECTED[epoch][step]} for step in range(number)]
        if number == NUM_BATCHES_READ[0]:
            events.append({"kind": "end"})
    events += [{"kind": "slots", "held": 0, "leased": 0, "pool": 2}, {"kind": "left"}]
    return [{**event, "at": 0.1 * i} for i, event in enumerate(events)]


def failed(kind: str, text: str) -> dict[str, Any]:
    return {"kind": "error", "type": kind, "text": text, "at": 0.5}


def outcome(events: list[dict[str, Any]], exit_code: int | None = 0, **more: Any) -> Outcome:
    return Outcome(events, exit_code, harmed_at=0.45, **more)


def with_error(*errors: dict[str, Any], lost: int = 0) -> list[dict[str, Any]]:
    """Returns the events with errors before the third batch, and `lost` batches missing after them."""
    events = good_events()
    events[4 : 4 + lost] = errors
    return events


RAISED = failed("MemoryError", "injected fault at mid_decode")
DIED = failed("WorkerDied", "DataLoader worker (pid(s) 7) exited unexpectedly")


@pytest.mark.parametrize(
    ("cell", "seen"),
    [
        (IDENTICAL, outcome(good_events())),
        (ERROR, outcome(with_error(RAISED))),
        (ERROR, outcome(with_error(RAISED, lost=1))),
        (LOST, outcome(with_error(DIED, lost=9))),
        (GONE, outcome(good_events()[:5], -9)),
    ],
)
def test_judge_accepts_kept_promises(cell: Cell, seen: Outcome) -> None:
    assert defects(cell, seen, EXPECTED) == []
    assert delays(cell, seen, 0.0) == []


def changed(event: int, **what: Any) -> list[dict[str, Any]]:
    events = good_events()
    events[event] |= what
    return events


def without(event: int) -> list[dict[str, Any]]:
    events = good_events()
    del events[event]
    return events


PLANTED: list[tuple[Cell, Outcome, str]] = [
    (IDENTICAL, outcome(changed(5, digest="other")), "batch 3 of epoch 0 differs"),
    (IDENTICAL, outcome(without(4)), "batch 2 of epoch 0 differs"),
    (IDENTICAL, outcome(without(11)), "epoch 0 ended after batch 8"),
    (IDENTICAL, outcome(changed(4, digest="0.1")), "batch 2 of epoch 0 differs"),
    (IDENTICAL, outcome(with_error(DIED)), "unexpected error: WorkerDied"),
    (IDENTICAL, outcome(good_events()[:20]), "it did not finish"),
    (IDENTICAL, outcome(good_events()[:9], None), "it hung"),
    (IDENTICAL, outcome(good_events(), 1), "the trainer ended with 1"),
    (IDENTICAL, outcome(good_events(), was_reached=False), "the point was not reached"),
    (IDENTICAL, outcome(good_events(), survivors=["sh"]), "a process survived: sh"),
    (IDENTICAL, outcome(good_events(), names_left=["x-control"]), "a name is left: x-control"),
    (IDENTICAL, outcome(changed(-2, leased=1)), "slots not released: 0 held, 1 leased"),
    (IDENTICAL, outcome(changed(-2, pool=1)), "1 workers are left"),
    (IDENTICAL, outcome(changed(-1, fds=["socket"])), "fds not as before"),
    (ERROR, outcome(good_events()), "0 errors instead of one"),
    (ERROR, outcome(with_error(RAISED, RAISED)), "2 errors instead of one"),
    (ERROR, outcome(with_error(failed("MemoryError", ""))), "not MemoryError with 'injected fault at mid_decode'"),
    (ERROR, outcome(with_error(RAISED, lost=2)), "batch 2 of epoch 0 differs"),
    (LOST, outcome(with_error(RAISED)), "not WorkerDied with 'exited unexpectedly'"),
    (GONE, outcome(good_events()[:5], 0), "the trainer ended with 0, not -9"),
]


@pytest.mark.parametrize(("cell", "seen", "found"), PLANTED)
def test_judge_finds_every_planted_defect(cell: Cell, seen: Outcome, found: str) -> None:
    assert any(found in one for one in defects(cell, seen, EXPECTED))


def late(make: Callable[[], list[dict[str, Any]]], by: float) -> list[dict[str, Any]]:
    return [event | {"at": event["at"] + by} for event in make()]


def test_judge_finds_delays() -> None:
    assert delays(IDENTICAL, Outcome(late(good_events, 4), 0, harmed_at=0.45), 0.0) == ["no event for 3.75 s"]
    assert delays(IDENTICAL, Outcome(late(good_events, 4), 0, harmed_at=0.45), 2.0) == []
    assert delays(GONE, outcome(good_events()[:5], -9, gone_s=2.5), 0.0) == ["the last process ended 2.50 s after the trainer"]
    assert delays(GONE, outcome(good_events()[:5], -9, gone_s=2.5), 0.0, time_factor=2) == []
    noticed = [{"kind": "noticed", "at": 0.8}]
    assert delays(IDENTICAL, outcome(good_events() + noticed, died_at=0.6), 0.0) == ["noticed after 0.20 s"]
    assert delays(IDENTICAL, outcome(good_events() + noticed, died_at=0.75), 0.0) == []


def test_promises_follow_from_point_and_harm() -> None:
    promised = {cell: cell.promise for cell in all_cells()}
    assert {"identical", "error", "gone"} == set(promised.values())
    assert {"gone"} == {p for cell, p in promised.items() if cell.is_trainers and not cell.is_raised and "STOP" not in cell.harm}
    # in seed mode a worker's death never changes the stream
    assert {"identical"} == {p for c, p in promised.items() if not c.is_trainers and not c.is_raised and c.mode == "seed"}
    assert set(matrix_cells.REPORTED) < set(WORKER_POINTS)
