"""Decide which setting to change, from the measurements of the last windows.

`decide` is a pure function: the history of earlier windows is an argument, and the new history is part of its result.

If workers did not slow each other down, two figures would describe a pipeline: a batch takes `step_s` of the trainer's time and
`work_s` of a worker's, so work_s / step_s workers keep up, and further ones are idle. In practice workers compete for CPUs and
disks. So the formula proposes a number, and the measured batches per second decide:

    the trainer waits, workers are busy  ->  the formula's number of workers, but at most twice as many at once
    the trainer waits, workers are idle  ->  more batches ordered ahead, which evens out bursts
    the trainer never waits              ->  fewer workers, if the remaining ones would still have time to spare
    memory is short                      ->  fewer batches ordered ahead

Batches arrive unevenly, so slightly more workers than the formula's number are needed: more by a fraction of its square root, as
for any pool that serves random arrivals. A *look* is the medians of several windows. Every change is on trial for one look. A
change without a gain is reverted, and not tried again before the load has changed. Changes that are not urgent must be confirmed by
two looks. These rules and the gap between the thresholds for growing and shrinking keep the settings stable under a steady load.

Sources: utilization law (D. Menasce et al., Performance by Design, 2004, ch. 3), square-root staffing (S. Halfin, W. Whitt,
Operations Research 29, 1981). Additive increase and multiplicative decrease were rejected, because they never settle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from typing import Literal, NamedTuple

import numpy as np

LOOK = 4  # number of windows in a look
WAITS = 0.04  # share of the time above which the trainer waits too much
WAITS_NOT = 0.01  # share of the time below which the trainer does not wait
WAITS_LONG = 0.12  # share of the time above which one look is enough
BUSY = 0.75  # share of the time above which workers count as busy

GROW, SHRINK = 0.25, 0.5  # a pool grows (or shrinks) to the formula's number plus this fraction of its square root

GAIN = 0.03  # relative gain in batches per second that a change must bring to stay
ALIKE = 1.3  # loads within this factor count as equal
PAYBACK_S = 60.0  # seconds within which the cost of starting a worker must be recovered

What = Literal["num_workers", "prefetch"]


class Setting(NamedTuple):
    """The settings that can be changed: the number of workers, and the number of batches ordered ahead for each worker."""

    num_workers: int
    prefetch: int

    @property
    def num_ahead(self) -> int:
        """Return the number of batches ordered ahead for all workers."""
        return self.num_workers * self.prefetch


class RateWindow(NamedTuple):
    """Measurements over an interval without changes."""

    seconds: float
    wait_s: float  # waiting time of the trainer
    busy_s: float  # working time, summed over all workers
    num_batches: int


class Limits(NamedTuple):
    """The allowed settings.

    `most_ahead` is the largest number of batches ordered ahead for all workers, `room` the number of batches for which there is or
    can be memory, and `start_s` the time that a new worker takes to start. A setting whose least and most values are equal must not
    be changed.
    """

    least: Setting
    most: Setting
    most_ahead: int
    room: int
    start_s: float


class Load(NamedTuple):
    """The cost of a batch: seconds of the trainer, without waiting, and seconds of a worker."""

    step_s: float
    work_s: float

    def is_like(self, other: Load) -> bool:
        """Return whether two loads are equal within the accuracy of measurement."""
        return all(a <= b * ALIKE and b <= a * ALIKE for a, b in zip(self, other, strict=True))


class Look(NamedTuple):
    """The medians of a few windows."""

    load: Load
    rate: float  # batches per second
    waits: float  # share of the trainer's time
    busy: float  # share of the workers' time


@dataclass(frozen=True)
class Trial:
    """A change that is reverted unless it proves a gain.

    Attributes:
        what: the changed setting.
        before: the settings before the change.
        look: the look before the change.
    """

    what: What
    before: Setting
    look: Look


@dataclass(frozen=True)
class TuningHistory:
    """The history between windows: the windows since the last look, the change on trial, and changes without a gain."""

    windows: tuple[RateWindow, ...] = ()
    trial: Trial | None = None
    # (setting, whether it was increased) -> the load under which the change failed
    barred: dict[tuple[What, bool], Load] = field(default_factory=dict)
    look: Look | None = None  # the newest look
    leaning: tuple[What, bool] | None = None  # the change that this look favored, if it was not urgent


class Decision(NamedTuple):
    """A change and its reason in words."""

    setting: Setting
    reason: str


def decide(now: Setting, history: TuningHistory, window: RateWindow, limits: Limits) -> tuple[TuningHistory, Decision | None]:
    """Decide with the measurements of one more window.

    Args:
        now: the current settings.
        history: the history of earlier windows.
        window: the new measurements.
        limits: the allowed settings.
    Returns:
        the new history, and the change to make; None if there is nothing to change, or it is too early to decide.
    """
    if now.num_ahead > limits.room and now.prefetch > limits.least.prefetch:  # memory is short, whatever the measurements
        smaller = now._replace(prefetch=max(limits.room // now.num_workers, limits.least.prefetch))
        reason = f"memory is short: there is room for {limits.room} batches, {now.num_ahead} are ordered ahead"
        return TuningHistory(barred=history.barred, look=history.look), Decision(smaller, reason)
    windows = (*history.windows, window)
    if len(windows) < LOOK:
        return replace(history, windows=windows), None
    look = medians_of(windows, now)
    if history.trial is not None and (decision := _revert_without_gain(now, history.trial, look)) is not None:
        tried = history.trial
        failed = {(tried.what, tried.before < now): tried.look.load}
        return TuningHistory(barred={**history.barred, **failed}, look=look), decision
    barred = {change: load for change, load in history.barred.items() if load.is_like(look.load)}
    proposed = _proposal(now, look, limits, barred)
    if proposed is None:
        return TuningHistory(barred=barred, look=look), None
    what, decision = proposed
    change = (what, decision.setting > now)
    if look.waits < WAITS_LONG and history.leaning != change:
        return TuningHistory(barred=barred, look=look, leaning=change), None
    return TuningHistory(trial=Trial(what, now, look), barred=barred, look=look), decision


def medians_of(windows: tuple[RateWindow, ...], now: Setting) -> Look:
    """Return the medians of some windows, measured with the settings `now`."""
    step_s = _median(max(w.seconds - w.wait_s, 1e-9) / w.num_batches for w in windows)
    work_s = _median(max(w.busy_s, 1e-9) / w.num_batches for w in windows)
    return Look(
        Load(step_s, work_s),
        rate=_median(w.num_batches / w.seconds for w in windows),
        waits=_median(w.wait_s / w.seconds for w in windows),
        busy=_median(w.busy_s / w.seconds for w in windows) / now.num_workers,
    )


def _revert_without_gain(now: Setting, trial: Trial, look: Look) -> Decision | None:
    """Return the change that reverts a trial without a gain; else None."""
    before = trial.before
    if now < before:  # fewer workers are a gain as long as the trainer does not wait for them
        if look.waits < WAITS:
            return None
        reason = f"with {_workers(now)} the trainer waits {look.waits:.0%} of the time: back to {before.num_workers}"
        return Decision(before, reason)
    if look.rate >= trial.look.rate * (1 + GAIN):
        return None
    tried, was = (_workers(now), before.num_workers) if trial.what == "num_workers" else (_ahead(now), before.prefetch)
    reason = f"{tried} gave {look.rate:.3g} batches/s, {was} gave {trial.look.rate:.3g}: back to {was}"
    return Decision(before, reason)


def _proposal(now: Setting, look: Look, limits: Limits, barred: dict[tuple[What, bool], Load]) -> tuple[What, Decision] | None:
    """Return the next change to try, as (the setting that changes, the decision); None if nothing needs to change."""
    needed = look.load.work_s / look.load.step_s
    waits = f"the trainer waits {look.waits:.0%} of the time, {_busy(now)} {min(look.busy, 1):.0%}"
    if look.waits >= WAITS:
        most = min(2 * now.num_workers, limits.most.num_workers, limits.most_ahead // now.prefetch)
        more = min(max(_enough_workers(min(needed, most), GROW), now.num_workers + 1), most)
        can_order_more = (
            now.prefetch < limits.most.prefetch
            and ("prefetch", True) not in barred
            and now.num_workers * (now.prefetch + 1) <= min(limits.room, limits.most_ahead)
        )
        if more > now.num_workers and ("num_workers", True) not in barred and (look.busy >= BUSY or not can_order_more):
            saved = look.waits * (1 - now.num_workers / more)
            if saved * PAYBACK_S >= limits.start_s:
                return "num_workers", Decision(now._replace(num_workers=more), f"{waits}: {more} workers")
        if look.busy < BUSY and can_order_more:
            room = min(limits.room, limits.most_ahead) // now.num_workers
            deeper = now._replace(prefetch=min(2 * now.prefetch, limits.most.prefetch, room))
            return "prefetch", Decision(deeper, f"{waits}: {_ahead(deeper)}, to even out what comes in bursts")
        return None
    if look.waits <= WAITS_NOT and ("num_workers", False) not in barred:
        fewer = max(_enough_workers(needed, SHRINK), limits.least.num_workers, (now.num_workers + 1) // 2)
        # removing a single worker needs clear evidence
        if fewer < now.num_workers - 1 or (fewer < now.num_workers and needed <= fewer / 2):
            reason = f"the trainer does not wait, {_busy(now)} {look.busy:.0%}: {fewer} keep up"
            return "num_workers", Decision(now._replace(num_workers=fewer), reason)
    return None


def _enough_workers(needed: float, margin: float) -> int:
    return ceil(needed + margin * sqrt(needed))


def _workers(setting: Setting) -> str:
    return f"{setting.num_workers} worker{'s' if setting.num_workers > 1 else ''}"


def _busy(setting: Setting) -> str:
    return f"{_workers(setting)} {'are' if setting.num_workers > 1 else 'is'} busy"


def _ahead(setting: Setting) -> str:
    return f"{setting.prefetch} batches ahead a worker"


def _median(values: Iterable[float]) -> float:
    # the statistics module imports decimal and fractions, which adds 4 ms to every program's start
    return float(np.median([*values]))
