"""Which engine a loader that shares gets: of its group's leader, a follower's, one that balances; any loader's if it is alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from shmload.engine.engine import Engine
from shmload.engine.orders import BadSamples, BatchSource
from shmload.engine.parts import EngineOptions, Hook
from shmload.sharing.balancing import Balancer
from shmload.sharing.following import FollowingEngine
from shmload.sharing.gathering import gather
from shmload.sharing.leading import Leader
from shmload.worker.spec import Job
from shmload.world import rank_and_world_size

if TYPE_CHECKING:
    from shmload.engine.builder import EngineBuilder, LoaderConfig

SLOTS_PER_FOLLOWER = 3  # as many batches as a loader of one rank and one worker lets its user keep

_next_number = itertools.count()  # of loaders that share, as they begin to read: the same in all ranks
_numbers: WeakKeyDictionary[EngineBuilder, int] = WeakKeyDictionary()


def shared_engine(
    config: LoaderConfig,
    builder: EngineBuilder,
    job: Job,
    options: EngineOptions,
    bad_samples: BadSamples,
    hooks: Sequence[Hook],
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
    party = gather(name, data, _promise(config), options.timeout_s)
    num_ranks = len(party.seats)
    if num_ranks == 1:
        party.close()
        return Engine(job, options, bad_samples, hooks)
    if party.is_balanced:
        options = dataclasses.replace(options, num_guests=(num_ranks - 1) * options.num_workers)
        return Engine(job, options, bad_samples, [*hooks, Balancer(party)])
    if party.me > 0:
        return FollowingEngine(options, party)
    cpus = {cpu for seat in party.seats for cpu in seat.cpus}
    options = dataclasses.replace(
        options,
        num_ranks=num_ranks,
        num_cooling=SLOTS_PER_FOLLOWER * (num_ranks - 1),
        affinity=tuple(sorted(cpus)),
    )
    return Engine(job, options, bad_samples, [*hooks, Leader(party, options.timeout_s)])


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
