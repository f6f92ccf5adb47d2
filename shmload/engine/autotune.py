"""What `num_workers` and `prefetch_factor` are while they are found automatically: the number now, which remembers that it is.

What "auto" may take: processors and bytes.

Processors are those this process may run on, by affinity and cgroup quota, divided by the ranks on this node, which launchers
say: ranks share them, unless our own launcher, or Slurm by --cpus-per-task, has given each its own. SHMLOAD_MAX_WORKERS says
another number, for one loader: a smaller one where several loaders run side by side, a larger one where samples wait for a network
more than they compute.

Bytes are `ring_bytes`, or a quarter of what free memory and cgroups leave to a rank, the ring's own included. /dev/shm is no limit,
as slots that come later lie in memfds where it has little room.

The controller at work: measures windows of a running engine, asks what to change, does it, and says what it did and why.

It lives in the trainer's `next()`: a batch costs it a count and a look at the clock, and twice a second it reads the ring's own
counters. A window is dropped in which a worker came up or was replaced, since it is of neither worker pool.

What the figures of the last windows ask for: a pure function, with all it remembers in its argument and its answer.

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

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from shmload.engine.batch_source import BatchSource
from shmload.engine.bottleneck import Bottleneck, judge_ring
from shmload.engine.engine import Engine
from shmload.shm import segment
from shmload.shm.segment import available_bytes
from shmload.world import OWN_CPUS, launched_place

if TYPE_CHECKING:
    from shmload.engine.config import LoaderConfig

LOOK = 4  # windows that a look takes the medians of
WAITS = 0.04  # of the time: from here on the trainer waits too much
WAITS_NOT = 0.01  # below this it does not wait
WAITS_LONG = 0.12  # it waits so much that one look is enough
BUSY = 0.75  # of their time: such workers have none to spare
GROW, SHRINK = 0.25, 0.5  # so many more than the formula says, times its root: what a pool grows to, and what it shrinks to
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


class RateWindow(NamedTuple):
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
        """Whether it is the same load, as far as measuring can say."""
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
class LookMemory:
    """What is remembered from window to window: those since the last change, a change on trial, and what brought nothing."""

    windows: tuple[RateWindow, ...] = ()
    trial: Trial | None = None
    barred: dict[tuple[What, bool], Load] = field(default_factory=dict)  # (what, was it more) -> the load under which it failed
    look: Look | None = None  # the newest
    leaning: tuple[What, bool] | None = None  # the change that it spoke for, if that was not urgent


class Decision(NamedTuple):
    """A change and its reason in words."""

    setting: Setting
    reason: str


def decide(now: Setting, memory: LookMemory, window: RateWindow, limits: Limits) -> tuple[LookMemory, Decision | None]:
    """Takes in one more window.

    Returns:
        what to remember, and what to change; None: nothing, or it is too early to say.
    """
    if now.num_ahead > limits.room and now.prefetch > limits.least.prefetch:  # not a matter of measuring
        smaller = now._replace(prefetch=max(limits.room // now.num_workers, limits.least.prefetch))
        reason = f"memory is short: there is room for {limits.room} batches, {now.num_ahead} are ordered ahead"
        return LookMemory(barred=memory.barred, look=memory.look), Decision(smaller, reason)
    windows = (*memory.windows, window)
    if len(windows) < LOOK:
        return replace(memory, windows=windows), None
    look = looked(windows, now)
    if memory.trial is not None and (decision := _verdict(now, memory.trial, look)) is not None:
        tried = memory.trial
        failed = {(tried.what, tried.before < now): tried.look.load}
        return LookMemory(barred={**memory.barred, **failed}, look=look), decision
    barred = {change: load for change, load in memory.barred.items() if load.is_like(look.load)}
    proposed = _proposal(now, look, limits, barred)
    if proposed is None:
        return LookMemory(barred=barred, look=look), None
    what, decision = proposed
    change = (what, decision.setting > now)
    if look.waits < WAITS_LONG and memory.leaning != change:
        return LookMemory(barred=barred, look=look, leaning=change), None
    return LookMemory(trial=Trial(what, now, look), barred=barred, look=look), decision


def looked(windows: tuple[RateWindow, ...], now: Setting) -> Look:
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


def _proposal(now: Setting, look: Look, limits: Limits, barred: dict[tuple[What, bool], Load]) -> tuple[What, Decision] | None:
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


def _workers(setting: Setting) -> str:
    return f"{setting.num_workers} worker{'s' if setting.num_workers > 1 else ''}"


def _busy(setting: Setting) -> str:
    return f"{_workers(setting)} {'are' if setting.num_workers > 1 else 'is'} busy"


def _ahead(setting: Setting) -> str:
    return f"{setting.prefetch} batches ahead a worker"


def _median(values: Iterable[float]) -> float:
    return float(np.median([*values]))  # the statistics module brings decimals and fractions: 4 ms of every program's start


AUTO = "auto"


class AutoNumber(int):
    """The number of the moment, of an argument that was given as "auto".

    torch and the frameworks compute with `loader.num_workers`, and make other loaders from the attributes of one: given as an
    argument it means "auto" again.
    """

    def __repr__(self) -> str:
        return f"auto ({int(self)})"

    __str__ = int.__repr__


def is_auto(value: Any) -> bool:
    """Whether an argument asks to be found."""
    return isinstance(value, AutoNumber) or (isinstance(value, str) and value == AUTO)


LIMIT = "SHMLOAD_MAX_WORKERS"
MEMORY_SHARE = 4  # the ring takes at most one part in so many
FIXED_MAX = 16  # workers in torch mode, where nothing shows whether more are of use


def num_cpus(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Processors that this rank may keep busy, at least 1."""
    quota, num_ranks = segment.cpus(root), num_ranks_here(environ)
    usable = len(os.sched_getaffinity(0))
    own = environ.get(OWN_CPUS if "LOCAL_WORLD_SIZE" in environ else "SLURM_CPUS_PER_TASK", "")
    if not own.isdecimal() or usable > int(own):  # the second: somebody has undone the division
        usable //= num_ranks
    if quota is not None:
        usable = min(usable, int(quota) // num_ranks)
    return max(usable, 1)


def most_workers(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """The largest worker pool that "auto" may take.

    Raises:
        ValueError: SHMLOAD_MAX_WORKERS is no number from 1 up.
    """
    given = environ.get(LIMIT, "")
    if not given:
        return num_cpus(root, environ)
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f'{LIMIT} is a whole number from 1 up, the most workers that num_workers="auto" takes; got {given!r}')
    return int(given)


def fixed_workers(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """The worker pool where it must be the same on every run: one processor is the trainer's, and no more than 16 workers."""
    given = most_workers(root, environ)
    return given if environ.get(LIMIT) else max(min(given - 1, FIXED_MAX), 1)


def first_workers(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """The worker pool to begin with where it may change: half of the processors, and 4 at most."""
    return max(min(num_cpus(root, environ) // 2, most_workers(root, environ), 4), 1)


def ring_budget(limit: int | None, taken: int, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Bytes that a ring may take in all.

    Args:
        limit: `ring_bytes`; None: a share of what there is.
        taken: bytes of that the ring has.
    """
    if limit is not None:
        return limit
    return (available_bytes(root) // num_ranks_here(environ) + taken) // MEMORY_SHARE


def num_ranks_here(environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of this run on this node, as its launcher says; 1 if none does."""
    given = environ.get("LOCAL_WORLD_SIZE", "")
    if given.isdecimal():
        return max(int(given), 1)
    place = launched_place(environ)
    return 1 if place is None else place.local_world_size


log = logging.getLogger("shmload")

WINDOW_S = 0.5
WINDOW_BATCHES = 8  # at least, in a window
FIRST_PREFETCH = 2
PREFETCH_MAX = 8
MOST_AHEAD = 64  # batches under way, or 2 a worker: every slot has a record that workers look at
NUM_KEPT = 20  # decisions that stats() lists


def first_numbers(num_workers: Any, prefetch_factor: Any, *, is_torch_mode: bool) -> tuple[Any, Any]:
    """`num_workers` and `prefetch_factor` to begin with; as they are if they are no "auto"."""
    if is_auto(num_workers):
        first = fixed_workers() if is_torch_mode else first_workers()
        num_workers = AutoNumber(first)
    if is_auto(prefetch_factor):
        prefetch_factor = AutoNumber(FIRST_PREFETCH)
    return num_workers, prefetch_factor


def tuner_of(config: LoaderConfig, on_change: Callable[[Setting], None]) -> Autotuner | None:
    """What tunes a loader while it runs; None if nothing of it may change."""
    changes_pool = is_auto(config.num_workers) and config.seed is not None
    may_change = config.num_workers and (changes_pool or is_auto(config.prefetch_factor))
    return Autotuner(config, on_change) if may_change else None


class Autotuner:
    """Tunes one loader, over one engine after the other.

    Args:
        on_change: called with the numbers whenever they change, so that the loader's attributes can be those of now.

    Attributes:
        num_ahead: batches to be ordered ahead now.
    """

    def __init__(self, config: LoaderConfig, on_change: Callable[[Setting], None]) -> None:
        self._on_change, self._ring_bytes = on_change, config.ring_bytes
        given = Setting(config.total_workers, int(config.prefetch_factor or 1))
        least, most = given, given
        if is_auto(config.num_workers) and config.seed is not None:
            least, most = least._replace(num_workers=1), most._replace(num_workers=most_workers())
        if is_auto(config.prefetch_factor):
            least, most = least._replace(prefetch=1), most._replace(prefetch=PREFETCH_MAX)
        self._least, self._most = least, most
        self._setting = Setting(min(given.num_workers, most.num_workers), given.prefetch)  # a copy may come from a larger host
        needed = most.num_workers * max(least.prefetch, min(FIRST_PREFETCH, most.prefetch))
        self._most_ahead = max(needed, min(most.num_ahead, MOST_AHEAD))
        self.num_ahead = self._setting.num_ahead
        on_change(self._setting)
        self._memory = LookMemory()
        self._decisions: deque[dict[str, Any]] = deque(maxlen=NUM_KEPT)
        self._bottleneck: Bottleneck = "unknown"
        self._limits = Limits(least, most, self._most_ahead, self._most_ahead, 0.0)
        self._engine: weakref.ref[Engine] | None = None
        self._num_batches = 0  # in this window
        self._began = 0.0
        self._before = (0.0, 0.0, 0)

    def is_of(self, config: LoaderConfig) -> bool:
        """Whether the loader's numbers are still those that this has set."""
        return self._setting == (config.total_workers, config.prefetch_factor)

    def engine_options(self) -> dict[str, int]:
        """What a new engine is made for, and what it begins with."""
        return {
            "num_workers": self._most.num_workers,
            "num_ordered": self._most_ahead,
            "first_workers": self._setting.num_workers,
            "first_ordered": self._setting.num_ahead,
        }

    def counted(self, engine: BatchSource) -> int:
        """Counts one more batch delivered, and now and then changes something. Returns how many to order ahead."""
        assert isinstance(engine, Engine)  # ranks that share a ring give fixed numbers
        if self._engine is None or self._engine() is not engine:
            self._engine = weakref.ref(engine)
            self._memory = LookMemory(barred=self._memory.barred)
            self._begin(engine)
            return self.num_ahead
        self._num_batches += 1
        if self._num_batches >= WINDOW_BATCHES and (seconds := monotonic() - self._began) >= WINDOW_S:
            self._end_window(engine, seconds)
        return self.num_ahead

    # ------------------------------------------------------------ windows

    def _begin(self, engine: Engine) -> None:
        self._before = engine.pace()
        self._num_batches, self._began = 0, monotonic()

    def _end_window(self, engine: Engine, seconds: float) -> None:
        (wait_s, busy_s, num_restarts), before = engine.pace(), self._before
        if engine.worker_set.is_complete() and num_restarts == before[2]:
            window = RateWindow(seconds, wait_s - before[0], busy_s - before[1], self._num_batches)
            allowed = ring_budget(self._ring_bytes, engine.worker_set.payload_nbytes)
            room = min(max(engine.worker_set.room(allowed), 1), self._most_ahead)
            self._limits = Limits(self._least, self._most, self._most_ahead, room, engine.worker_set.start_s)
            last = self._memory.look
            self._memory, decision = decide(self._setting, self._memory, window, self._limits)
            if (look := self._memory.look) is not None and look is not last:
                self._bottleneck = judge_ring(trainer_waits=look.waits, workers_busy=min(look.busy, 1.0))
            if decision is not None:
                self._change(engine, decision)
            engine.worker_set.make_room(self.num_ahead, allowed)  # slots may have become free that were to be parked
        self._begin(engine)

    def _change(self, engine: Engine, decision: Decision) -> None:
        before, setting, reason = self._setting, decision.setting, decision.reason
        if setting.num_workers != before.num_workers and not engine.worker_set.resize(setting.num_workers):
            self._most = self._most._replace(num_workers=before.num_workers)
            engine.worker_set.resize(before.num_workers)
            setting, reason = before, f"{reason}; but no more processes could be started"
            self._memory = LookMemory(barred=self._memory.barred)
        self._setting, self.num_ahead = setting, setting.num_ahead
        look = self._memory.look
        self._decisions.append(
            {
                "num_workers": setting.num_workers,
                "prefetch_factor": setting.prefetch,
                "reason": reason,
                "batches": int(engine.totals()["batches"]),
                "batches_per_s": look and look.rate,
                "trainer_waits": look and look.waits,
                "workers_busy": look and look.busy,
            }
        )
        log.info("autotune: %s", reason)
        self._on_change(setting)

    def stats(self) -> dict[str, Any]:
        """Return the current numbers, the bottleneck, and the last decisions, the newest last."""
        return {
            "num_workers": self._setting.num_workers,
            "prefetch_factor": self._setting.prefetch,
            "most_workers": self._most.num_workers,
            "bottleneck": self._bottleneck,
            "decisions": list(self._decisions),
        }
