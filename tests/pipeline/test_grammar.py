"""The legal order of stages and the errors for others; arguments of stages; options."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import shmload.pipeline
from shmload import ShmLoader
from shmload.pipeline import (
    Bucket,
    Cache,
    Collate,
    Conveyer,
    DistributedBatchedMap,
    Enumerate,
    Filter,
    Generate,
    Items,
    Join,
    Map,
    Pack,
    Partition,
    Permutation,
    Range,
    Scan,
    Stream,
)
from tests.pipeline import worker_items as items
from tests.pipeline.pipeline_kit import Add, pulled

WORK = DistributedBatchedMap(Add(1), 1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "a Stream, a Zip, a Chain, an Interleave or a Join; got no stages"),
        ([Map(Add(1))], "a pipeline begins with a Range, a Permutation, Items, a Generate, a Stream"),
        ([Map(Add(1))], "a Chain, an Interleave or a Join; stage 0 is Map"),
        (None, "Conveyer takes a list of stages, or a pipeline as methods make it; got NoneType"),
        (Conveyer([Range(3, repeating=False)]), "Conveyer takes a list of stages, or a pipeline as methods make it; got Conveyer"),
        ([[1, 2]], "stage 0 is list"),
        ([Range(3), Range(3)], "stage 1, Range, gives items of its own, so it can only be the first"),
        ([Range(3), Join([(Conveyer([Range(3)]), 1)])], "stage 1, Join, gives items of its own"),
        ([Range(3), Add(1)], "stage 1, Add, is not a stage: for a function, give Map(function)"),
        ([Range(3), Partition(0, 2), Map(Add(1)), Partition(1, 2)], "stage 3, Partition, is the second of its kind"),
        ([Range(3), Collate(2), Partition(0, 2)], "stage 2, Partition, comes after Collate, where only Map can be: each rank has"),
        ([Range(3), Collate(2), WORK], "stage 2, DistributedBatchedMap, comes after Collate, where only Map can be: workers make"),
        ([Range(3), Collate(2), Collate(2)], "stage 2, Collate, comes after Collate, where only Map can be: a batch is not an item"),
        ([Range(3), Bucket(len, (1,), 2), Partition(0, 2)], "stage 2, Partition, comes after Bucket, where only Map can be: each rank"),
        ([Range(3), Collate(2), Scan(max, 0)], "stage 2, Scan, comes after Collate, where only Map can be: it carries a state"),
        (
            [Range(3), DistributedBatchedMap(items.Squares(), 1), Map(Add(1)), Collate(1)],
            "stage 2, Map, follows one that decodes into the batch (read_into): that must be the last before Collate",
        ),
        ([Range(3), DistributedBatchedMap(items.Squares(), 1)], "a mapping_fn with read_into decodes into a batch's row: add Collate"),
    ],
)  # fmt: skip
def test_illegal_stage_order_is_refused_with_the_reason(stages: list[Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Conveyer(stages)
    assert message in str(caught.value)


async def later(item: Any) -> Any:
    return item


class Later:
    async def __call__(self, item: Any) -> Any:
        return item


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Permutation(0), r"Permutation\(n_elements\) must be an integer from 1 to 4611686018427387904; got 0"),
        (lambda: Range(True), r"Range\(n_elements\) must be an integer"),
        (lambda: Range(2.0), r"Range\(n_elements\) must be an integer"),
        (lambda: Range(2, seed=-1), r"Range\(seed\) must be an integer from 0 to 18446744073709551615; got -1"),
        (lambda: Range(2, repeating=1), r"Range\(repeating\) must be True or False; got 1"),
        (lambda: Partition(2, 2), r"Partition\(rank\) must be an integer from 0 to 1; got 2"),
        (lambda: Partition(0, 0), r"Partition\(n_ranks\) must be an integer from 1 to"),
        (lambda: Partition(0, 2, uneven="fair"), r'Partition\(uneven\) is "pad", "drop" or "exact"; got \'fair\''),
        (lambda: Map(3), r"Map\(fn\) must be a function of one item; got 3"),
        (lambda: Map(later), r"Map\(fn\) does not await coroutine functions, and .*later.* is one: give it to AsyncMap"),
        (lambda: Items([1]).filter(partial(later)), r"Filter\(fn\) does not await coroutine functions"),
        (lambda: Items([1]).map(Later(), workers=2), r"DistributedBatchedMap\(mapping_fn\) does not await coroutine functions"),
        (lambda: DistributedBatchedMap(3, 1), r"DistributedBatchedMap\(mapping_fn\) must be a function of one item; got 3"),
        (lambda: DistributedBatchedMap(str, 0), r"DistributedBatchedMap\(n_workers\) must be an integer from 1"),
        (lambda: DistributedBatchedMap(str, 1, 0), r"DistributedBatchedMap\(buffer_size\) must be an integer from 1"),
        (lambda: DistributedBatchedMap(str, 1, timeout=0), r"DistributedBatchedMap\(timeout\) is a number of seconds above 0"),
        (lambda: DistributedBatchedMap(str, 1, timeout=float("nan")), r"above 0 or None; got nan"),
        (lambda: DistributedBatchedMap(str, 1, timeout="1"), r"above 0 or None; got '1'"),
        (lambda: Collate(0), r"Collate\(batch_size\) must be an integer from 1 to"),
        (lambda: Collate(2, "no"), r"Collate\(return_partial_batch\) must be True or False; got 'no'"),
        (lambda: Collate(2, ragged="padded"), r'ragged is "list", "pad", .* got \'padded\''),
        (lambda: Bucket(len, (1,), 2, ragged="padded"), r'ragged is "list", "pad", .* got \'padded\''),
        (lambda: Bucket(len, 5, 2), r"Bucket\(boundaries\) are whole numbers; got 5"),
        (lambda: Bucket(len, [1.5, 4], 2), r"Bucket\(boundaries\) are whole numbers; got \[1.5, 4\]"),
        (lambda: Pack(4, pad=1.5), r"Pack\(pad\) must be an integer from"),
        (lambda: Enumerate("a"), r"Enumerate\(start\) must be an integer from"),
        (lambda: Join([(Range(3), 1)], seed=-1), r"Join\(seed\) must be an integer from 0"),
        (lambda: Items([1], repeating="no"), r"Items\(repeating\) must be True or False; got 'no'"),
        (lambda: Items(np.array(3)), r"Items needs something with a length that is indexed by 0, 1, .*; got ndarray"),
        (lambda: Generate(abs, 3, repeating=1), r"Generate\(repeating\) must be True or False; got 1"),
        (lambda: DistributedBatchedMap(str, 1, in_order="no"), r"DistributedBatchedMap\(in_order\) must be True or False; got 'no'"),
        (lambda: Cache(5), r"Cache takes the path of a folder and a word; got 5"),
        (lambda: Items([1]).map(str, timeout=2), r"map\(timeout\) needs workers: also give their number, as in map\(fn, workers=2\)"),
        (lambda: Items([1]).map(str, num_workers=2), r"^map\(\) has no argument 'num_workers': it takes workers=, a number of proc"),
        (lambda: Items([1]).batch(2, drop_last=True), r"^batch\(\) has no argument 'drop_last': give return_partial_batch=False$"),
        (lambda: Items([1]).batch(2, size=True), r"^batch\(\) has no argument 'size': it takes batch_size, return_partial"),
        (lambda: ShmLoader(Items([1]).batch(2)), r"a source or pipeline \(Pipeline\) is itself a loader: iterate it"),
        (lambda: ShmLoader(Items([1]), seed=1), r"a source or pipeline \(Items\) is itself a loader: iterate it"),
        (lambda: Conveyer([Stream([1])], block_size=0), r"Conveyer\(block_size\) must be an integer from 1 to .*; got 0"),
    ],
)  # fmt: skip
def test_invalid_argument_is_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_numpy_integers_are_accepted_and_states_stay_json() -> None:
    import json

    stages = [Permutation(np.int64(6), seed=np.uint8(3)), Partition(np.int32(0), np.int32(2)), Collate(np.int16(2))]
    with Conveyer(stages) as pipeline:
        assert json.loads(json.dumps(pipeline.state())) == pipeline.state()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="Conveyer takes of ShmLoader's arguments audit, backend, max_bad"):
        Conveyer([Range(3)], shuffle=True)
    with pytest.raises(ValueError, match=r"^backend='thread' needs a stage with workers, such as map\(fn, workers=2\)"):
        Conveyer([Range(3)], backend="thread")
    with pytest.raises(ValueError, match="max_bad, on_error is for batches: a single item that fails raises at its turn"):
        Conveyer([Range(3)], on_error="skip", max_bad=3)


def test_partition_may_come_anywhere_before_collate() -> None:
    streams = []
    for at in range(3):
        stages: list[Any] = [Map(Add(1)), Map(Add(2))]
        stages.insert(at, Partition(1, 2))
        with Conveyer([Range(12), *stages, Collate(2)]) as pipeline:
            streams.append(pulled(pipeline, 4))
    assert streams == [[[5, 6], [9, 10], [13, 14], [5, 6]]] * 3


def test_several_worker_stages_share_one_pool() -> None:
    pool = Conveyer([Range(9), WORK, DistributedBatchedMap(Add(2), 2, 40, timeout=5)]).plan.pool
    assert (pool.num_workers, pool.buffer_size, pool.timeout_s) == (3, 40, 3605)


def test_names_are_those_of_the_conveyer_library() -> None:
    assert sorted(shmload.pipeline.__all__) == shmload.pipeline.__all__
    seed = {"Permutation", "Partition", "Map", "DistributedBatchedMap", "Collate", "Conveyer", "Join", "Range"}
    assert seed < set(shmload.pipeline.__all__)


@pytest.mark.parametrize(
    "stages", [[Range(9)], [Range(9), Filter(bool)], [Range(9), DistributedBatchedMap(str, 1, in_order=False)], [Stream([1, 2])]]
)
def test_every_pipeline_is_a_plain_conveyer(stages: list[Any]) -> None:
    assert type(Conveyer(stages)) is Conveyer
