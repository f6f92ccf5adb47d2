"""What an audit file says of its loader: which order it is, whose part of it, and what a reader needs to repeat it."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

import shmload
from shmload.schedule.schedule import SCHEDULE_VERSION, BatchSchedule, Schedule
from shmload.world import ability_of, rank_and_world_size

if TYPE_CHECKING:
    from shmload.engine.builder import LoaderConfig

SEED, SAMPLED, PIPELINE, TORCH = "seed", "seed, with a sampler", "pipeline", "torch"
DISTRIBUTED, ITERABLE = "DistributedSampler", "iterable dataset"


@dataclass(frozen=True, kw_only=True)
class Header:
    """One loader, seen from one rank, for as long as none of this changes."""

    mode: str
    n: int | None  # samples of an epoch; None: unknown
    batch_size: int | None
    rank: int
    world_size: int
    seed: int | None
    shuffle: bool
    uneven: str  # what happens to the rest: "pad", "drop" or "exact"
    schedule: int  # version of the order
    order: str | None  # which order it is, where it is not the plain one
    in_order: bool
    on_error: str
    seed_samples: bool
    dataset: str  # name of its type
    shmload: str
    host: str
    pid: int
    started_ns: int = 0
    stream: dict[str, Any] | None = None  # of a pipeline: what its keys are made of, and whether it has an end

    @property
    def identity(self) -> dict[str, Any]:
        """What must be alike for two files to tell of one run of one loader, whatever the ranks."""
        is_elastic = self.mode == SEED and self.batch_size is not None
        size: dict[str, Any] = {"batch_size": self.batch_size}
        if self.mode == PIPELINE:
            size = {}  # any rank goes on from any position, whatever batches it makes
        elif is_elastic:
            size = {"global_batch": (self.batch_size or 0) * self.world_size}
        names = ("mode", "dataset", "n", "seed", "shuffle", "uneven", "schedule", "order")
        return {**{name: getattr(self, name) for name in names}, **size}

    @property
    def place(self) -> str:
        """Which process it was, for people."""
        return f"rank {self.rank} of {self.world_size}"


_KINDS = {**get_type_hints(Header), "stream": dict | None}


def read_header(found: dict[str, Any]) -> Header:
    """The header that a file holds; what a newer version added is left out.

    Raises:
        ValueError: a field is missing or of another type.
    """
    faults = [
        f"{field.name} is {found.get(field.name)!r}"
        for field in dataclasses.fields(Header)
        if not isinstance(found.get(field.name), _KINDS[field.name])
    ]
    if found.get("mode") == PIPELINE and not _is_stream(found.get("stream"), found.get("n")):
        faults.append(f"stream is {found.get('stream')!r:.200}")
    if faults:
        raise ValueError(f"the header cannot be used: {', '.join(faults)}")
    values: dict[str, Any] = {field.name: found.get(field.name) for field in dataclasses.fields(Header)}
    header = Header(**values)
    if not 0 <= header.rank < header.world_size:
        raise ValueError(f"the header cannot be used: rank is {header.rank} of {header.world_size}")
    return header


def _is_stream(stream: Any, n: Any) -> bool:
    def are_members(members: Any) -> bool:
        is_join = isinstance(members, list) and members
        return all(map(are_members, members)) if is_join else type(members) is int and members > 0

    is_dict = isinstance(stream, dict) and type(stream.get("is_endless")) is bool and type(n) is int and n > 0
    return is_dict and are_members(stream.get("members"))


def header_of(config: LoaderConfig, schedule: Schedule | BatchSchedule | None, rank: int | None = None) -> Header:
    """The header for a loader as it is now.

    Args:
        schedule, rank: seed mode's; None where a sampler orders, or an order the batches.
    Raises:
        ValueError: the environment names a world size, and neither it nor the loader's arguments say which rank this is.
    """
    common: dict[str, Any] = {
        "seed": config.seed,
        "on_error": config.on_error,
        "seed_samples": config.seed_samples,
        "dataset": type(config.dataset).__qualname__,
        "shmload": shmload.__version__,
        "host": platform.node(),
        "pid": os.getpid(),
    }
    if isinstance(schedule, BatchSchedule):
        return Header(
            **{**common, "dataset": "pipeline"},
            mode=PIPELINE,
            n=schedule.n,
            batch_size=schedule.rows_per_rank,
            rank=rank or 0,
            world_size=schedule.world_size,
            shuffle=schedule.shuffle,
            uneven=schedule.rest_rule,
            schedule=schedule.version,
            order=schedule.order.identity,
            in_order=True,
            stream=schedule.stream,
        )
    if schedule is not None:
        return Header(
            mode=SEED,
            n=schedule.n,
            batch_size=schedule.batch_size,
            rank=rank or 0,
            world_size=schedule.world_size,
            shuffle=schedule.shuffle,
            uneven=schedule.rest_rule,
            schedule=schedule.version,
            order=None if schedule.order is None else schedule.order.identity,
            in_order=True,
            **common,
        )
    batches = config.index_sampler
    sampler = getattr(batches, "sampler", batches)
    is_distributed = isinstance(sampler, DistributedSampler)
    ranks = (
        (sampler.rank, sampler.num_replicas) if is_distributed else rank_and_world_size(config.rank, config.world_size)
    )
    return Header(
        mode=TORCH if config.seed is None else SAMPLED,
        n=config.num_samples,
        batch_size=getattr(batches, "batch_size", config.batch_size),
        rank=ranks[0],
        world_size=ranks[1],
        shuffle=not isinstance(sampler, SequentialSampler),
        uneven="drop" if any(getattr(one, "drop_last", False) for one in (config, batches, sampler)) else "exact",
        schedule=SCHEDULE_VERSION,
        order=_order_name(config, batches, sampler),
        in_order=bool(config.in_order) or config.seed is not None,
        **common,
    )


def _order_name(config: LoaderConfig, batches: Any, sampler: Any) -> str | None:
    """None for torch's own orders that deliver each sample once."""
    if config.is_iterable:
        return ITERABLE
    if ability_of(config.dataset, "epoch_schedule"):  # whose epochs differ
        return type(config.dataset).__qualname__
    if batches is not sampler and type(batches) is not BatchSampler:
        return type(batches).__qualname__
    if isinstance(sampler, DistributedSampler):
        return DISTRIBUTED
    is_random = type(sampler) is RandomSampler and not sampler.replacement
    if is_random and sampler.num_samples == len(sampler.data_source) == config.num_samples:
        return None
    if type(sampler) is SequentialSampler and len(sampler.data_source) == config.num_samples:
        return None
    return type(sampler).__qualname__
