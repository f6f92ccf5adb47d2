"""What `num_workers` and `prefetch_factor` are while they are found automatically: the number now, which remembers that it is.

What "auto" may take: processors and bytes.

Processors are those this process may run on, by affinity and cgroup quota, divided by the ranks on this node (LOCAL_WORLD_SIZE,
which launchers set): ranks share them, unless our own launcher has given each its own. SHMLOAD_MAX_WORKERS says another number, for
one loader: a smaller one where several loaders run side by side, a larger one where samples wait for a network more than they
compute.

Bytes are `ring_bytes`, or a quarter of what free memory and cgroups leave to a rank, the ring's own included. /dev/shm is no limit,
as slots that come later lie in memfds where it has little room.

The controller at work: measures windows of a running engine, asks what to change, does it, and says what it did and why.

It lives in the trainer's `next()`: a batch costs it a count, and a few times a second it reads the clock and the ring's own
counters. A window is dropped in which a worker came up or was replaced, since it tells of neither worker pool.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from shmload.engine.controller import Decision, Limits, Memory, Setting, Window, bound_by, decide
from shmload.engine.engine import Engine
from shmload.engine.orders import BatchSource
from shmload.shm import segment
from shmload.shm.segment import available_bytes
from shmload.world import OWN_CPUS

if TYPE_CHECKING:
    from shmload.engine.builder import LoaderConfig

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
FIXED_MAX = 16  # workers in torch mode, where nothing tells whether more are of use


def num_cpus(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Processors that this rank may keep busy, at least 1."""
    quota, num_ranks = segment.cpus(root), num_ranks_here(environ)
    usable = len(os.sched_getaffinity(0))
    own = environ.get(OWN_CPUS, "")
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
        raise ValueError(
            f'{LIMIT} is a whole number from 1 up, the most workers that num_workers="auto" takes; got {given!r}'
        )
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
    return max(int(given), 1) if given.isdecimal() else 1


log = logging.getLogger("shmload")

WINDOW_S = 0.5
WINDOW_BATCHES = 8  # at least, in a window
LOOKS = 4  # at the clock, about, in a window
COUNT_MAX = 64  # batches between two looks at the clock: the pace may fall
FIRST_PREFETCH = 2
PREFETCH_MAX = 8
MOST_AHEAD = 64  # batches under way, or 2 a worker: every slot has a record that workers look at
NUM_KEPT = 20  # decisions that stats() tells of


def first_numbers(num_workers: Any, prefetch_factor: Any, *, is_torch_mode: bool) -> tuple[Any, Any]:
    """`num_workers` and `prefetch_factor` to begin with; as they are if they are no "auto"."""
    if is_auto(num_workers):
        first = fixed_workers() if is_torch_mode else first_workers()
        num_workers = AutoNumber(first)
    if is_auto(prefetch_factor):
        prefetch_factor = AutoNumber(FIRST_PREFETCH)
    return num_workers, prefetch_factor


def tuner_of(config: LoaderConfig, tell: Callable[[Setting], None]) -> Autotuner | None:
    """What tunes a loader while it runs; None if nothing of it may change."""
    changes_pool = is_auto(config.num_workers) and config.seed is not None
    may_change = config.num_workers and (changes_pool or is_auto(config.prefetch_factor))
    return Autotuner(config, tell) if may_change else None


class Autotuner:
    """Tunes one loader, over one engine after the other.

    Args:
        tell: told of the numbers whenever they change, so that the loader's attributes can be those of now.

    Attributes:
        num_ahead: batches to be ordered ahead now.
    """

    def __init__(self, config: LoaderConfig, tell: Callable[[Setting], None]) -> None:
        self._tell = tell
        self._ring_bytes = config.ring_bytes
        given = Setting(config.total_workers, int(config.prefetch_factor or 1))
        least, most = given, given
        if is_auto(config.num_workers) and config.seed is not None:
            least, most = least._replace(num_workers=1), most._replace(num_workers=most_workers())
        if is_auto(config.prefetch_factor):
            least, most = least._replace(prefetch=1), most._replace(prefetch=PREFETCH_MAX)
        self._least, self._most = least, most
        self._setting = Setting(
            min(given.num_workers, most.num_workers), given.prefetch
        )  # a copy may come from a larger host
        needed = most.num_workers * max(least.prefetch, min(FIRST_PREFETCH, most.prefetch))
        self._most_ahead = max(needed, min(most.num_ahead, MOST_AHEAD))
        self.num_ahead = self._setting.num_ahead
        tell(self._setting)
        self._memory = Memory()
        self._decisions: deque[dict[str, Any]] = deque(maxlen=NUM_KEPT)
        self._bound_by = ""
        self._limits = Limits(least, most, self._most_ahead, self._most_ahead, 0.0)
        self._engine: weakref.ref[Engine] | None = None
        self._left = self._count = 1  # batches until the next look at the clock, and in all since the last
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
        self._left -= 1
        if self._left <= 0:
            assert isinstance(engine, Engine)  # ranks that share a ring give fixed numbers
            self._look(engine)
        return self.num_ahead

    # ------------------------------------------------------------ windows

    def _look(self, engine: Engine) -> None:
        if self._engine is None or self._engine() is not engine:
            self._engine = weakref.ref(engine)
            self._memory = Memory(barred=self._memory.barred)
            self._begin(engine)
            return
        self._num_batches += self._count
        seconds = monotonic() - self._began
        if seconds >= WINDOW_S and self._num_batches >= WINDOW_BATCHES:
            self._end_window(engine, seconds)
            return
        rate = self._num_batches / max(seconds, 1e-9)
        self._left = self._count = min(max(int(rate * WINDOW_S / LOOKS), 1), COUNT_MAX)

    def _begin(self, engine: Engine) -> None:
        self._before = engine.pace()
        self._num_batches, self._left, self._count = 0, 1, 1
        self._began = monotonic()

    def _end_window(self, engine: Engine, seconds: float) -> None:
        (wait_s, busy_s, num_restarts), before = engine.pace(), self._before
        if engine.worker_set.is_complete() and num_restarts == before[2]:
            window = Window(seconds, wait_s - before[0], busy_s - before[1], self._num_batches)
            allowed = ring_budget(self._ring_bytes, engine.size.payload_nbytes)
            room = min(max(engine.size.room(allowed), 1), self._most_ahead)
            self._limits = Limits(self._least, self._most, self._most_ahead, room, engine.worker_set.start_s)
            last = self._memory.look
            self._memory, decision = decide(self._setting, self._memory, window, self._limits)
            if (look := self._memory.look) is not None and look is not last:
                self._bound_by = bound_by(self._setting, look, self._limits)
            if decision is not None:
                self._change(engine, decision)
            engine.size.make_room(self.num_ahead, allowed)  # slots may have become free that were to be parked
        self._begin(engine)

    def _change(self, engine: Engine, decision: Decision) -> None:
        before, setting, reason = self._setting, decision.setting, decision.reason
        if setting.num_workers != before.num_workers and not engine.size.resize(setting.num_workers):
            self._most = self._most._replace(num_workers=before.num_workers)
            engine.size.resize(before.num_workers)
            setting, reason = before, f"{reason}; but no more processes could be started"
            self._memory = Memory(barred=self._memory.barred)
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
        self._tell(setting)

    def stats(self) -> dict[str, Any]:
        """What is set now, what holds the pipeline back, and the last decisions, the newest last."""
        return {
            "num_workers": self._setting.num_workers,
            "prefetch_factor": self._setting.prefetch,
            "most_workers": self._most.num_workers,
            "bound_by": self._bound_by,
            "decisions": list(self._decisions),
        }
