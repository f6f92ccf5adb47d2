"""Which engine a loader that shares gets: of its group's leader, a follower's, one that balances; any loader's if it is alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from shmload.engine.engine import Engine
from shmload.engine.parts import EngineOptions, Hook
from shmload.engine.ring import BadSamples, BatchSource
from shmload.sharing.balancing import Balancer
from shmload.sharing.following import FollowingEngine
from shmload.sharing.leading import Leader
from shmload.sharing.rank_group import gather
from shmload.worker.reader import Job
from shmload.world import rank_and_world_size

if TYPE_CHECKING:
    from shmload.engine.builder import EngineBuilder, LoaderConfig

SLOTS_PER_FOLLOWER = 3  # as many batches as a loader of one rank and one worker lets its user keep

_next_number = itertools.count()  # of loaders that share, as they begin to read: the same in all ranks
_numbers: WeakKeyDictionary[EngineBuilder, int] = WeakKeyDictionary()


def shared_engine(
    config: LoaderConfig, builder: EngineBuilder, job: Job, options: EngineOptions, bad_samples: BadSamples, hooks: Sequence[Hook]
) -> BatchSource:
    """The engine of one rank, once all ranks of the node are there.

    Raises:
        ValueError, RankLeft: as `gather`.
    """
    data = rank_and_world_size(config.rank, config.world_size)
    number = _numbers.get(builder)
    if number is None:
        number = _numbers[builder] = next(_next_number)
    name = f"{number}.{builder.num_made}"
    rank_group = gather(name, data, _promise(config), options.timeout_s)
    num_ranks = len(rank_group.members)
    if num_ranks == 1:
        rank_group.close()
        return Engine(job, options, bad_samples, hooks)
    if rank_group.is_balanced:
        options = dataclasses.replace(options, num_helpers=(num_ranks - 1) * options.num_workers)
        return Engine(job, options, bad_samples, [*hooks, Balancer(rank_group)])
    if rank_group.me > 0:
        return FollowingEngine(options, rank_group)
    cpus = {cpu for member in rank_group.members for cpu in member.cpus}
    options = dataclasses.replace(
        options, num_ranks=num_ranks, num_pending_copies=SLOTS_PER_FOLLOWER * (num_ranks - 1), affinity=tuple(sorted(cpus))
    )
    return Engine(job, options, bad_samples, [*hooks, Leader(rank_group, options.timeout_s)])


def _promise(config: LoaderConfig) -> dict[str, Any]:
    """What says which batches there are, and how far ahead."""
    plan = config.plan
    collate_fn = config.custom_collate_fn
    order = config.sampler if config.sampler is not None and not config.has_own_order else None
    return {
        "dataset": type(config.dataset).__name__,
        "samples": config.num_samples,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "shuffle": bool(config.shuffle),
        "drop_last": bool(config.drop_last),
        "uneven": config.uneven,
        "sampler": type(order).__name__,
        "num_workers": config.num_workers,
        "prefetch_factor": config.prefetch_factor,
        "collate_fn": getattr(collate_fn, "__qualname__", type(collate_fn).__qualname__),
        "seed_samples": config.seed_samples,
        "schema": "" if plan.layout is None else repr((plan.layout.fields, plan.layout.tree)),
        "ragged": repr(plan.ragged),
        "read by": plan.path,
    }
