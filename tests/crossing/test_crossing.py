"""Tests of the crossings themselves: wrong loaders are caught, cases survive JSON, failing cases are reduced. Then random
crossings run.

.ci/run spends two minutes on them (CROSSING_MINUTES), with a seed from the commit (CROSSING_SEED). Otherwise they take 20 s, with a
new seed each time.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmload
from shmload.schedule.state_checksum import with_checksum
from tests.crossing import __main__ as command
from tests.crossing.__main__ import Run, only_of
from tests.crossing.cases import KINDS, PLAINEST, Case, draw, made_legal
from tests.crossing.datasets import delivered
from tests.crossing.habits import Trial, Wrong
from tests.crossing.oracle import Collated, difference
from tests.crossing.process import Outcome
from tests.crossing.shrink import program, reduce_case

SHUFFLED = Case(fields="sai", n=23, shuffle=True, workers=0, seed=5)


def minutes() -> float:
    """Returns the minutes to spend on random crossings."""
    asked = os.environ.get("CROSSING_MINUTES")
    return float(asked) if asked else 1 / 3


# ------------------------------------------------------------ cases


def test_case_is_determined_by_its_seed_and_survives_json() -> None:
    for number in range(50):
        case = draw(random.Random(number))
        assert case == draw(random.Random(number)) == Case.loads(case.dumps())
        assert case == made_legal(case)


def test_every_kind_and_habit_is_drawn() -> None:
    cases = [draw(random.Random(number)) for number in range(800)]
    assert {case.kind for case in cases} == set(KINDS)
    assert len({case.habit for case in cases}) == 10
    assert {case.ranks for case in cases} == {1, 2, 3, 4}


def test_dimensions_can_be_set() -> None:
    assert only_of(["kind=tfrecord", "workers=2", "batch_size=null"]) == {"kind": "tfrecord", "workers": 2, "batch_size": None}
    assert draw(random.Random(1), {"kind": "tar", "workers": 3}).workers == 3
    with pytest.raises(SystemExit, match="no dimension of that name"):
        only_of(["color=red"])


# ------------------------------------------------------------ the oracle


def test_oracle_collates_as_documented() -> None:
    case = Case(fields="vs", n=9, sizes="random", ragged="pad")
    samples = [delivered(case, index, None) for index in range(3)]
    longest = max(len(sample["v"]) for sample in samples)
    batch = Collated(case).batch(samples)
    assert batch["v"][1].shape == (3, longest)
    assert batch["s"] == [sample["s"] for sample in samples]


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (torch.arange(3), torch.arange(3) + 1),
        (torch.arange(3), torch.arange(3, dtype=torch.int32)),
        (torch.arange(3), [0, 1, 2]),
        (np.arange(3), torch.arange(3)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (["a"], ("a",)),
        ([1, 2], [1]),
        (b"ab", b"aB"),
        (1, 1.0),
    ],
)
def test_oracle_reports_differences(expected: Any, got: Any) -> None:
    assert difference(expected, expected) == ""
    assert difference(expected, got) != ""


# ------------------------------------------------------------ wrong loaders


def swapped(batches: list[Any]) -> list[Any]:
    return [*batches[1::-1], *batches[2:]]


def repeated(batches: list[Any]) -> list[Any]:
    return [batches[0], *batches]


def missing_last(batches: list[Any]) -> list[Any]:
    return batches[:-1]


def changed_value(batches: list[Any]) -> list[Any]:
    batches[2]["a"][1, 0] += 1
    return batches


def changed_text(batches: list[Any]) -> list[Any]:
    batches[1]["s"][0] = batches[1]["s"][1]
    return batches


def slot_reused_too_early(batches: list[Any]) -> list[Any]:
    """Gives each batch the memory of the first, as if a slot were reused too early."""
    return [{**batch, "a": batches[0]["a"]} for batch in batches]


def spoiled_loader(spoil: Callable[[list[Any]], list[Any]]) -> type:
    """Returns a subclass of ShmLoader whose batches `spoil` changes."""

    class SpoiledLoader(shmload.ShmLoader[Any]):
        def __iter__(self) -> Any:
            batches = list(super().__iter__())
            if self.batch_size == 1 or len(batches) < 4:  # as the oracle reads
                return iter(batches)
            return iter(spoil(batches))

    return SpoiledLoader


@pytest.mark.parametrize("spoil", [swapped, repeated, missing_last, changed_value, changed_text, slot_reused_too_early])
def test_wrong_loader_is_caught(spoil: Callable[[list[Any]], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Trial(SHUFFLED, tmp_path).run()
    monkeypatch.setattr(shmload, "ShmLoader", spoiled_loader(spoil))
    with pytest.raises(Wrong):
        Trial(SHUFFLED, tmp_path).run()


def test_resume_that_repeats_a_batch_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SHUFFLED, habit="resume", then_workers=0)
    Trial(case, tmp_path).run()

    class Forgetful(shmload.ShmLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            state = super().state_dict()
            return with_checksum({**state, "position": max(state["position"] - 4, 0)})

    monkeypatch.setattr(shmload, "ShmLoader", Forgetful)
    with pytest.raises(Wrong):
        Trial(case, tmp_path).run()


# ------------------------------------------------------------ shrinking


def test_failing_case_is_reduced_while_it_still_fails() -> None:
    case = draw(random.Random(3), {"kind": "dict", "workers": 3, "shuffle": True, "mode": "seed"})
    case = made_legal(replace(case, fields="sav", n=150))

    def fails(tried: Case) -> bool:
        return "s" in tried.fields and tried.n > 4 and tried.workers == 3

    smallest = reduce_case(case, fails, limit_s=10.0)
    assert fails(smallest)
    assert smallest.fields == "s"
    assert smallest.n == 5
    assert set(smallest.changed()) <= {"seed", "fields", "n", "workers", "loaders", "size", "text", "batch_size"}
    assert not smallest.shuffle


def test_reduced_program_repeats_the_case() -> None:
    text = program(Case(kind="tfrecord", n=7, workers=2, habit="resume"))
    assert "ShmLoader(dataset, " in text
    assert "TFRecordDataset" in text
    compile(text, "program", "exec")
    line = next(line for line in text.splitlines() if line.startswith("case = "))
    assert eval(line.removeprefix("case = "), {"Case": Case}) == replace(PLAINEST, kind="tfrecord", n=7, workers=2, habit="resume")


# ------------------------------------------------------------ random crossings


@pytest.mark.slow(reason="runs crossings for 20 s, or for CROSSING_MINUTES")
@pytest.mark.timeout(60 * minutes() + 900)
def test_random_crossings_find_nothing() -> None:
    seed = int(os.environ.get("CROSSING_SEED") or random.SystemRandom().randrange(10**6))
    words = [sys.executable, "-m", "tests.crossing", "--minutes", str(minutes()), "--seed", str(seed)]
    if minutes() >= 1 and find_spec("ray"):
        words += ["--ray", "0.05"]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=120 * minutes() + 600,  # findings are reduced first
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-12000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.startswith(f"seed {seed}")


def test_command_reports_failures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_case(case: Case, limit_s: float = 0.0) -> Outcome:
        return Outcome("wrong", "batch 3: 5 and not 4") if "s" in case.fields else Outcome("right", num_batches=7)

    monkeypatch.setattr(command, "run_case", run_case)
    run = Run(seed=2, only={"kind": "dict"}, shm_kinds=("usual",))
    for number in range(30):
        run.run_case_number(number)
    assert len(run.found) == len({signature.split()[1] for signature in run.found})  # one for each mode, before reduction
    assert all(case.fields == "s" for case, _, _ in run.found.values())
    assert "case = Case(" in capsys.readouterr().out
    assert "30 cases" in run.summary()
    assert "dict 30" in run.table()
