"""Calling a crew together: each worker's post, and the job they share.

By fork the job is inherited. Else it is pickled once, into a segment that all workers unpickle in parallel; what plain pickle
cannot take but multiprocessing can (its locks and queues) travels with each process. A crew of Ray actors gets it by value.
"""

from __future__ import annotations

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
    from shmload.worker.actors.crew import RayCrew


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
    stacks: Sequence[Segment] = (),
    neighbours: tuple[Invitation, ...] = (),
    address: str | None = None,
    num_ahead: int = 1,
    sample_timeout_s: float | None = None,
    affinity: Sequence[int] = (),
) -> ProcessCrew | RayCrew:
    """The crew of a ring, not started.

    Args:
        orders: one bell for all workers, or one for each.
        stacks: where workers write their Python stacks when asked to, a segment each; none: they cannot be asked.
        neighbours: rings of other ranks, in which workers help.
        resume: one pickled snapshot for each worker to go on from, or none at all.
        address: of the Ray cluster that decodes; None: this machine does.
        num_ahead: batches that are ordered ahead for each worker; it and `sample_timeout_s` matter to a Ray cluster alone.
        affinity: processors that workers may use; none: the trainer's.
    """
    context = context_of(multiprocessing_context)
    travels = address is None and context.get_start_method() == "fork"
    parcel_path, parcel_nbytes = "", 0
    if travels:
        warn_of_fork()
    else:
        parcel: bytes | bytearray | None = pickled_once(job) if address is None else _by_value(job)
        if parcel is None:
            travels = True
        else:
            segment = group.segment("parcel", len(parcel))
            memoryview(Mapping(segment.fd, len(parcel)))[:] = parcel
            parcel_path, parcel_nbytes = segment.path, len(parcel)
    posts = [
        Post(
            worker_id=worker_id,
            num_workers=num_workers,
            trainer_pid=os.getpid(),
            control_path=control.path,
            control_nbytes=control.nbytes,
            ready_bell=ready.name,
            orders_bell=orders[worker_id % len(orders)].name,
            grants_bell=grants.name,
            base_seed=base_seed,
            affinity=tuple(affinity) or tuple(sorted(os.sched_getaffinity(0))),
            parcel_path=parcel_path,
            parcel_nbytes=parcel_nbytes,
            stack_path=stacks[worker_id].path if stacks else "",
            neighbours=neighbours,
            resume=resume[worker_id] if resume else b"",
        )
        for worker_id in range(num_workers)
    ]
    if address is not None:
        from shmload.worker.actors.crew import RayCrew

        is_seeded = job.seed is not None
        return RayCrew(posts, address, is_seeded=is_seeded, num_ahead=num_ahead, sample_timeout_s=sample_timeout_s)
    return ProcessCrew(posts, job, context, travels=travels, stacks=stacks)


def num_actors(address: str | None) -> int:
    """How many actors a Ray cluster is asked for where it is to be found out.

    Raises:
        ClusterUnreachable: there is none.
    """
    from shmload.worker.actors import census  # as _by_value

    return census.num_actors(address or "auto")


def _by_value(job: Job) -> bytearray:
    from shmload.worker.actors.crew import pickled_by_value  # a kind of crew is imported when it is asked for

    return pickled_by_value(job)
