"""What workers give and how they fail: each item has its own outcome, promptly, and no process is left over."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch

from shmload import sample_info, sample_rng
from shmload.errors import SampleError, SampleTimeout, WorkerDied
from shmload.pipeline import (
    Bucket,
    Collate,
    Conveyer,
    DistributedBatchedMap,
    Enumerate,
    Filter,
    FlatMap,
    Items,
    Join,
    Map,
    Permutation,
    Range,
    Scan,
    Skip,
    Stream,
    Take,
)
from shmload.schedule.state_checksum import with_checksum
from tests.pipeline import worker_items as items
from tests.pipeline.pipeline_kit import Add, plain, pulled

slow = pytest.mark.slow(reason="workers die or exceed a time limit, and are replaced")
PROMPT_S = 60.0  # limit for a failure to surface on a busy machine, in addition to its own time; nothing waits longer


def make(function: Any, *more: Any, n: int = 8, n_workers: int = 2, timeout: Any = 3600, **options: Any) -> Conveyer:
    stage = DistributedBatchedMap(function, n_workers, timeout=timeout)
    return Conveyer([Range(n, repeating=False), stage, *more], **options)


def outcomes(pipeline: Conveyer) -> list[Any]:
    """Returns the result of each call up to the end, with an exception in place of a lost item."""
    got: list[Any] = []
    while not pipeline.is_ended:
        try:
            got.append(plain(pipeline()))
        except Exception as error:
            got.append(error)
    return got


def all_but(lost: int, given: list[Any]) -> list[Any]:
    return given[:lost] + given[lost + 1 :]


@pytest.mark.parametrize("n_workers", [0, 2])
def test_exception_names_the_item_and_the_others_follow(n_workers: int) -> None:
    stages = [DistributedBatchedMap(items.fails_at_3, 2)] if n_workers else [Map(items.fails_at_3)]
    with Conveyer([Range(8, repeating=False), *stages]) as pipeline:
        for got in (outcomes(pipeline), (pipeline.begin_next_epoch(), outcomes(pipeline))[1]):
            assert all_but(3, got) == [[x] for x in range(8) if x != 3]
            assert isinstance(got[3], KeyError)
    message = str(got[3]) + "".join(getattr(got[3], "__notes__", []))
    assert "broken 3" in message
    assert ", of item 3 of epoch 1" in message
    if n_workers:
        assert "in fails_at_3" in message, "the worker's traceback is missing"


@pytest.mark.parametrize("n_workers", [0, 2])
def test_exception_of_a_batch_names_the_item_and_other_batches_follow(n_workers: int) -> None:
    stages = [DistributedBatchedMap(items.fails_at_3, 2)] if n_workers else [Map(items.fails_at_3)]
    with Conveyer([Range(8), *stages, Collate(2)]) as pipeline:
        got = []
        for _ in range(8):
            try:
                got.append(pipeline().tolist())
            except KeyError as error:
                got.append(error)
    assert got[:1] + got[2:5] + got[6:] == [[0, 1], [4, 5], [6, 7], [0, 1], [4, 5], [6, 7]]
    assert ", of item 3 of epoch 1" in str(got[5]) + "".join(got[5].__notes__)


def test_error_of_an_item_names_its_batch() -> None:
    """Counts steps by their first position, which is not the number of a batch."""
    with Conveyer([Range(8), DistributedBatchedMap(items.fails_at_3, 1), Collate(2)]) as pipeline:
        assert pulled(pipeline, 1) == [[0, 1]]
        with pytest.raises(KeyError) as caught:
            pipeline()
    assert "shmload: sample 3, epoch 0, batch 1" in caught.value.__notes__


def test_item_of_a_join_is_named_by_its_member() -> None:
    joined = Join([(Conveyer([Range(4)]), 1), (Conveyer([Range(4), Map(items.fails_at_3)]), 1)])
    with Conveyer([joined, DistributedBatchedMap(Add(0), 1)]) as pipeline:
        pulled(pipeline, 7)
        with pytest.raises(KeyError, match="shmload: item 3 of epoch 0 of member 1"):
            pipeline()


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize("collate", [(), (Collate(1),)])
def test_stop_iteration_from_a_function_does_not_end_the_pipeline(n_workers: int, collate: Any) -> None:
    stages = [DistributedBatchedMap(items.stops_at_3, 1)] if n_workers else [Map(items.stops_at_3)]
    with Conveyer([Range(8, repeating=False), *stages, *collate]) as pipeline:
        got = outcomes(pipeline)
    assert len(got) == 8
    assert isinstance(got[3], RuntimeError)
    name = "DistributedBatchedMap" if n_workers else "Map"
    assert f"the function of stage 1 ({name}) raised StopIteration" in str(got[3])
    assert ", of item 3 of epoch 0" in str(got[3]) + "".join(getattr(got[3], "__notes__", ()))


@pytest.mark.parametrize("n_workers", [0, 1])
def test_stop_iteration_after_collate_does_not_end_the_pipeline(n_workers: int) -> None:
    def stops(batch: torch.Tensor) -> torch.Tensor:
        if 5 in batch:
            raise StopIteration
        return batch

    stages = [DistributedBatchedMap(Add(0), 1)] if n_workers else []
    with Conveyer([Range(8, repeating=False), *stages, Collate(2), Map(stops)]) as pipeline:
        got = outcomes(pipeline)
    assert got[:2] + got[3:] == [[0, 1], [2, 3], [6, 7]]
    assert f"the function of stage {2 + n_workers} (Map) raised StopIteration" in str(got[2])
    assert got[2].__notes__ == [f"shmload: stage {2 + n_workers} (Map), of batch 2, whose step begins with item 4 of epoch 0"]


def test_stop_iteration_after_collate_does_not_end_a_members_epoch_in_a_join() -> None:
    def stops(batch: torch.Tensor) -> torch.Tensor:
        if 3 in batch:
            raise StopIteration
        return batch

    member = Conveyer([Range(6, repeating=False), Collate(2), Map(stops)])
    with Join([(member, 1)], stop="all") as pipeline:
        got = outcomes(pipeline)
    assert [[0, 1], RuntimeError, [4, 5]] == [each if isinstance(each, list) else type(each) for each in got]


def test_failing_batch_function_loses_only_its_batch() -> None:
    def fails(batch: torch.Tensor) -> list[int]:
        if 3 in batch:
            raise ValueError("no")
        return batch.tolist()

    with Conveyer([Range(6, repeating=False), Collate(2), Map(fails)]) as pipeline:
        assert [type(got) for got in outcomes(pipeline)] == [list, ValueError, list]


@slow
@pytest.mark.parametrize("collate", [(), (Collate(2),)])
def test_only_the_item_that_kills_its_worker_twice_is_lost_promptly(collate: Any) -> None:
    with make(items.kills_at_3, *collate) as pipeline:
        lost = 1 if collate else 3
        pulled(pipeline, lost)
        began = monotonic()
        with pytest.raises(WorkerDied, match="ended its worker twice") as caught:
            pipeline()
        assert monotonic() - began < PROMPT_S
        assert "shmload: item 3 of epoch 0" in "".join(caught.value.__notes__)
        rest = [plain(got) for got in pipeline]
    assert rest == ([[4, 5], [6, 7]] if collate else [[4], [5], [6], [7]])


@slow
@pytest.mark.parametrize("collate", [(), (Collate(2),)])
def test_worker_killed_once_loses_nothing(collate: Any, tmp_path: Any) -> None:
    with make(items.KillsOnce(str(tmp_path)), *collate) as pipeline:
        assert [x for got in pipeline for x in plain(got)] == list(range(8))
        assert (tmp_path / "killed").exists()


@slow
@pytest.mark.parametrize("collate", [(), (Collate(2),)])
def test_item_that_times_out_is_lost_and_its_traceback_is_shown(collate: Any) -> None:
    with make(items.hangs_at_3, *collate, timeout=0.2) as pipeline:
        lost = 1 if collate else 3
        pulled(pipeline, lost)
        began = monotonic()
        with pytest.raises(SampleTimeout, match="in hangs_at_3") as caught:
            pipeline()
        assert monotonic() - began < 0.2 + PROMPT_S
        assert "shmload: item 3 of epoch 0; sample_timeout_s is the timeout of" in "".join(caught.value.__notes__)
        rest = [plain(got) for got in pipeline]
    assert rest == ([[4, 5], [6, 7]] if collate else [[4], [5], [6], [7]])


@slow
@pytest.mark.parametrize("n_workers", [1, 2])
def test_all_failing_items_raise_one_by_one(n_workers: int) -> None:
    with make(items.kills_at_3, n=1000, n_workers=n_workers) as pipeline:
        pipeline.load_state(with_checksum({**pipeline.state(), "position": 3}))
        for _ in range(2):
            with pytest.raises(WorkerDied):
                pipeline()
            assert pipeline.state()["position"] == 4
            pipeline.load_state(with_checksum({**pipeline.state(), "position": 3}))


@pytest.mark.slow(reason="pulls 200 items through a worker")
def test_only_the_item_that_cannot_be_pickled_is_lost() -> None:
    with make(items.unsendable_at_70, n=200, n_workers=1) as pipeline:
        got = outcomes(pipeline)
    assert len(got) == 200
    assert isinstance(got[70], SampleError)
    assert all_but(70, got) == [[x] for x in range(200) if x != 70]


def test_failing_item_of_an_endless_pipeline_without_workers_raises_in_its_place() -> None:
    with Conveyer([Range(1), Map(items.fails_at_3), Map(Add(3)), Map(items.fails_at_3)]) as pipeline:
        for _ in range(3):
            with pytest.raises(KeyError, match="broken 3"):
                pipeline()


class InterruptedOnce:
    def __init__(self) -> None:
        self.is_over = False

    def __call__(self, x: int) -> int:
        if x == 3 and not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("collate", [(), (Collate(2),)])
def test_interrupt_loses_nothing(collate: Any) -> None:
    with Conveyer([Range(6, repeating=False), Map(InterruptedOnce()), *collate]) as pipeline:
        got = []
        with pytest.raises(KeyboardInterrupt):
            while True:
                got.append(pipeline())
        got += pipeline
    assert [x for item in got for x in plain(item)] == list(range(6))


def add_up(total: int, x: int) -> tuple[int, tuple[int, int]]:
    interrupt_once(x)
    return total + x, (x, total)


_interrupted: set[int] = set()


def interrupt_once(x: int) -> bool:
    if x == 5 and x not in _interrupted:
        _interrupted.add(x)
        raise KeyboardInterrupt
    return True


@pytest.mark.parametrize("stage", [Filter(interrupt_once), Scan(add_up, 0)], ids=["Filter", "Scan"])
@pytest.mark.parametrize("source", [Items(list(range(12))), Stream(list(range(12)))], ids=["Items", "Stream"])
def test_interrupt_of_a_step_that_spans_blocks_loses_nothing(source: Any, stage: Any) -> None:
    """Neither the items of the step nor what a Scan carries; a state is that of the start of the step."""

    def listed(batch: Any) -> Any:
        return [part.tolist() for part in batch]

    def made() -> Conveyer:
        return Conveyer([source, stage, Collate(6)], block_size=4)

    _interrupted.add(5)
    with made() as pipeline:
        expected = list(map(listed, pipeline))
    _interrupted.clear()
    with made() as pipeline, made() as resumed:
        with pytest.raises(KeyboardInterrupt):
            pipeline()
        resumed.load_state(pipeline.state())
        assert list(map(listed, pipeline)) == expected
        assert list(map(listed, resumed)) == expected


class InterruptedBatch:
    """Changes batches in place, and is interrupted in one of them."""

    def __init__(self) -> None:
        self.is_over = False

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        batch += 100
        if 104 in batch.tolist() and not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        return batch


@pytest.mark.parametrize(
    "stages", [[], [Filter(lambda _: True)], [DistributedBatchedMap(Add(0), 1)]], ids=["keyed", "blocks", "worker"]
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_interrupt_in_a_function_of_batches_loses_and_repeats_no_batch(stages: list[Any], is_stream: bool) -> None:
    def made() -> Conveyer:
        source = Stream(list(range(12))) if is_stream else Range(12, repeating=False)
        return Conveyer([source, *stages, Collate(3), Map(InterruptedBatch())], block_size=4)

    with made() as pipeline, made() as resumed:
        got = [pipeline().tolist()]
        with pytest.raises(KeyboardInterrupt):
            pipeline()
        resumed.engine.plan.trainer_batch_stages[0].function.is_over = True
        resumed.load_state(pipeline.state())
        rest = [batch.tolist() for batch in pipeline]
        assert [x - 100 for batch in got + rest for x in batch] == list(range(12))
        assert [batch.tolist() for batch in resumed] == rest


def test_interrupt_in_a_member_of_a_join_keeps_the_turns() -> None:
    def member(first: int) -> Conveyer:
        return Conveyer([Items(list(range(first, first + 6))), Collate(2), Map(InterruptedBatch())])

    join, got = Join([(member(0), 1), (member(10), 1)]), []
    for _ in range(7):
        with suppress(KeyboardInterrupt):
            got.append((join() - 100).tolist())
    assert got == [[0, 1], [10, 11], [2, 3], [12, 13], [4, 5], [14, 15]]


class InterruptedIterator:
    """Iterates over numbers, and goes on after an interrupt."""

    def __init__(self) -> None:
        self.next, self.is_over = 0, False

    def __iter__(self) -> InterruptedIterator:
        return self

    def __next__(self) -> int:
        if self.next == 6 and not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        if self.next == 12:
            raise StopIteration
        self.next += 1
        return self.next - 1


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("steps", [(), (Skip(1), Take(9), Enumerate())], ids=["plain", "steps"])
def test_interrupt_while_a_stream_is_read_loses_nothing(steps: Any, num_workers: int) -> None:
    work = [DistributedBatchedMap(items.unchanged, num_workers)] if num_workers else []
    with Conveyer([Stream(InterruptedIterator), *steps, *work], block_size=4) as pipeline:
        got, num_interrupts = [], 0
        while True:
            try:
                got.append(pipeline())
            except KeyboardInterrupt:
                num_interrupts += 1
            except StopIteration:
                break
    assert num_interrupts == 1
    assert got == ([(number, number + 1) for number in range(9)] if steps else list(range(12)))


# ------------------------------------------------------------ results


def test_single_items_keep_their_kinds() -> None:
    with make(items.as_array, n=3) as pipeline:
        assert [type(item) for item in pipeline] == [np.ndarray] * 3
    with make(Add(1), n=3) as pipeline:
        assert [(type(item), item) for item in pipeline] == [(int, 1), (int, 2), (int, 3)]
    with make(items.mixed, n=3) as pipeline:
        *_, item = pipeline
    assert [type(value) for value in item.values()] == [np.ndarray, str, set, int, torch.Tensor, np.ndarray]
    assert (item["object"], item["text"], item["ragged"].tolist()) == ({2}, "item 2", [0, 1])


def test_batches_stack_fields_where_possible_and_list_the_rest() -> None:
    with make(items.mixed, Collate(3), n=3) as pipeline:
        (batch,) = pipeline
    assert [part.tolist() for part in batch["ragged"]] == [[], [0], [0, 1]]
    assert batch["text"] == ["item 0", "item 1", "item 2"]
    assert batch["object"] == [{0}, {1}, {2}]
    assert (batch["number"].tolist(), tuple(batch["tensor"].shape)) == ([0, 1, 2], (3, 2))


def test_ragged_fields_can_be_padded() -> None:
    with make(items.mixed, Collate(3, ragged={"ragged": "pad"}), n=3) as pipeline:
        (batch,) = pipeline
    assert batch["ragged"].lengths.tolist() == [0, 1, 2]


@pytest.mark.parametrize("n_workers", [0, 1])
def test_decoder_writes_into_the_batch(n_workers: int) -> None:
    stage: Any = DistributedBatchedMap(items.Squares(), 1) if n_workers else Map(ReadsOnly())
    with Conveyer([Range(6, repeating=False), Map(Add(1)), stage, Collate(4)]) as pipeline:
        batches = list(pipeline)
    assert [batch["x"].tolist() for batch in batches] == [[1, 4, 9, 16], [25, 36]]
    assert batches[0]["row"].tolist() == [[x] * 3 for x in range(1, 5)]


class ReadsOnly(items.Squares):
    def __call__(self, x: int) -> None:
        raise AssertionError("read_into comes first")


@pytest.mark.parametrize("n_workers", [0, 1])
def test_decoder_that_fails_names_the_item(n_workers: int) -> None:
    stage: Any = DistributedBatchedMap(items.Squares(), 1) if n_workers else Map(ReadsOnly())
    with Conveyer([Range(51), stage, Collate(1)]) as pipeline:
        pulled_x = [batch["x"].item() for batch in islice(pipeline, 50)]
        assert pulled_x == [x * x for x in range(50)]
        with pytest.raises(ValueError, match="no picture") as caught:
            pipeline()
        assert ", of item 50 of epoch 0" in str(caught.value) + "".join(caught.value.__notes__)


def test_batches_stay_valid_after_the_pipeline_is_closed() -> None:
    with make(Add(0), Collate(4)) as pipeline:
        batches = list(pipeline)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# ------------------------------------------------------------ ends and copies


def test_closed_pipeline_refuses_to_read() -> None:
    with make(Add(0), n=100) as pipeline:
        for item in pipeline:
            if item == 5:
                pipeline.close()
                break
        for _ in range(2):
            with pytest.raises(RuntimeError, match="this pipeline is closed: make a new one"):
                pipeline()
    pipeline.close()


def test_unreferenced_pipeline_ends_its_workers() -> None:
    pipeline = make(Add(0), n=100)
    assert pipeline() == 0
    del pipeline  # the check after every test finds leftovers


def test_copy_continues_at_the_position_of_the_original() -> None:
    with make(items.as_dict, n=20) as pipeline:
        pulled(pipeline, 7)
        with pickle.loads(pickle.dumps(pipeline)) as copy:
            assert [item["x"] for item in copy] == list(range(7, 20))
        assert pipeline.state()["position"] == 7


@pytest.mark.slow(reason="starts workers, by spawn and forkserver, too")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("collate", [(), (Collate(2),)])
def test_every_start_method_takes_functions_of_modules(method: str, collate: Any) -> None:
    joined = Join([(Conveyer([Range(4, repeating=False), Map(Add(1))]), 1)])
    with Conveyer([joined, DistributedBatchedMap(items.fails_at_3, 1), *collate], multiprocessing_context=method) as pipeline:
        assert plain(pipeline())[0] == 1


@pytest.mark.parametrize(
    ("stages", "where"),
    [
        ([Range(3), DistributedBatchedMap(lambda x: x, 1)], "stage 1 (DistributedBatchedMap)"),
        ([Range(3), Map(lambda x: x), DistributedBatchedMap(Add(1), 1)], "stage 1 (Map)"),
        ([Join([(Conveyer([Range(3), Map(lambda x: x)]), 1)]), DistributedBatchedMap(Add(1), 1)], "stage 1 (Map) of member 0"),
    ],
)
def test_error_for_a_lambda_in_spawned_workers_names_the_stage(stages: list[Any], where: str) -> None:
    with Conveyer([*stages, Collate(1), Map(lambda b: b)], multiprocessing_context="spawn") as pipeline:
        with pytest.raises(TypeError, match="workers started by spawn or forkserver receive the dataset") as caught:
            pipeline()
        assert (
            f"dataset.{'_source._programs[0].' * ('member' in where)}_stages['{where}'].function (function) cannot be pickled"
            in str(caught.value)
        )
        assert "define functions at module level" in str(caught.value)


class RecordsSampleInfo:
    def __call__(self, x: int) -> int:
        info = sample_info()
        assert info is not None
        return info.index


def drawn(x: int) -> tuple[Any, ...]:
    """An item with numbers from every generator that workers key, and the process that drew them."""
    return x, random.random(), float(np.random.rand()), float(torch.rand(1)), float(sample_rng().random()), os.getpid()


def first(item: tuple[Any, ...]) -> int:
    return int(item[0])


def up_to_twice(x: int) -> Iterator[int]:
    yield from [x] * (x % 3)


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([Permutation(30, seed=3), DistributedBatchedMap(drawn, 2)], id="single items"),
        pytest.param([Permutation(30, seed=3), DistributedBatchedMap(drawn, 2), Collate(4)], id="batches"),
        pytest.param([Permutation(30, seed=3), FlatMap(up_to_twice), DistributedBatchedMap(drawn, 2), Collate(4)], id="blocks"),
        pytest.param([Stream(partial(range, 30), seed=3), DistributedBatchedMap(drawn, 2)], id="a stream"),
        pytest.param([Range(30, seed=3), DistributedBatchedMap(drawn, 2), Filter(all), Bucket(first, [15], 4)], id="buckets"),
    ],
)
def test_threads_make_the_items_of_processes(stages: list[Any]) -> None:
    def read(pipeline: Conveyer, most: int) -> list[Any]:
        given = [[torch.as_tensor(field).tolist() for field in item] for item in islice(pipeline, most)]
        in_this_process = [np.all(np.equal(pids, os.getpid())) for *_, pids in given]
        assert all(in_this_process) if backend == "thread" else not any(in_this_process)
        return [fields for *fields, _ in given]

    made = {}
    for backend in ("process", "thread"):
        with Conveyer(stages, backend=backend) as pipeline:
            made[backend] = read(pipeline, 4)
            state = pipeline.state_dict()
            made[backend] += read(pipeline, 2)
        with Conveyer(stages, backend=backend) as resumed:
            resumed.load_state_dict(state)
            assert read(resumed, 2) == made[backend][4:]
    assert len(made["thread"]) == 6
    assert made["thread"] == made["process"]


def test_sample_info_key_differs_in_every_epoch() -> None:
    with Conveyer([Range(3), DistributedBatchedMap(RecordsSampleInfo(), 1)]) as pipeline:
        assert list(islice(pipeline, 7)) == list(range(7))
