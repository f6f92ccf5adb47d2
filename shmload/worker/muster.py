"""Calling a crew together: each worker's post, and the job they share.

By fork the job is inherited. Else it is pickled once, into a segment that all workers unpickle in parallel; what plain pickle
cannot take but multiprocessing can (its locks and queues) travels with each process. Ray actors get it by value; where processes of
this machine work beside them, each kind has it in its own way.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from shmload._core.mapping import Mapping
from shmload.shm.doorbell import Doorbell
from shmload.shm.group import Group
from shmload.shm.segment import Segment
from shmload.worker.crew import Crew, ProcessCrew, context_of, pickled_once
from shmload.worker.fork_hazards import warn_of_fork
from shmload.worker.spec import Invitation, Job, Post


@dataclasses.dataclass(frozen=True)
class Called:
    """What a crew is made of: the job, a post for each worker, and what processes of this machine need besides.

    Attributes:
        stacks: where workers write their Python stacks when asked to, a segment each; one without cannot be asked.
        num_ahead: batches that are ordered ahead for each worker.
    """

    job: Job
    group: Group
    posts: list[Post]
    multiprocessing_context: Any
    stacks: dict[int, Segment]
    num_ahead: int = 1
    sample_timeout_s: float | None = None


Backend = Callable[[Called], Crew]  # where workers run


def muster(
    job: Job,
    group: Group,
    control: Segment,
    *,
    num_workers: int,
    multiprocessing_context: Any,
    base_seed: int,
    ready: Doorbell,
    orders: list[Doorbell],
    grants: Doorbell,
    resume: Sequence[bytes] = (),
    stacks: dict[int, Segment],
    neighbours: tuple[Invitation, ...] = (),
    num_far: int = 0,
    num_ahead: int = 1,
    sample_timeout_s: float | None = None,
    affinity: Sequence[int] = (),
) -> Called:
    """What a ring's crew is made of.

    Args:
        orders: one bell for all workers, or one for each; or two, one for those elsewhere and one for this machine's.
        stacks: where workers write their Python stacks when asked to, a segment each; one without cannot be asked.
        neighbours: rings of other ranks, in which workers help.
        resume: one pickled snapshot for each worker to go on from, or none at all.
        num_far: of the workers, how many, the first ones, are on other machines.
        num_ahead: batches that are ordered ahead for each worker.
        affinity: processors that workers may use; none: the trainer's.
    """
    posts = [
        Post(
            worker_id=worker_id,
            num_workers=num_workers,
            trainer_pid=os.getpid(),
            control_path=control.path,
            control_nbytes=control.nbytes,
            ready_bell=ready.name,
            orders_bell=orders[worker_id if len(orders) == num_workers else 0 if worker_id < num_far else -1].name,
            grants_bell=grants.name,
            base_seed=base_seed,
            affinity=tuple(affinity) or tuple(sorted(os.sched_getaffinity(0))),
            stack_path=stacks[worker_id].path if worker_id in stacks else "",
            neighbours=neighbours,
            resume=resume[worker_id] if resume else b"",
        )
        for worker_id in range(num_workers)
    ]
    return Called(job, group, posts, multiprocessing_context, stacks, num_ahead, sample_timeout_s)


def processes(called: Called) -> ProcessCrew:
    """A crew of processes of this machine, not started."""
    context, posts = context_of(called.multiprocessing_context), called.posts
    travels = context.get_start_method() == "fork"
    if travels:
        warn_of_fork()
    else:
        parcel: bytes | None = pickled_once(called.job)
        if parcel is None:
            travels = True
        else:
            posts = with_parcel(called.group, "parcel-local", parcel, posts)
    return ProcessCrew(posts, called.job, context, travels=travels, stacks=called.stacks)


def with_parcel(group: Group, name: str, parcel: bytes | bytearray, posts: list[Post]) -> list[Post]:
    """The posts, with the job in a segment that all of them name."""
    segment = group.segment(name, len(parcel))
    memoryview(Mapping(segment.fd, len(parcel)))[:] = parcel
    return [dataclasses.replace(post, parcel_path=segment.path, parcel_nbytes=len(parcel)) for post in posts]
