"""Tune the "auto" settings of a running engine: measure windows of time, change a setting if needed, and log the reason.

It runs in the trainer's `next()`. Each batch costs one count and one reading of the clock, and the ring's counters are read twice a
second. A window in which a worker started or was replaced is discarded, because it measures neither the old nor the new worker
pool. `tuning_decision.py` decides on changes, and `tuning_limits.py` says how many CPUs and bytes may be used.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from shmload.engine.batch_source import BatchSource
from shmload.engine.bottleneck import Bottleneck, judge_ring
from shmload.engine.engine import Engine
from shmload.engine.tuning.auto_number import AutoNumber, is_auto
from shmload.engine.tuning.tuning_decision import Decision, Limits, RateWindow, Setting, TuningHistory, decide
from shmload.engine.tuning.tuning_limits import first_workers, fixed_workers, most_workers, ring_budget

if TYPE_CHECKING:
    from shmload.engine.config import LoaderConfig

log = logging.getLogger("shmload")

WINDOW_S = 0.5  # minimum duration of a window
WINDOW_BATCHES = 8  # minimum number of batches in a window
FIRST_PREFETCH = 2
PREFETCH_MAX = 8
MOST_AHEAD = 64  # most batches in progress, or 2 for each worker if that is more; limited because workers read every slot's record
NUM_KEPT = 20  # number of decisions in stats()


def first_numbers(num_workers: Any, prefetch_factor: Any, *, is_torch_mode: bool) -> tuple[Any, Any]:
    """Return the initial `num_workers` and `prefetch_factor`; arguments that are not "auto" are returned unchanged."""
    if is_auto(num_workers):
        first = fixed_workers() if is_torch_mode else first_workers()
        num_workers = AutoNumber(first)
    if is_auto(prefetch_factor):
        prefetch_factor = AutoNumber(FIRST_PREFETCH)
    return num_workers, prefetch_factor


def tuner_of(config: LoaderConfig, on_change: Callable[[Setting], None]) -> Autotuner | None:
    """Return a new tuner for a loader; None if the loader has no setting that may change.

    In torch mode the number of workers is fixed, even if it was given as "auto".
    """
    changes_pool = is_auto(config.num_workers) and config.seed is not None
    may_change = config.num_workers and (changes_pool or is_auto(config.prefetch_factor))
    return Autotuner(config, on_change) if may_change else None


class Autotuner:
    """The tuner of one loader, which keeps its settings when a new engine replaces the last.

    Args:
        config: the loader's configuration.
        on_change: called with the initial settings, and with the new ones after each change, to update the loader's attributes.
    Attributes:
        num_ahead: number of batches to order ahead.
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
        # the loader may have been unpickled from a larger host
        self._setting = Setting(min(given.num_workers, most.num_workers), given.prefetch)
        needed = most.num_workers * max(least.prefetch, min(FIRST_PREFETCH, most.prefetch))
        self._most_ahead = max(needed, min(most.num_ahead, MOST_AHEAD))
        self.num_ahead = self._setting.num_ahead
        on_change(self._setting)
        self._history = TuningHistory()
        self._decisions: deque[dict[str, Any]] = deque(maxlen=NUM_KEPT)
        self._bottleneck: Bottleneck = "unknown"
        self._limits = Limits(least, most, self._most_ahead, self._most_ahead, 0.0)
        self._engine: weakref.ref[Engine] | None = None
        self._num_batches = 0  # batches in this window
        self._began = 0.0
        self._before = (0.0, 0.0, 0)

    def still_matches(self, config: LoaderConfig) -> bool:
        """Return whether the loader's settings are still those that this tuner has set."""
        return self._setting == (config.total_workers, config.prefetch_factor)

    def engine_options(self) -> dict[str, int]:
        """Return the `EngineOptions` that decide a new engine's size: its maximum and its initial settings."""
        return {
            "num_workers": self._most.num_workers,
            "num_ordered": self._most_ahead,
            "first_workers": self._setting.num_workers,
            "first_ordered": self._setting.num_ahead,
        }

    def count_batch(self, engine: BatchSource) -> int:
        """Count a delivered batch, and change a setting if a window has ended. Return the number of batches to order ahead."""
        assert isinstance(engine, Engine)  # ranks that share a ring have fixed settings
        if self._engine is None or self._engine() is not engine:
            self._engine = weakref.ref(engine)
            self._history = TuningHistory(barred=self._history.barred)
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
        """Judge the window that ends, carry out a decision, and begin the next window."""
        (wait_s, busy_s, num_restarts), before = engine.pace(), self._before
        if engine.worker_set.is_complete() and num_restarts == before[2]:
            window = RateWindow(seconds, wait_s - before[0], busy_s - before[1], self._num_batches)
            allowed = ring_budget(self._ring_bytes, engine.worker_set.payload_nbytes)
            room = min(max(engine.worker_set.room(allowed), 1), self._most_ahead)
            self._limits = Limits(self._least, self._most, self._most_ahead, room, engine.worker_set.start_s)
            last = self._history.look
            self._history, decision = decide(self._setting, self._history, window, self._limits)
            if (look := self._history.look) is not None and look is not last:
                self._bottleneck = judge_ring(trainer_waits=look.waits, workers_busy=min(look.busy, 1.0))
            if decision is not None:
                self._change(engine, decision)
            engine.worker_set.make_room(self.num_ahead, allowed)  # also without a change: slots to be parked may be free now
        self._begin(engine)

    def _change(self, engine: Engine, decision: Decision) -> None:
        """Apply a decision, and record it. Without room for more processes, keep the number of workers from then on."""
        before, setting, reason = self._setting, decision.setting, decision.reason
        if setting.num_workers != before.num_workers and not engine.worker_set.resize(setting.num_workers):
            self._most = self._most._replace(num_workers=before.num_workers)
            engine.worker_set.resize(before.num_workers)
            setting, reason = before, f"{reason}; but no more processes could be started"
            self._history = TuningHistory(barred=self._history.barred)
        self._setting, self.num_ahead = setting, setting.num_ahead
        look = self._history.look
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
        """Return the current settings, the bottleneck, and the last `NUM_KEPT` decisions, the newest last."""
        return {
            "num_workers": self._setting.num_workers,
            "prefetch_factor": self._setting.prefetch,
            "most_workers": self._most.num_workers,
            "bottleneck": self._bottleneck,
            "decisions": list(self._decisions),
        }
