"""An actor's work, without Ray: any part of a batch has the same rows as the whole batch."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload._core.filler import DONE, ERROR
from shmload.batch.ragged import AS_TORCH_OR_LIST
from shmload.ray.messages import ActorSetting, Task
from shmload.ray.worker_actor import READ_ONLY, WorkerActor
from shmload.worker.failure import Failure
from shmload.worker.job import Job, WorkerLink
from shmload.worker.read_plan import plan_of
from shmload.worker.sample_rng import generators_kept
from tests.ray.ray_datasets import Counting, Failing, InPlace, Rows, Texts
from tests.ray.stuck_datasets import AtOnce, RowsAtOnce
from tests.shm.travel_kit import received

AREA = 16384
LINK = WorkerLink(1, 2, os.getpid(), "", 0, "", "", "", 0, (), "", 0)


def decoder(dataset: Any, ragged: str = AS_TORCH_OR_LIST, **of_job: Any) -> WorkerActor:
    plan = plan_of(dataset, collate_fn=None, auto_collation=True, ragged=ragged, is_torch=True)
    job = Job(dataset, None, None, True, 3, False, plan=plan, **of_job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shmload.ray.worker_actor._name_classes_of_main", lambda: None)
        patch.setattr("shmload.ray.worker_actor.set_up", lambda job, link: (job, None, None))
        return decoder_with_job(received(job))


def decoder_with_job(pickled_job: Any) -> WorkerActor:
    """Returns an actor that has received this job."""
    made = WorkerActor(ActorSetting(LINK, (), AREA, 4 * AREA))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shmload.ray.worker_actor._fetched", lambda reference: reference)
        made.start([pickled_job])
    return made


def part(keys: list[int], first: int, end: int, *, is_pickled: bool = False) -> Task:
    order = pickle.dumps(keys) if is_pickled else np.array(keys, np.int64).tobytes()
    return Task(0, 0, first, end, len(keys), order, is_pickled, False)


def fields(worker: WorkerActor, task: Task) -> list[bytes]:
    """Returns the bytes of a task's rows, field by field, without the gaps between fields."""
    outcome = worker.work(task)
    assert outcome.own == DONE
    assert outcome.row_nbytes is not None
    found, at, num_rows = [], 0, task.end - task.first
    for nbytes in outcome.row_nbytes:
        found.append(outcome.payload[at : at + num_rows * nbytes].tobytes())
        at += -(-num_rows * nbytes // 64) * 64
    return found


@given(st.data(), st.booleans(), st.sampled_from([Rows, InPlace]))
def test_parts_of_an_order_give_the_rows_of_the_whole(data: st.DataObject, is_pickled: bool, kind: Any) -> None:
    keys = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=20))
    cut = data.draw(st.integers(0, len(keys) - 1))
    worker = decoder(kind())
    whole = fields(worker, part(keys, 0, len(keys), is_pickled=is_pickled))
    head = fields(worker, part(keys, 0, cut)) if cut else [b""] * len(whole)
    tail = fields(worker, part(keys, cut, len(keys), is_pickled=is_pickled))
    assert whole == [one + other for one, other in zip(head, tail, strict=True)]


def test_order_larger_than_its_area_is_read_as_a_whole() -> None:
    images, _ = fields(decoder(InPlace(2000)), part([number % 7 for number in range(1500)], 0, 1500))
    assert np.frombuffer(images, np.uint8).reshape(1500, 20)[:, 0].tolist() == [n % 7 for n in range(1500)]


def test_samples_without_fixed_rows_are_packed_and_marked_as_packed() -> None:
    outcome = decoder(Texts(), ragged="list").work(part([3, 1], 0, 2))
    assert (outcome.own, outcome.row_nbytes, outcome.layout) == (DONE, None, b"")
    assert outcome.payload.nbytes > 0


def test_unreadable_row_is_named_by_its_position_in_the_whole_batch() -> None:
    with generators_kept():
        outcome = decoder(Failing(), tolerates_bad_samples=True).work(part([5, 6, 7, 8], 2, 4))
    failure = Failure.loads(outcome.error)
    assert (outcome.own, failure.kind, failure.rows) == (ERROR, KeyError, (2,))


@pytest.mark.parametrize("kind", [AtOnce, RowsAtOnce])
def test_rows_that_killed_an_actor_are_then_read_one_by_one(kind: Any) -> None:
    worker = decoder(kind(""))
    rows = [fields(worker, part([3, 1, 2], 0, 3)._replace(is_suspect=is_suspect)) for is_suspect in (False, True)]
    assert rows[0] == rows[1]
    dataset = worker._loop._job.dataset
    assert dataset.asked == [[3, 1, 2], [3], [1], [2]]


@pytest.mark.parametrize("is_in_place", [False, True])
def test_error_of_a_dataset_that_writes_to_its_own_large_array_says_what_to_do(is_in_place: bool) -> None:
    outcome = decoder(Counting(is_in_place=is_in_place)).work(part([3], 0, 1))
    failure = Failure.loads(outcome.error)
    assert (outcome.own, failure.kind) == (ERROR, ValueError)
    assert failure.text.endswith("Copy an array before writing to it (array = array.copy()) in worker_init_fn or at its first use")
    small = decoder(Counting(1000, is_in_place=is_in_place))
    assert [np.frombuffer(fields(small, part([3], 0, 1))[0], np.int64)[0] for _ in range(2)] == [1, 2]


def test_unrelated_errors_do_not_mention_arrays() -> None:
    with generators_kept():
        outcome = decoder(Failing()).work(part([7], 0, 1))
    assert READ_ONLY not in Failure.loads(outcome.error).text


def test_job_that_cannot_be_unpickled_fails_every_task() -> None:
    worker = decoder_with_job(b"no pickle")
    for _ in range(2):
        outcome = worker.work(part([0], 0, 1))
        assert (outcome.own, Failure.loads(outcome.error).kind) == (ERROR, pickle.UnpicklingError)
