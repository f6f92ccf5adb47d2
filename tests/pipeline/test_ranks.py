"""Real ranks: torchrun, gloo, one rank's state for all, and `shmload verify` over their deliveries."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from shmload.pipeline import Conveyer, Filter, Items, Partition
from tests.pipeline.pipeline_kit import Leaf, Spec

slow = pytest.mark.slow(reason="torchrun and its ranks are processes that import torch")
SPEC = Spec(Leaf(50, True, True, 5), batch_size=3)


def expected(world: int, num_steps: int, position: int = 0) -> list[list[list[int]]]:
    """Returns the expected batches by rank, from plain lists."""
    steps = islice(SPEC.on(world).steps(0, position), num_steps)
    return [list(rank) for rank in zip(*steps, strict=True)]


@slow
@pytest.mark.parametrize(("world", "then"), [(2, 3), (4, 1)])
def test_job_resumes_on_another_number_of_ranks_and_verifies(
    world: int, then: int, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    started = run_ranks("start", world)
    assert [rank["before"] for rank in started] == expected(world, 3)
    done = 3 * 3 * world
    assert [rank["lost"] for rank in started] == expected(world, 3, done)
    resumed = run_ranks("resume", then)
    num_steps = -(-100 // (3 * then))
    assert [rank["after"] for rank in resumed] == expected(then, num_steps, done)
    kept = [rank["before"] for rank in started] + [rank["after"] for rank in resumed]
    count = Counter(chain.from_iterable(chain.from_iterable(kept)))
    whole, rest = divmod(done + num_steps * 3 * then, 50)
    assert {whole, whole + (rest > 0)} == set(count.values()), "every item once per epoch"
    verified = subprocess.run(
        [sys.executable, "-m", "shmload", "verify", str(tmp_path / "audit")], capture_output=True, text=True, timeout=60
    )
    assert verified.returncode == 4, verified.stdout + verified.stderr  # this pipeline has no end
    assert f"epoch 0 so far: {done + num_steps * 3 * then} samples, each once" in verified.stdout


@slow
def test_ranks_that_saved_at_different_steps_agree_on_a_state(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks("save_at_different_steps", 2)
    assert ranks[0]["state"] == ranks[1]["state"]
    assert ranks[1]["stream"][3] == ranks[1]["again"][0], "a batch that only one rank had is repeated"


@pytest.mark.parametrize("stages", [[], [Filter(bool)]], ids=["items", "blocks"])
def test_valid_is_0_for_a_single_item_that_only_fills_the_last_step(stages: list[Any]) -> None:
    found = []
    for rank in range(3):
        with Conveyer([Items([1, 2, 3, 4]), *stages, Partition(rank, 3)]) as pipeline:
            assert pipeline.valid is None
            found.append([(item, pipeline.valid) for item in pipeline])
    assert found == [[(1, 1), (4, 1)], [(2, 1), (1, 0)], [(3, 1), (2, 0)]]
