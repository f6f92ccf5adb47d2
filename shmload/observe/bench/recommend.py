"""How many workers and how much prefetch would do: from a sweep if there was one, else from a model of it.

The least setting is recommended with which the trainer waits no more than `WAIT_MAX` of a simulated step. Where there is no
step the trainer always waits, so it is the least that reaches `RATE_SHARE` of the best rate of the sweep.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shmload.observe.bench.verdict import Figures, demands

WAIT_MAX = 0.05  # of the step
RATE_SHARE = 0.95  # of the best rate
MARGIN = 1.25  # work is not even, and the trainer needs a core now and then
PREFETCH = 2  # torch's default
PREFETCH_BURSTS = 4  # where few batches are late, and by much
BURST_SHARE = 0.5  # of the step, a late batch


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One point of a sweep."""

    num_workers: int
    prefetch_factor: int | None
    batch_size: int
    samples_per_s: float
    wait_ms: float  # mean


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A setting, and where it comes from: "sweep" or "model"."""

    num_workers: int
    prefetch_factor: int
    batch_size: int | None
    origin: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        batch = f", batch_size={self.batch_size}" if self.batch_size else ""
        return f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}{batch} ({self.reason})"


def from_sweep(tried: Sequence[Tried], step_ms: float) -> Recommendation:
    """The least setting that was measured and is good enough; the fastest if none is.

    Batch sizes are the model's affair, not the loader's: only those of the largest rate are looked at, if there are several.
    """
    if not tried:
        raise ValueError("a recommendation needs at least one point that was measured, given none")
    best = max(tried, key=lambda each: each.samples_per_s)
    alike = [each for each in tried if each.batch_size == best.batch_size]
    alike.sort(key=lambda each: (each.num_workers, each.prefetch_factor or PREFETCH))
    if step_ms:
        least = next((each for each in alike if each.wait_ms <= WAIT_MAX * step_ms), None)
        reason = f"the least that was tried with which the trainer waits at most {WAIT_MAX:.0%} of a step"
        missed = f"none that was tried kept the wait within {WAIT_MAX:.0%} of a step: the fastest of them"
    else:
        least = next(each for each in alike if each.samples_per_s >= RATE_SHARE * best.samples_per_s)
        reason, missed = f"the least that was tried with {RATE_SHARE:.0%} of the best rate", ""
    chosen = least or best
    several = len({each.batch_size for each in tried}) > 1
    return Recommendation(
        num_workers=chosen.num_workers,
        prefetch_factor=chosen.prefetch_factor or PREFETCH,
        batch_size=chosen.batch_size if several else None,
        origin="sweep",
        reason=reason if least else missed,
    )


def from_model(figures: Figures, *, wait_p50_ms: float, wait_p99_ms: float, step_ms: float) -> Recommendation:
    """ceil(what the crew must do for a batch / what the trainer takes for one, with a margin), bounded by the cores.

    What workers sleep is not bounded by the cores: two sleeping workers need no second one.
    """
    parts = demands(figures)
    workers = max(1, figures.num_workers)
    computing = max(1, min(workers, figures.num_cpus))
    compute_s = (parts.decode_s + parts.worker_hand_off_s) * computing
    trainer_s = max(parts.consumer_s + parts.trainer_hand_off_s, 1e-6)
    needed = MARGIN * (compute_s + figures.read_blocked_s) / trainer_s
    most = figures.num_cpus * (1 + figures.read_blocked_s / max(compute_s, 1e-9))
    num_workers = max(1, min(math.ceil(needed), math.floor(min(most, 8.0 * figures.num_cpus))))
    bounded = math.ceil(needed) > num_workers
    reason = "by the model: the work of a batch over the step, and a quarter more"
    if not step_ms:
        reason = "without a training step the trainer takes all it can get; --step-ms tells how few workers yours needs"
    elif bounded:
        reason += "; more would help, but the cores are at their end"
    late = step_ms > 0 and wait_p50_ms < WAIT_MAX * step_ms and wait_p99_ms > BURST_SHARE * step_ms
    return Recommendation(
        num_workers=num_workers,
        prefetch_factor=PREFETCH_BURSTS if late else PREFETCH,
        batch_size=None,
        origin="model",
        reason=reason + ("; single batches are late, which a deeper prefetch hides" if late else ""),
    )
