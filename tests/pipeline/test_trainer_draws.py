"""Random numbers in a Scan and in the Maps after it, which run in the trainer, and in a Map after Collate."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from shmload import sample_rng
from shmload.pipeline import Collate, Conveyer, Filter, Map, Partition, Range, Scan
from tests.pipeline.pipeline_kit import plain


class Drawing:
    """Draws from `sample_rng()`, the global generators and one of its own, in a Scan or a Map."""

    def __init__(self) -> None:
        self.own = random.Random(1)

    def __call__(self, *args: Any) -> Any:
        *state, item = args
        own = self.own.random()
        drawn = sample_rng().random(), random.gauss(0, 1), np.random.rand(), float(torch.rand(1)), own
        return (*state, (*item, *drawn)) if state else (*item, *drawn)


def drawing(*collate: Any, n_ranks: int = 1, rank: int = 0, **source: Any) -> Conveyer:
    before = [Map(lambda x: (x,)), Map(Drawing()), Filter(lambda item: item[0] % 3)]
    stages = [Range(20, **source), *before, Scan(Drawing(), 0), Map(Drawing()), Partition(rank, n_ranks), *collate]
    return Conveyer(stages, block_size=4)


def columns(given: Any) -> list[Any]:
    return [plain(column) for column in given]


@pytest.mark.parametrize("collate", [[], [Collate(3)]], ids=["items", "batches"])
@pytest.mark.parametrize("repeating", [True, False])
def test_draws_in_a_scan_and_after_it_are_the_same_after_a_resume(collate: list[Any], repeating: bool) -> None:
    with drawing(*collate, repeating=repeating) as pipeline, drawing(*collate, repeating=repeating) as resumed:
        whole = [columns(pipeline()) for _ in range(4)]
        for count in range(3):
            random.seed(count)
            with drawing(*collate, repeating=repeating) as stopped:
                assert [columns(stopped()) for _ in range(count)] == whole[:count]
                resumed.load_state(stopped.state())
            assert columns(resumed()) == whole[count]


def test_draws_in_a_scan_and_after_it_differ_by_item_epoch_and_seed() -> None:
    with drawing(repeating=False) as pipeline, drawing(repeating=False, seed=5) as other:
        rows = [*pipeline, *pipeline, *other]
    assert len(rows) == 3 * 13
    drawn = [number for row in rows for number in row[1:]]
    assert len(set(drawn)) == len(drawn) == len(rows) * 15


def test_draws_after_a_scan_are_the_same_on_all_ranks_also_in_a_step_that_is_filled_up() -> None:
    with (
        drawing(repeating=False) as alone,
        drawing(repeating=False, n_ranks=2) as one,
        drawing(repeating=False, n_ranks=2, rank=1) as two,
    ):
        expected = list(alone)
        found = [row for pair in zip(one, two, strict=True) for row in pair]
    assert found == [*expected, expected[0]]


def test_stages_after_a_scan_leave_the_trainers_generators_as_they_are() -> None:
    with drawing() as pipeline:
        pipeline()
        before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
        for _ in range(9):
            pipeline()
        assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before


def test_sample_rng_after_collate_is_an_error_that_names_the_remedy() -> None:
    stages = [Range(6), Collate(2), Map(lambda batch: sample_rng().random())]
    with (
        Conveyer(stages) as pipeline,
        pytest.raises(RuntimeError, match=r"a Map after Collate runs in the trainer.*BatchMap\n(.*\n)*.*stage 2"),
    ):
        pipeline()
