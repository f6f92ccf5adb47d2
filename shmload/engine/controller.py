"""What the figures of the last windows ask for: a pure function, with all it remembers in its argument and its answer.

Two figures say everything about a pipeline that does not interfere with itself. A batch takes `step_s` of the trainer, and
`work_s` of a worker; so work_s / step_s workers keep up, and any more stand idle. Reality interferes: workers slow each other
down, or wait for the same disk. So the formula proposes, and the batches that come in a second decide:

    the trainer waits, workers are busy  ->  more workers, as many as the formula says and at most twice as many at once
    the trainer waits, workers are idle  ->  more batches ordered ahead: what comes in bursts is evened out
    the trainer never waits              ->  fewer workers, if those that are left would still have some time to spare
    memory is short                      ->  fewer batches ordered ahead

Batches come unevenly, so a few more workers than the formula says are needed; how many goes by its square root, as for any worker
pool that serves what arrives at random. Every change is on trial for one look. One that brought nothing is taken back, and is not
tried again before the load itself has become another. What is not urgent must be found by two looks. That, the gap between the
sizes to which it grows and shrinks, and looks over the medians of several windows are why it stands still under a steady load.

Ancestry: utilisation law (D. Menasce et al., Performance by Design, 2004, ch. 3), square-root staffing (S. Halfin, W. Whitt,
Operations Research 29, 1981). Additive increase and multiplicative decrease were rejected: they never stand still.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from typing import Literal, NamedTuple

import numpy as np

LOOK = 4  # windows that a look takes the medians of
WAITS = 0.04  # of the time: from here on the trainer waits too much
WAITS_NOT = 0.01  # below this it does not wait
WAITS_LONG = 0.12  # it waits so much that one look is enough
BUSY = 0.75  # of their time: such workers have none to spare
GROW, SHRINK = (
    0.25,
    0.5,
)  # so many more than the formula says, times its root: what a worker pool grows to, and what it shrinks to
GAIN = 0.03  # batches a second that a change must bring to stay
ALIKE = 1.3  # loads within this factor are the same
PAYBACK_S = 60.0  # within this time what starting a worker takes must come back

What = Literal["num_workers", "prefetch"]


class Setting(NamedTuple):
    """What can be changed: workers, and batches ordered ahead for each."""

    num_workers: int
    prefetch: int

    @property
    def num_ahead(self) -> int:
        """Batches under way."""
        return self.num_workers * self.prefetch


class Window(NamedTuple):
    """What was measured over a stretch of time in which nothing was changed."""

    seconds: float
    wait_s: float  # the trainer's
    busy_s: float  # of all workers together
    num_batches: int


class Limits(NamedTuple):
    """What may be chosen.

    `room` is the number of batches that there is or can be memory for. `start_s` is what a new worker takes to come. Where least
    and most are one number, it is not the controller's to change.
    """

    least: Setting
    most: Setting
    most_ahead: int
    room: int
    start_s: float


class Load(NamedTuple):
    """What a batch takes: seconds of the trainer without waiting, and of a worker."""

    step_s: float
    work_s: float

    def is_like(self, other: Load) -> bool:
        """Whether it is the same load, as far as measuring can tell."""
        return all(a <= b * ALIKE and b <= a * ALIKE for a, b in zip(self, other, strict=True))


class Look(NamedTuple):
    """The medians of a few windows."""

    load: Load
    rate: float  # batches a second
    waits: float  # share of the trainer's time
    busy: float  # share of the workers' time


@dataclass(frozen=True)
class Trial:
    """A change that has to prove itself."""

    what: What
    before: Setting
    look: Look


@dataclass(frozen=True)
class Memory:
    """What is remembered from window to window: those since the last change, a change on trial, and what brought nothing."""

    windows: tuple[Window, ...] = ()
    trial: Trial | None = None
    barred: dict[tuple[What, bool], Load] = field(
        default_factory=dict
    )  # (what, was it more) -> the load under which it failed
    look: Look | None = None  # the newest
    leaning: tuple[What, bool] | None = None  # the change that it spoke for, if that was not urgent


class Decision(NamedTuple):
    """A change and its reason in words."""

    setting: Setting
    reason: str


def decide(now: Setting, memory: Memory, window: Window, limits: Limits) -> tuple[Memory, Decision | None]:
    """Takes in one more window.

    Returns:
        what to remember, and what to change; None: nothing, or it is too early to say.
    """
    if now.num_ahead > limits.room and now.prefetch > limits.least.prefetch:  # not a matter of measuring
        smaller = now._replace(prefetch=max(limits.room // now.num_workers, limits.least.prefetch))
        reason = f"memory is short: there is room for {limits.room} batches, {now.num_ahead} are ordered ahead"
        return Memory(barred=memory.barred, look=memory.look), Decision(smaller, reason)
    windows = (*memory.windows, window)
    if len(windows) < LOOK:
        return replace(memory, windows=windows), None
    look = looked(windows, now)
    if memory.trial is not None and (decision := _verdict(now, memory.trial, look)) is not None:
        tried = memory.trial
        failed = {(tried.what, tried.before < now): tried.look.load}
        return Memory(barred={**memory.barred, **failed}, look=look), decision
    barred = {change: load for change, load in memory.barred.items() if load.is_like(look.load)}
    proposed = _proposal(now, look, limits, barred)
    if proposed is None:
        return Memory(barred=barred, look=look), None
    what, decision = proposed
    change = (what, decision.setting > now)
    if look.waits < WAITS_LONG and memory.leaning != change:
        return Memory(barred=barred, look=look, leaning=change), None
    return Memory(trial=Trial(what, now, look), barred=barred, look=look), decision


def looked(windows: tuple[Window, ...], now: Setting) -> Look:
    """The medians of some windows."""
    step_s = _median(max(w.seconds - w.wait_s, 1e-9) / w.num_batches for w in windows)
    work_s = _median(max(w.busy_s, 1e-9) / w.num_batches for w in windows)
    return Look(
        Load(step_s, work_s),
        rate=_median(w.num_batches / w.seconds for w in windows),
        waits=_median(w.wait_s / w.seconds for w in windows),
        busy=_median(w.busy_s / w.seconds for w in windows) / now.num_workers,
    )


def _verdict(now: Setting, trial: Trial, look: Look) -> Decision | None:
    """The way back, if a change has brought nothing."""
    before = trial.before
    if now < before:  # fewer workers are a gain as long as nobody waits for them
        if look.waits < WAITS:
            return None
        reason = f"with {_workers(now)} the trainer waits {look.waits:.0%} of the time: back to {before.num_workers}"
        return Decision(before, reason)
    if look.rate >= trial.look.rate * (1 + GAIN):
        return None
    tried, was = (_workers(now), before.num_workers) if trial.what == "num_workers" else (_ahead(now), before.prefetch)
    reason = f"{tried} gave {look.rate:.3g} batches/s, {was} gave {trial.look.rate:.3g}: back to {was}"
    return Decision(before, reason)


def _proposal(
    now: Setting, look: Look, limits: Limits, barred: dict[tuple[What, bool], Load]
) -> tuple[What, Decision] | None:
    needed = look.load.work_s / look.load.step_s
    waits = f"the trainer waits {look.waits:.0%} of the time, {_busy(now)} {min(look.busy, 1):.0%}"
    if look.waits >= WAITS:
        most = min(2 * now.num_workers, limits.most.num_workers, limits.most_ahead // now.prefetch)
        more = min(max(_staffed(min(needed, most), GROW), now.num_workers + 1), most)
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
        fewer = max(_staffed(needed, SHRINK), limits.least.num_workers, (now.num_workers + 1) // 2)
        if fewer < now.num_workers - 1 or (fewer < now.num_workers and needed <= fewer / 2):  # for one it must be clear
            reason = f"the trainer does not wait, {_busy(now)} {look.busy:.0%}: {fewer} keep up"
            return "num_workers", Decision(now._replace(num_workers=fewer), reason)
    return None


def _staffed(needed: float, margin: float) -> int:
    return ceil(needed + margin * sqrt(needed))


def bound_by(now: Setting, look: Look, limits: Limits) -> str:
    """What holds the pipeline back, in words."""
    if look.waits < WAITS:
        return f"the trainer: it waits {look.waits:.0%} of the time"
    if look.busy < BUSY:
        return (
            f"what workers wait for: they are busy {look.busy:.0%} of the time, and the trainer waits {look.waits:.0%}"
        )
    most = " and there may be no more" if now.num_workers == limits.most.num_workers else ""
    return f"the workers: they are busy {min(look.busy, 1):.0%} of the time{most}; the trainer waits {look.waits:.0%}"


def _workers(setting: Setting) -> str:
    return f"{setting.num_workers} worker{'s' if setting.num_workers > 1 else ''}"


def _busy(setting: Setting) -> str:
    return f"{_workers(setting)} {'are' if setting.num_workers > 1 else 'is'} busy"


def _ahead(setting: Setting) -> str:
    return f"{setting.prefetch} batches ahead a worker"


def _median(values: Iterable[float]) -> float:
    return float(
        np.median([*values])
    )  # the statistics module brings decimals and fractions: 4 ms of every program's start
