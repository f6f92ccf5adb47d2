"""Choose the batch source of a loader with `share="node"`: its own ring (as leader, with helpers, or alone), or a leader's ring."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from shmload.engine.bad_samples import BadSamples
from shmload.engine.batch_source import BatchSource
from shmload.engine.engine import Engine
from shmload.engine.options import EngineOptions
from shmload.processes.ranks import rank_and_world_size
from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder
from shmload.sharing.balancing import Balancer
from shmload.sharing.follower import FollowingEngine
from shmload.sharing.leader import Leader
from shmload.sharing.rank_group import gather
from shmload.worker.job import Job

if TYPE_CHECKING:
    from shmload.engine.builder import EngineBuilder
    from shmload.engine.config import LoaderConfig

SLOTS_PER_FOLLOWER = 3  # additional slots of the ring for each follower: what a user of one rank and one worker may keep

_next_number = itertools.count()  # numbers loaders in the order in which they begin to read, which must be the same in all ranks
_numbers: WeakKeyDictionary[EngineBuilder, int] = WeakKeyDictionary()


def shared_engine(
    config: LoaderConfig,
    builder: EngineBuilder,
    job: Job,
    options: EngineOptions,
    bad_samples: BadSamples,
    *,
    records_holders: bool = False,
) -> BatchSource:
    """Return the batch source of one rank, once all ranks of the node have joined.

    Args:
        config: arguments of the loader.
        builder: the loader's builder, by which the loader is numbered.
        job, options, bad_samples, records_holders: as for `Engine`.
    Raises:
        ValueError, RankLeft: see `gather`.
    """
    data = rank_and_world_size(config.rank, config.world_size)
    number = _numbers.get(builder)
    if number is None:
        number = _numbers[builder] = next(_next_number)
    name = f"{number}.{builder.num_made}"
    rank_group = gather(name, data, _must_be_equal(config), options.timeout_s)
    num_ranks = len(rank_group.members)
    if num_ranks == 1:
        rank_group.close()
        return Engine(job, options, bad_samples, records_holders=records_holders)
    if rank_group.is_balanced:
        options = dataclasses.replace(options, num_helpers=(num_ranks - 1) * options.num_workers)
        return Engine(job, options, bad_samples, Balancer(rank_group), records_holders=records_holders)
    if rank_group.me > 0:
        return FollowingEngine(options, rank_group)
    cpus = {cpu for member in rank_group.members for cpu in member.cpus}
    options = dataclasses.replace(
        options, num_ranks=num_ranks, num_pending_copies=SLOTS_PER_FOLLOWER * (num_ranks - 1), affinity=tuple(sorted(cpus))
    )
    return Engine(job, options, bad_samples, Leader(rank_group, options.timeout_s), records_holders=records_holders)


def _must_be_equal(config: LoaderConfig) -> dict[str, Any]:
    """Return the values that must be equal in ranks that read one ring: those that determine the batches, or the ring's size."""
    plan = config.plan
    collate_fn = config.custom_collate_fn
    orders = (given for given in (config.sampler, config.batch_sampler) if isinstance(given, KeyedOrder | KeyedBatches))
    return {
        "dataset": type(config.dataset).__name__,
        "samples": config.num_samples,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "shuffle": bool(config.shuffle),
        "drop_last": bool(config.drop_last),
        "uneven": config.uneven,
        "sampler": next((order.identity for order in orders), ""),
        "num_workers": config.num_workers,
        "prefetch_factor": config.prefetch_factor,
        "collate_fn": getattr(collate_fn, "__qualname__", type(collate_fn).__qualname__),
        "seed_samples": config.seed_samples,
        "schema": "" if plan.layout is None else repr((plan.layout.fields, plan.layout.tree)),
        "ragged": repr(plan.ragged),
        "read by": plan.path,
    }
