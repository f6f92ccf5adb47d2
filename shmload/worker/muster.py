"""Calling a crew together: each worker's post, and the job they share.

By fork the job is inherited. Else it is pickled once, into a segment that all workers unpickle in parallel; what plain pickle
cannot take but multiprocessing can (its locks and queues) travels with each process. Ray actors get it by value; where processes of
this machine work beside them, each kind has it in its own way.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shmload._core.mapping import Mapping
from shmload.shm.doorbell import Doorbell
from shmload.shm.group import Group
from shmload.shm.segment import Segment
from shmload.worker.crew import ProcessCrew, context_of, pickled_once
from shmload.worker.fork_hazards import warn_of_fork
from shmload.worker.spec import Invitation, Job, Post

if TYPE_CHECKING:
    from shmload.ray.crew import JointCrew, RayCrew


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
    address: str | None = None,
    num_local_workers: int = 0,
    num_ahead: int = 1,
    connect_timeout_s: float = 60.0,
    sample_timeout_s: float | None = None,
    affinity: Sequence[int] = (),
) -> ProcessCrew | RayCrew | JointCrew:
    """The crew of a ring, not started.

    Args:
        orders: one bell for all workers, or one for each; or two, one for all actors and one for all processes beside them.
        stacks: where workers write their Python stacks when asked to, a segment each; one without cannot be asked.
        neighbours: rings of other ranks, in which workers help.
        resume: one pickled snapshot for each worker to go on from, or none at all.
        address: of the Ray cluster that decodes; None: this machine does.
        num_local_workers: of the workers, how many, the last ones, are this machine's where there is a cluster.
        num_ahead: batches that are ordered ahead for each worker; it, `connect_timeout_s` and `sample_timeout_s` matter to a Ray
            cluster alone.
        affinity: processors that workers may use; none: the trainer's.
    """
    num_far = 0 if address is None else num_workers - num_local_workers
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
    if address is None:
        return _processes(job, group, posts, multiprocessing_context, stacks)
    from shmload.ray.crew import RayCrew, pickled_by_value  # a kind of crew is imported when it is asked for

    actors = RayCrew(
        _with_parcel(group, "parcel", pickled_by_value(job), posts[:num_far]),
        address,
        is_seeded=job.seed is not None,
        num_ahead=num_ahead,
        connect_timeout_s=connect_timeout_s,
        num_beside=num_local_workers,
        sample_timeout_s=sample_timeout_s,
    )
    if num_far == num_workers:
        return actors
    from shmload.ray.crew import JointCrew

    processes = _processes(job, group, posts[num_far:], multiprocessing_context, stacks)
    return JointCrew(actors, processes, num_far)


def _processes(
    job: Job, group: Group, posts: list[Post], multiprocessing_context: Any, stacks: dict[int, Segment]
) -> ProcessCrew:
    context = context_of(multiprocessing_context)
    travels = context.get_start_method() == "fork"
    if travels:
        warn_of_fork()
    else:
        parcel: bytes | None = pickled_once(job)
        if parcel is None:
            travels = True
        else:
            posts = _with_parcel(group, "parcel-local", parcel, posts)
    return ProcessCrew(posts, job, context, travels=travels, stacks=stacks)


def _with_parcel(group: Group, name: str, parcel: bytes | bytearray, posts: list[Post]) -> list[Post]:
    """The posts, with the job in a segment that all of them name."""
    segment = group.segment(name, len(parcel))
    memoryview(Mapping(segment.fd, len(parcel)))[:] = parcel
    return [dataclasses.replace(post, parcel_path=segment.path, parcel_nbytes=len(parcel)) for post in posts]


def num_actors(address: str | None) -> int:
    """How many actors a Ray cluster is asked for where it is to be found out.

    Raises:
        ClusterUnreachable: there is none.
    """
    from shmload.ray import cluster  # as in muster

    return cluster.num_actors(address or "auto")
