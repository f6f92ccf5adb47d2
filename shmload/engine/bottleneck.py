"""Find the bottleneck between storage and the training step.

`stats()`, `shmload top`, `num_workers="auto"`, `explain()` and `shmload bench` measure different times, but all use these functions
and these names for the result. Two questions decide: does the trainer wait longer than the workers, and if so, which work takes
most of the workers' time?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Bottleneck = Literal["source", "decode", "hand-off", "trainer", "none", "unknown"]

NOTICED = 0.05  # waits below this share of the time are ignored
MEANING: dict[Bottleneck, str] = {
    "source": "workers wait for storage",
    "decode": "workers decode and transform samples for most of their time",
    "hand-off": "the trainer waits for batches to reach it rather than for samples",
    "trainer": "batches are ready before the trainer asks for them",
    "none": "neither the trainer nor the workers wait for long",
    "unknown": "too little has been measured",
}

REMEDY: dict[Bottleneck, str] = {
    "source": "use more workers or `threads_per_worker`, faster storage, or a local copy of the data",
    "decode": "use more workers, if there are idle cores, or cheaper transforms",
    "hand-off": "use larger batches or a larger `prefetch_factor`",
}


def judge(
    *, trainer_waits: float, workers_wait: float, source: float = 0.0, decode: float = 0.0, hand_off: float = 0.0
) -> Bottleneck:
    """Return the bottleneck.

    Args:
        trainer_waits: share of the time, from 0 to 1, in which the trainer waited for a batch.
        workers_wait: share of the time in which the trainer was busy, and workers had nothing to do.
        source: time that batches spend waiting for storage, in any unit that the next two share.
        decode: time spent decoding and transforming samples, and reading them if that is not measured separately.
        hand_off: time spent on copies and coordination.
    """
    if max(trainer_waits, workers_wait) < NOTICED:
        return "none"
    if trainer_waits < workers_wait:
        return "trainer"
    parts: dict[Bottleneck, float] = {"source": source, "decode": decode, "hand-off": hand_off}
    longest = max(parts, key=lambda part: parts[part])
    return longest if parts[longest] else "unknown"


def judge_ring(*, trainer_waits: float, workers_busy: float, workers_asleep: float = 0.0, start_up: float = 0.0) -> Bottleneck:
    """Return the bottleneck of a running ring, which records how long its workers have work, but not what kind of work.

    A worker that has work and sleeps counts as waiting for storage, and one that computes as decoding. An idle one counts as
    waiting for the trainer while the trainer is busy, and for the hand-off while the trainer waits, too.

    Args:
        trainer_waits: share of the time in which the trainer waited for a batch, start-up not included.
        workers_busy: share of the workers' time in which they had work.
        workers_asleep: share of it in which they had work and slept; 0 if that is unknown.
        start_up: share of the time before the first worker was ready.
    """
    if start_up >= 0.5:
        return "unknown"
    idle = 1 - workers_busy
    return judge(
        trainer_waits=trainer_waits,
        workers_wait=idle * (1 - start_up - trainer_waits),
        source=workers_asleep,
        decode=workers_busy - workers_asleep,
        hand_off=idle,
    )


def remedy_of(bottleneck: Bottleneck, *, has_collate_fn: bool) -> str | None:
    """Return what to do about a bottleneck, or None if there is nothing to do.

    Args:
        bottleneck: its name.
        has_collate_fn: the program's own function makes the batches, so its time is part of the workers' time.
    """
    remedy = REMEDY.get(bottleneck)
    if has_collate_fn and bottleneck in ("source", "decode"):
        return f"{remedy}; the `collate_fn` runs in the workers, too: time it by itself"
    return remedy


def ring_remedy(
    bottleneck: Bottleneck, *, num_slots: int, num_leased: int, busy_shares: Sequence[float], in_turn: bool, has_collate_fn: bool
) -> str | None:
    """Return what to do about the bottleneck of a running ring, or None if there is nothing to do.

    Args:
        bottleneck: as `judge_ring` returned it.
        num_slots: number of the ring's slots.
        num_leased: number of slots whose batches the program still holds.
        busy_shares: share of the time, from 0 to 1, in which each worker had work.
        in_turn: each batch belongs to one worker, as in torch mode.
        has_collate_fn: as for `remedy_of`.
    """
    if bottleneck == "hand-off":
        if num_leased > 1 and 2 * num_leased >= num_slots:
            return (
                f"the program holds {num_leased} of {num_slots} slots: release batches earlier, or use a larger `prefetch_factor`"
            )
        *others, busiest = sorted(busy_shares) or [0.0]
        if in_turn and others and busiest >= 0.5 and max(others) <= busiest / 2:
            return (
                f"worker {list(busy_shares).index(busiest)} is slower than the others, which wait for their turn: use seed mode "
                "(`seed=`), in which workers share each batch, or `in_order=False`"
            )
    return remedy_of(bottleneck, has_collate_fn=has_collate_fn)
