"""A pipeline's stages, stored after its ring's control block for readers in other processes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from shmload import ShmLoader
from shmload.engine.stage_record import dump_stages, load_stages
from shmload.pipeline import Collate, Conveyer, Filter, Items, Map
from shmload.tools.top.watch import Watch
from tests.top.live_kit import only_loader


@pytest.mark.parametrize("stages", [[Map(abs)], [Filter(bool), Collate(2), Map(abs)]])
def test_stages_of_a_pipeline_are_visible_from_outside(stages: list[Any]) -> None:
    with Conveyer([Items(list(range(8)), n_workers=1), *stages]) as pipeline:
        pipeline()
        found = only_loader(Watch([os.getpid()]).look())
        explained = pipeline.explain(items=1)
    assert found["stages"] == [{"name": stage.name, "where": stage.where} for stage in explained.stages]
    assert found["stages"][0] == {"name": "Items(list of 8)", "where": "workers"}


def test_loader_has_no_stages() -> None:
    with ShmLoader(list(range(8)), batch_size=4, num_workers=1, seed=1) as loader:
        next(iter(loader))
        assert only_loader(Watch([os.getpid()]).look())["stages"] is None


def test_surplus_stages_are_omitted_and_damaged_ones_ignored() -> None:
    about = [("x" * 1000, "workers")] * 10
    kept = load_stages(memoryview(b"block" + dump_stages(about)))
    assert kept == about[:3]
    assert dump_stages([]) == b""
    whole = dump_stages([("Map(f)", "trainer")])
    assert load_stages(memoryview(whole)) == [("Map(f)", "trainer")]
    for damaged in (b"", b"short", whole[:-1], whole[1:], b"[1]" + whole[-12:-4][:0] + whole[-12:], bytes(64)):
        assert load_stages(memoryview(damaged)) is None
