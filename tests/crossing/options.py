"""The loader arguments of a case."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shmload import Ray
from tests.crossing.cases import BY_BATCH, RAGGED, Case
from tests.crossing.datasets import COLLATE, size_of
from tests.crossing.values import length

ACTORS: dict[str, dict[str, Any]] = {"share": {"num_cpus": 0}, "spread": {"num_cpus": 0.5, "scheduling_strategy": "SPREAD"}}


class StatefulSampler:
    """A sampler of fixed indices with a state as torchdata defines it: the next pass continues where the last one was."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        self._at = self._start = 0

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        at, self._start = self._start, 0  # a local variable, because two passes may run at once
        while at < len(self.indices):
            at += 1
            self._at = at
            yield self.indices[at - 1]
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the newest pass."""
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Sets the position at which the next pass begins."""
        self._start = state["at"]


class CountingSampler:
    """A sampler whose order depends on the number of passes, which it counts itself when a pass begins."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.indices)

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of passes before the next one."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(self.indices, len(self.indices)))


class OneListSampler:
    """A batch sampler that uses one list for all its batches."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for indices in self.batches:
            batch[:] = indices
            yield batch


class Marked:
    """A batch that has been through a loader's after_batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def do_nothing(worker: int) -> None:
    """Does nothing, as a worker_init_fn."""


ALSO: dict[str, dict[str, Any]] = {  # "g", "a" and "d" belong to a single trial; see habits.py
    "t": {"timeout": 600},
    "s": {"sample_timeout_s": 600},
    "m": {"max_bad": 10**6},
    "b": {"ring_bytes": 1 << 36},
    "w": {"worker_init_fn": do_nothing},
    "k": {"trust_state": True},
    "n": {"snapshot_every_n_steps": 3},
    "z": {"snapshot_every_n_steps": 0},
    "o": {"seed_samples": False},
}


IDLE: dict[str, dict[str, Any]] = {  # arguments by letter, which must be refused where they have no effect
    "r": {"rank": 1, "world_size": 2},
    "u": {"uneven": "exact"},
    "m": {"max_bad": 3},
    "n": {"snapshot_every_n_steps": 10},
    "b": {"ring_bytes": 1 << 20},
    "x": {"max_restarts": 2},
    "d": {"uneven": "exact"},
}


class AfterFailed(Exception):
    """The error that after_batch raises, with the batch that it loses."""

    def __init__(self, marked: Marked) -> None:
        self.marked = marked


class AfterBatch:
    """A function for after_batch."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0

    def __call__(self, batch: Any) -> Marked:
        self._count += 1
        if self._what == "fail" and self._count % 3 == 0:
            raise AfterFailed(Marked(batch))
        return Marked(batch)


KEY_OF: dict[str, Callable[[int], Any]] = {"int64": np.int64, "int32": np.int32, "tensor": torch.tensor}
BATCH_OF: dict[str, Callable[[list[int]], Any]] = {"array": lambda keys: np.array(keys, np.int16), "tensors": torch.tensor}


def order_of(case: Case) -> dict[str, Any]:
    """Returns the arguments that determine the order of samples. The keys of a user's sampler are of the type `case.keys`."""
    from shmload import BlockShuffle, LengthBuckets, TokenBudget, Weighted
    from shmload.remote import NodeShuffle

    n, size = size_of(case), case.batch_size
    rng = random.Random(case.seed)
    lengths = [length(case, index) for index in range(n)]
    if case.order == "block" and case.seed % 2 and case.global_batch % 2 == 0 and n > 1:
        sizes = [min(1 + case.seed % 5, n - begin) for begin in range(0, n, 1 + case.seed % 5)]
        return {"batch_size": size, "sampler": NodeShuffle(sizes, nodes=2, global_batch=case.global_batch, window=2)}
    if case.order == "block":
        return {"batch_size": size, "sampler": BlockShuffle(n, block_size=1 + case.seed % 5, window=2)}
    if case.order == "weighted":
        return {"batch_size": size, "sampler": Weighted([1 + index % 4 for index in range(n)])}
    if case.order == "lengths":
        return {"batch_sampler": LengthBuckets(lengths, batch_size=size or 1, window=3, group=case.ranks)}
    if case.order == "tokens":
        most = max(4 * case.size, 8)
        return {"batch_sampler": TokenBudget(lengths, max_tokens=most, max_samples=9, window=3, oversized="alone")}
    indices = [rng.randrange(n) for _ in range(n)] if n and case.seed % 2 else rng.sample(range(n), n)
    if case.keys in KEY_OF:
        indices = list(map(KEY_OF[case.keys], indices))
    if case.order == "sampler":
        if case.seed % 4 > 1:
            return {"batch_size": size, "sampler": StatefulSampler(indices)}
        counts = case.seed % 4 == 1 and case.habit in ("pass", "resume") and case.at < 1  # a state between two passes has no count
        counts = counts and size is not None  # with workers, torch begins a sampler of single samples twice for its first pass
        return {"batch_size": size, "sampler": CountingSampler(indices) if counts else indices}
    if case.order == "batch_sampler":
        batches, first = [], 0
        while first < n:
            count = rng.randint(1, 2 * (size or 1))
            batch = indices[first : first + count]
            batches.append(BATCH_OF[case.keys](batch) if case.keys in BATCH_OF else batch)
            first += count
        return {"batch_sampler": batches}
    if case.kind == "iterable":
        return {"batch_size": size}
    return {"batch_size": size, "shuffle": case.shuffle}


def ragged_option(case: Case) -> Any:
    """Returns the value of `ragged`, or None for the default."""
    if case.ragged == "map":
        return {name: ("pad", "jagged", "list")[case.seed % 3] for name in case.fields if name in RAGGED}
    return case.ragged or None


def loader_options(case: Case, *, rank: int = 0, ranks: int | None = None, workers: Any = None) -> dict[str, Any]:
    """Returns all arguments of one rank's loader but the dataset."""
    ranks = case.ranks if ranks is None else ranks
    workers = case.workers if workers is None else workers
    options: dict[str, Any] = order_of(case)
    if case.order == "batch_sampler" and case.seed % 2:
        options["batch_sampler"] = OneListSampler(options["batch_sampler"])
    if ranks != case.ranks and options.get("batch_size") and case.order not in BY_BATCH:
        options["batch_size"] = case.global_batch // ranks
    options["num_workers"] = workers
    if case.drop_last:
        options["drop_last"] = True
    if case.collate:
        options["collate_fn"] = COLLATE[case.collate]
    if case.after:
        options["after_batch"] = AfterBatch(case.after)
    for letter in case.also:
        options |= ALSO.get(letter, {})
    if workers != 0:
        options["multiprocessing_context"] = case.start
        if case.prefetch is not None:
            options["prefetch_factor"] = case.prefetch
        if case.threads > 1:
            options["threads_per_worker"] = case.threads
        if case.restarts:
            options["max_restarts"] = case.restarts
        if case.persistent:
            options["persistent_workers"] = True
        if case.backend in ("thread", "auto"):
            options["backend"] = case.backend
            if case.start == "fork":
                del options["multiprocessing_context"]
        if case.backend == "ray":
            options["backend"] = Ray(address=os.environ["CROSSING_RAY"], actor_options=ACTORS[case.actors] if case.actors else {})
            del options["multiprocessing_context"]
    if not case.in_order:
        options["in_order"] = False
    if case.on_error != "raise":
        options["on_error"] = case.on_error
    if (ragged := ragged_option(case)) is not None:
        options["ragged"] = ragged
    if case.is_seeded:
        options["seed"] = case.seed
        is_own = case.order not in ("sampler", "batch_sampler")  # else the sampler decides what a rank reads
        if case.uneven != "pad" and is_own and not case.drop_last:
            options["uneven"] = case.uneven
        if ranks > 1 and is_own:
            options["rank"], options["world_size"] = rank, ranks
    return options
