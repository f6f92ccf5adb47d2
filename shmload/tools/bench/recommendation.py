"""Recommend a number of workers and a prefetch factor, from the measurements of a sweep or by a model from one measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shmload.tools.bench.verdict import Figures, demands

STEP_WAIT_MAX = 0.05  # maximum share of the step spent waiting
RATE_SHARE = 0.95  # minimum share of the best rate
MARGIN = 1.25  # work is uneven, and the trainer needs a core now and then
PREFETCH = 2  # torch's default


@dataclass(frozen=True)
class MeasuredSetting:
    """One point of a sweep."""

    num_workers: int
    prefetch_factor: int | None
    batch_size: int
    samples_per_s: float
    wait_ms: float  # mean


@dataclass(frozen=True)
class Recommendation:
    """A recommended setting. `origin` is "sweep" or "model"; `batch_size` is None if only one size was measured."""

    num_workers: int
    prefetch_factor: int
    batch_size: int | None
    origin: str
    reason: str

    def sentence(self) -> str:
        batch = f", batch_size={self.batch_size}" if self.batch_size else ""
        return f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}{batch} ({self.reason})"


def from_sweep(tried: Sequence[MeasuredSetting], step_ms: float) -> Recommendation:
    """Return the smallest measured setting that is good enough; the fastest if none is.

    The batch size depends on the model, not the loader: of several sizes only the one with the highest rate is considered.
    """
    best = max(tried, key=lambda each: each.samples_per_s)
    alike = [each for each in tried if each.batch_size == best.batch_size]
    alike.sort(key=lambda each: (each.num_workers, each.prefetch_factor or PREFETCH))
    if step_ms:
        least = next((each for each in alike if each.wait_ms <= STEP_WAIT_MAX * step_ms), None)
        reason = f"the least that was tried with which the trainer waits at most {STEP_WAIT_MAX:.0%} of a step"
        missed = f"none that was tried kept the wait within {STEP_WAIT_MAX:.0%} of a step: the fastest of them"
    else:
        least = next(each for each in alike if each.samples_per_s >= RATE_SHARE * best.samples_per_s)
        reason, missed = f"the least that was tried with {RATE_SHARE:.0%} of the best rate", ""
    chosen = least or best
    several = len({each.batch_size for each in tried}) > 1
    batch_size = chosen.batch_size if several else None
    ahead = chosen.prefetch_factor or PREFETCH
    return Recommendation(chosen.num_workers, ahead, batch_size, "sweep", reason if least else missed)


def from_model(figures: Figures, *, step_ms: float, epoch_batches: int | None = None) -> Recommendation:
    """Return the setting of the model: ceil(MARGIN * the workers' demand per batch / the trainer's), limited by the cores.

    A sleeping worker needs no core, so workers may outnumber the cores in proportion to the time that they sleep, up to 8 times.

    Args:
        figures: the measurements.
        step_ms: length of the training step.
        epoch_batches: batches of an epoch, if each is made by one worker: more workers than that are idle.
    """
    parts = demands(figures)
    computing = max(1, min(figures.num_workers, figures.num_cpus))
    compute_s = (parts.decode_s + parts.worker_hand_off_s) * computing
    trainer_s = max(parts.trainer_s + parts.trainer_hand_off_s, 1e-6)
    needed = math.ceil(MARGIN * (compute_s + figures.read_blocked_s) / trainer_s)
    most = figures.num_cpus * min(1 + figures.read_blocked_s / max(compute_s, 1e-9), 8.0)
    num_workers = max(1, min(needed, math.floor(most)))
    reason = "by the model: the work of a batch over the step, and a quarter more"
    if not step_ms:
        reason = "without a training step the trainer takes all it can get; --step-ms shows how few workers yours needs"
    elif needed > num_workers:
        reason += "; more would help, but the cores are at their end"
    if epoch_batches is not None and num_workers > epoch_batches:
        num_workers = epoch_batches
        reason = "an epoch has no more batches, and each is made by one worker"
    return Recommendation(num_workers, PREFETCH, None, "model", reason)
