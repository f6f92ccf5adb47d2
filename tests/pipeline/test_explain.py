"""Tests of `explain()`: the names of stages, where they run, what they cost, and the bottleneck."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import thread_time, thread_time_ns
from typing import Any

import numpy as np
import pytest
import torch

from shmload import sample_rng
from shmload.pipeline import (
    AsyncMap,
    BatchMap,
    Bucket,
    Cache,
    Collate,
    Conveyer,
    DistributedBatchedMap,
    Enumerate,
    Filter,
    FlatMap,
    Generate,
    Items,
    Join,
    Map,
    Pack,
    Partition,
    Permutation,
    Range,
    Repeat,
    Scan,
    Shuffle,
    Skip,
    Stream,
    Take,
    Window,
    Zip,
    measured_run,
    stage_counters,
)
from tests.pipeline import chosen_items as chosen
from tests.pipeline.pipeline_kit import Add
from tests.pipeline.worker_items import Squares

LONG = 60.0  # seconds, where the number of items is the limit


def spun(seconds: float, value: Any) -> Any:
    """Returns the value after using that much CPU time."""
    end = thread_time() + seconds
    while thread_time() < end:
        pass
    return value


@pytest.fixture(autouse=True)
def by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures CPU time, so that other work of a busy machine does not count."""
    for module in (measured_run, stage_counters):
        monkeypatch.setattr(module, "perf_counter_ns", thread_time_ns)


slow_function, fast_function = partial(spun, 4e-3), partial(spun, 0.0)  # `spun` takes up to 0.1 ms for 0.0 on a loaded machine


def is_odd(x: int) -> bool:
    return x % 2 == 1


def kept(_: int) -> bool:
    return True


def twice(x: Any) -> list[Any]:
    return [x, x]


async def awaited(x: Any) -> Any:
    return x


def counted(state: int, x: int) -> tuple[int, int]:
    return state + 1, x


class Dataset:
    """Samples that take a while to read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        number: int = slow_function(index)
        return number


# ------------------------------------------------------------ names and places


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (
            [
                Items([1] * 8),
                Shuffle(),
                Partition(0, 2),
                DistributedBatchedMap(is_odd, 2),
                Collate(4),
                BatchMap(twice),
                Map(Add(1)),
            ],
            [
                ("Items(list of 8)", "workers"),
                ("Shuffle()", "by position"),
                ("Partition(0, 2)", "by position"),
                ("DistributedBatchedMap(is_odd, 2)", "workers"),
                ("Collate(4)", "workers"),
                ("BatchMap(twice)", "workers"),
                ("Map(Add)", "trainer"),
            ],
        ),
        (
            [Range(9), Take(8), Skip(1), Repeat(), Enumerate(1), Window(2), Map(slow_function)],
            [
                ("Range(9)", "trainer"),
                ("Take(8)", "by position"),
                ("Skip(1)", "by position"),
                ("Repeat()", "by position"),
                ("Enumerate(1)", "by position"),
                ("Window(2)", "by position"),
                ("Map(spun)", "trainer"),
            ],
        ),
        (
            [
                Range(9, seed=3, repeating=False),
                DistributedBatchedMap(fast_function, 1),
                Filter(is_odd),
                Shuffle(buffer_size=4),
                Collate(2),
            ],
            [
                ("Range(9, repeating=False, seed=3)", "workers"),
                ("DistributedBatchedMap(spun, 1)", "workers"),
                ("Filter(is_odd)", "workers"),
                ("Shuffle(buffer_size=4)", "workers"),
                ("Collate(2)", "trainer"),
            ],
        ),
        (
            [Stream([1, 2], seed=1), DistributedBatchedMap(fast_function, 1), Scan(counted, 0), Map(fast_function), Collate(2)],
            [
                ("Stream(list)", "trainer"),
                ("DistributedBatchedMap(spun, 1)", "workers"),
                ("Scan(counted, 0)", "trainer"),
                ("Map(spun)", "trainer"),
                ("Collate(2)", "trainer"),
            ],
        ),
        (
            [Items([1, 2]), Cache(), DistributedBatchedMap(fast_function, 1), Bucket(abs, [4], 2), Map(fast_function)],
            [
                ("Items(list of 2)", "workers"),
                ("Cache()", "workers"),
                ("DistributedBatchedMap(spun, 1)", "workers"),
                ("Bucket(abs, (4,), 2)", "workers"),
                ("Map(spun)", "trainer"),
            ],
        ),
        (
            [Zip(Items([1]), Range(2)), FlatMap(list), AsyncMap(awaited, 4), Pack(8)],
            [
                ("Zip(2 members)", "trainer"),
                ("FlatMap(list)", "trainer"),
                ("AsyncMap(awaited, 4)", "trainer"),
                ("Pack(8)", "trainer"),
            ],
        ),
        ([Generate(fast_function, 9)], [("Generate(spun, 9)", "trainer")]),
        ([Join([(Conveyer([Range(3)]), 1.0)])], [("Join(1 members)", "trainer")]),
    ],
)
def test_stages_are_named_and_placed(stages: list[Any], expected: list[tuple[str, str]]) -> None:
    with Conveyer(stages) as pipeline:
        found = pipeline.explain(items=1, seconds=0.01)
    assert [(stage.name, stage.where) for stage in found.stages] == expected
    text = str(found)
    assert all(name in text for name, _ in expected)
    assert text.splitlines()[-1] == found.why


# ------------------------------------------------------------ costs


def flow(pipeline: Any, items: int = 16) -> list[tuple[int, int]]:
    """Returns how many items each stage takes and gives."""
    return [(stage.num_in, stage.num_out) for stage in pipeline.explain(items=items, seconds=LONG).stages]


def test_items_are_counted_where_stages_make_more_or_fewer() -> None:
    pipeline = Items(list(range(40))).map(fast_function).filter(is_odd).flat_map(twice).batch(8).map(fast_function)
    assert flow(Conveyer(pipeline, block_size=16)) == [(16, 16), (16, 16), (16, 8), (8, 16), (16, 2), (2, 2)]
    assert flow(Permutation(40).window(2).map(sum).batch(4)) == [(32, 32), (16, 16), (16, 16), (16, 4)]
    assert flow(Items([2, 3, 4, 5]).bucket(abs, [3], 2).map(fast_function), 4) == [(4, 4), (4, 2), (2, 2)]
    assert flow(Stream([1, 2, 3]).map(fast_function).batch(2)) == [(3, 3), (3, 3), (3, 2)]
    assert flow(Conveyer([Range(9, repeating=False), Scan(counted, 0), Map(fast_function)])) == [(9, 9), (9, 9), (9, 9)]


@pytest.mark.parametrize(
    ("slowest", "stages"),
    [
        (2, [Range(64), Map(fast_function), Map(slow_function), Map(fast_function), Collate(4), Map(fast_function)]),
        (2, [Range(64), Map(fast_function), Map(slow_function), Shuffle(), Map(fast_function), Collate(4)]),
        (2, [Range(64), FlatMap(twice), Map(slow_function), Filter(is_odd), Collate(4)]),
        (2, [Range(64), Map(fast_function), Filter(slow_function), Shuffle(buffer_size=4), Collate(4), Map(fast_function)]),
        (2, [Range(64), Map(fast_function), Scan(lambda state, x: (state, slow_function(x)), 0), Collate(4)]),
        (2, [Stream(range(64)), Map(fast_function), Map(slow_function)]),
        (0, [Items(Dataset()), Map(fast_function), Shuffle(), FlatMap(twice)]),
        (0, [Zip(Items(Dataset()), [Range(64), Map(fast_function)]), Map(sum), Collate(4)]),
    ],
)
def test_time_of_a_stage_excludes_the_others(slowest: int, stages: list[Any]) -> None:
    with Conveyer(stages, block_size=8) as pipeline:
        found = pipeline.explain(items=16, seconds=LONG)
    costs = [stage.us_per_item or 0.0 for stage in found.stages]
    assert costs.index(max(costs)) == slowest
    assert costs[slowest] >= 500
    assert found.stages[slowest].name in found.why
    assert found.items_per_s is not None
    assert found.items_per_s <= 4000


def test_blocks_of_a_stream_without_stages_can_be_the_bottleneck() -> None:
    with Conveyer([Stream([np.zeros(300_000)] * 32, n_workers=1), Collate(8)], block_size=8) as pipeline:
        found = pipeline.explain(items=32, seconds=LONG)
    assert found.bottleneck == "decode"
    assert "Making blocks of the items takes " in found.why


def test_rate_includes_the_work_for_dropped_items() -> None:
    with Conveyer([Range(64), Map(slow_function), Filter(is_odd)], block_size=8) as pipeline:
        rate = pipeline.explain(items=16, seconds=LONG).items_per_s
        assert rate is not None
        assert rate <= 1000
    with Conveyer([Range(64), Map(slow_function), FlatMap(twice), Partition(0, 2)], block_size=8) as pipeline:
        rate = pipeline.explain(items=16, seconds=LONG).items_per_s
        assert rate is not None
        assert rate <= 2000, "each of two ranks makes all items and delivers half of them"


def test_cost_of_batch_functions_is_given_per_row() -> None:
    with Conveyer([Range(64), Collate(8), Map(partial(spun, 4e-3))]) as pipeline:
        found = pipeline.explain(items=24, seconds=LONG)
    assert 500 <= (found.stages[2].us_per_item or 0) < 4000
    assert (found.stages[2].num_in, found.stages[2].num_out) == (3, 3)


@pytest.mark.parametrize("kind", [chosen.Into, chosen.ByIndexInto, chosen.Getting])
def test_dataset_that_decodes_into_the_batch_is_the_source(kind: Any) -> None:
    with Conveyer([Items(kind()), Shuffle(), Collate(4)]) as pipeline:
        found = pipeline.explain(items=12, seconds=LONG)
    source, _, collate = found.stages
    assert (source.num_in, collate.num_in, collate.num_out) == (12, 12, 3)
    assert (source.us_per_item or 0) > 0 == collate.us_per_item
    assert found.bottleneck == "source"


def test_decoder_is_timed() -> None:
    with Conveyer([Range(64), DistributedBatchedMap(Squares(), 2), Collate(4)]) as pipeline:
        found = pipeline.explain(items=8, seconds=LONG)
    assert found.stages[1].num_out == 8
    assert (found.stages[1].us_per_item or 0) > 0


# ------------------------------------------------------------ the bottleneck


@pytest.mark.parametrize(
    ("stages", "bottleneck", "text"),
    [
        ([Range(64), Map(slow_function), Collate(4)], "decode", "Bottleneck is decode, in the trainer"),
        ([Range(64), Collate(4), Map(slow_function)], "decode", "before Collate, or as a BatchMap, workers could do that"),
        ([Items(Dataset()), Map(fast_function), Collate(4)], "source", "Bottleneck is source, in the trainer"),
        ([Items(Dataset(), n_workers=2), Collate(4)], "source", "2 workers make at most"),
        ([Range(64), DistributedBatchedMap(slow_function, 1), Collate(4)], "decode", "DistributedBatchedMap(spun, 1) takes"),
        ([Range(64), DistributedBatchedMap(fast_function, 2), Collate(4), Map(slow_function)], "trainer", "Bottleneck is trainer"),
    ],
)
def test_bottleneck_of_a_pipeline_is_named(stages: list[Any], bottleneck: str, text: str) -> None:
    with Conveyer(stages) as pipeline:
        found = pipeline.explain(items=12, seconds=LONG)
        assert pipeline.stats() == {}, "no workers have been started"
    assert (found.bottleneck, found.trainer_waits, found.workers_busy) == (bottleneck, None, None)
    assert text in found.why
    assert (found.workers_per_s is None) == (found.num_workers == 0)


def running(trainer_waits: float, workers_wait: float, busy_percent: float) -> Callable[[], dict[str, Any]]:
    """Returns the figures of a running pipeline."""
    shares = {"start_up": 0.0, "trainer_waits": trainer_waits, "workers_wait": workers_wait, "free": 0.0}
    worker = {"busy_share": busy_percent / 100, "busy_s": 4.0, "num_samples": 10_000, "started_ns": 1}
    return lambda: {"time": shares, "bottleneck": "none", "samples_per_s": 1000.0, "workers": [worker, worker]}


@pytest.mark.parametrize(
    ("waits", "later_function", "bottleneck", "text"),
    [
        ((10.0, 50.0, 40.0), fast_function, "trainer", "the program that takes the items"),
        ((10.0, 50.0, 40.0), partial(spun, 4e-3), "trainer", "Map(spun) takes"),
        ((60.0, 4.0, 90.0), partial(spun, 4e-3), "decode", "DistributedBatchedMap(spun, 2) takes"),
        ((60.0, 32.0, 20.0), fast_function, "hand-off", "Bottleneck is hand-off"),
        ((2.0, 3.0, 97.0), fast_function, "none", "No bottleneck"),
    ],
)
def test_figures_of_a_running_pipeline_decide(
    waits: tuple[float, float, float], later_function: Any, bottleneck: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Conveyer([Range(64), DistributedBatchedMap(slow_function, 2), Collate(4), Map(later_function)]) as pipeline:
        monkeypatch.setattr(pipeline, "stats", running(*waits))
        found = pipeline.explain(items=8, seconds=LONG)
    assert (found.bottleneck, found.trainer_waits, found.workers_busy) == (bottleneck, waits[0], waits[2])
    assert text in found.why
    assert f"running: the trainer waits {waits[0]:.0f} % of the time, workers are busy {waits[2]:.0f} %" in str(found)
    assert found.workers_per_s is not None
    assert found.workers_per_s <= 2 * 2500, "the running workers take 400 us per item, whatever it takes here"


def test_pipeline_whose_workers_have_just_started_is_judged_by_its_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    with Conveyer([Range(64), DistributedBatchedMap(slow_function, 2), Collate(4)]) as pipeline:
        figures = running(0.0, 5.0, 22.0)()
        monkeypatch.setattr(pipeline, "stats", lambda: {**figures, "bottleneck": "unknown"})
        found = pipeline.explain(items=8, seconds=LONG)
    assert found.bottleneck == "decode"
    assert found.why.startswith(
        "Most of the time so far was the start of the workers, so the waits say little; by the costs above: Bottleneck is decode: "
    )


@pytest.mark.slow(reason="starts workers")
@pytest.mark.parametrize("more", [[], [Filter(bool)]])
def test_running_pipeline_is_explained_and_continues(more: list[Any]) -> None:
    with Conveyer(
        [Items(list(range(1, 41))), DistributedBatchedMap(fast_function, 2), *more, Collate(4)], block_size=8
    ) as pipeline:
        got = [pipeline().tolist(), pipeline().tolist()]
        found = pipeline.explain(items=8)
        got += [batch.tolist() for batch in pipeline]
    assert [x for batch in got for x in batch] == list(range(1, 41))
    assert found.trainer_waits is not None
    assert found.workers_busy is not None


# ------------------------------------------------------------ state that explain() must not change


class Drawing:
    """Draws a random number and returns it."""

    def __init__(self) -> None:
        self.drawn: list[tuple[int, float, float]] = []

    def __call__(self, x: int) -> int:
        self.drawn.append((x, sample_rng().random(), random.random()))
        return x


@pytest.mark.parametrize("stages", [[], [Filter(bool)], [Collate(3)], [FlatMap(twice), Collate(3)]])
@pytest.mark.parametrize("num_consumed", [0, 4])
def test_explain_draws_like_the_pipeline_and_leaves_its_position(stages: list[Any], num_consumed: int) -> None:
    function = Drawing()
    with Conveyer([Permutation(50, seed=5), Map(function), *stages], block_size=4) as pipeline:
        for _ in range(num_consumed):
            pipeline()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        states = random.getstate(), np.random.get_state(legacy=True)[1].tolist(), torch.get_rng_state().tolist()
        state = pipeline.state()
        function.drawn.clear()
        pipeline.explain(items=4, seconds=LONG)
        drawn = list(function.drawn)
        assert pipeline.state() == state
        assert states == (random.getstate(), np.random.get_state(legacy=True)[1].tolist(), torch.get_rng_state().tolist())
        with Conveyer(pipeline.stages, block_size=4) as again:
            again.load_state(state)
            function.drawn.clear()
            for _ in range(4):
                again()
    assert drawn
    assert drawn == function.drawn[: len(drawn)]


def test_explain_leaves_the_global_generators_alone() -> None:
    with Conveyer([Range(8), Collate(2), Map(lambda batch: batch + random.random())]) as pipeline:
        random.seed(3)
        pipeline.explain(items=4, seconds=LONG)
        drawn = random.random()
    random.seed(3)
    assert drawn == random.random()


def test_explain_leaves_the_state_of_a_scan() -> None:
    with Conveyer([Range(8, repeating=False), Scan(lambda total, x: (total + x, total + x), 0)]) as pipeline:
        got = [pipeline(), pipeline(), pipeline()]
        pipeline.explain(items=3, seconds=LONG)
        got += pipeline
    assert got == [0, 1, 3, 6, 10, 15, 21, 28]


def test_cached_items_are_counted(tmp_path: Path) -> None:
    with Conveyer([Range(8), Map(slow_function), Cache(tmp_path), Collate(8)]) as pipeline:
        pipeline()
        files = sorted(path.name for path in tmp_path.glob("*.sqlite"))
        assert flow(pipeline, 8) == [(0, 0), (0, 0), (8, 8), (8, 1)]
    assert sorted(path.name for path in tmp_path.glob("*.sqlite")) == files


def test_explain_does_not_read_a_one_time_iterator() -> None:
    with Conveyer([Stream(iter([1, 2, 3])), Map(fast_function)]) as pipeline:
        found = pipeline.explain()
        assert found.bottleneck == "unknown"
        assert found.why == "Nothing could be measured: the Stream's iterable has a position, which reading it would change."
        assert [stage.us_per_item for stage in found.stages] == [None, None]
        assert list(pipeline) == [1, 2, 3]


# ------------------------------------------------------------ ends and failures


def test_finished_pipeline_is_measured_from_its_beginning() -> None:
    with Conveyer([Range(6, repeating=False), Map(fast_function), Collate(2)]) as pipeline:
        for _ in pipeline:
            pass
        assert flow(pipeline, 4) == [(4, 4), (4, 4), (4, 2)]
    with Conveyer([Range(6, repeating=False), Filter(is_odd)]) as pipeline:
        assert list(pipeline) == [1, 3, 5]
        assert flow(pipeline, 3) == [(6, 6), (6, 3)]


def test_time_limit_still_measures_batch_functions() -> None:
    function = Map(partial(spun, 2e-3))
    for stages in (
        [Range(9999), function, Collate(1000), Map(fast_function)],
        # bool would drop item 0, and on a stalling machine there may be time for that one only
        [Range(9999), function, Filter(kept), Collate(1000), Map(fast_function)],
    ):
        with Conveyer(stages, block_size=1000) as pipeline:
            began = thread_time()
            found = pipeline.explain(items=1000, seconds=0.05)
            assert thread_time() - began < 1.0
        assert all(stage.us_per_item is not None for stage in found.stages)


def failing(x: int) -> int:
    raise KeyError(x)


def test_failing_items_do_not_make_explain_fail() -> None:
    for stages in ([Range(8), Map(failing)], [Range(8), Map(failing), Collate(2)], [Range(8), Map(failing), Filter(bool)]):
        with Conveyer(stages) as pipeline:
            found = pipeline.explain(items=4)
        assert found.bottleneck == "unknown"
        assert found.why.startswith("Nothing could be measured: items fail: KeyError(")
    some_fail = Range(8).map(lambda x: x if x > 3 else failing(x)).explain(items=4)
    assert some_fail.bottleneck != "unknown", "the time of the other items is known; which stage took most is random"


def test_without_items_nothing_is_measured() -> None:
    found = Range(8, repeating=False).filter(lambda x: False).batch(4).explain(seconds=LONG)
    assert found.why == "Nothing could be measured: of the items that were read none came."
    assert [(stage.num_in, stage.num_out) for stage in found.stages] == [(8, 8), (8, 0), (0, 0)]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="items and seconds above 0; got items=0, seconds=1"):
        Range(3).explain(items=0)
    with pytest.raises(ValueError, match="got items=256, seconds=0"):
        Range(3).explain(seconds=0)


def numbers() -> Iterator[int]:
    yield from range(5)


def test_pipeline_made_with_methods_is_explained() -> None:
    found = Stream(numbers).filter(is_odd).batch(2).explain()
    assert [stage.num_out for stage in found.stages] == [5, 2, 1]


def test_unordered_pipeline_is_explained() -> None:
    with Conveyer([Range(64), DistributedBatchedMap(slow_function, 2, in_order=False), Collate(4)], block_size=4) as pipeline:
        found = pipeline.explain(items=8, seconds=LONG)
        assert pipeline.stats() == {}
    assert [(stage.name, stage.num_out) for stage in found.stages] == [
        ("Range(64)", 8),
        ("DistributedBatchedMap(spun, 2, in_order=False)", 8),
        ("Collate(4)", 2),
    ]
    assert found.bottleneck == "decode"
