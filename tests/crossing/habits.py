"""What is done with the loaders of a case (its habit), and the comparison of each batch with the oracle.

`Trial` runs one case in this process and raises on a failure; `process.py` gives it a process of its own.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, thread_time
from typing import Any
from weakref import WeakSet

import psutil
import torch

from shmload.tools.audit.verify import read_folder, verify
from shmload.worker import template
from tests.crossing.cases import BY_BATCH, Case
from tests.crossing.datasets import CaseDataset
from tests.crossing.options import IDLE, AfterFailed, Marked, loader_options
from tests.crossing.oracle import END, SKIPPED, Expected, Fails, SeedOrder, TorchOrder, difference, seed_generators
from tests.simulated_device.device import SimulatedDevice

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
WORKER_NAME = "pt_data_worker"
STOP_S = 0.15
NUM_STARTED = 9  # batches
KEPT_MAX = 24  # batches that are kept at a time
HEAP_OBJECTS = 300_000  # a full collection takes 20 to 40 ms for them
NUM_FIRST = 5  # batches that show what one costs
LATER_S = 0.003  # CPU time that a later batch may cost in addition, on a loaded machine
GRACE_S = 30.0
WAIT_MAX_S = 5.0  # with forked workers, on an idle machine
ENDED = r"DataLoader worker \(pid(\(s\))? \d+\) (exited unexpectedly|is killed by signal)"


class Wrong(AssertionError):
    """A result is not as expected."""


class Refused(Exception):
    """The product refuses the case at construction of a loader."""


class WaitTimer:
    """Measures how long `next()` takes at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.allowed_s = 0.0  # the time that faults in workers may add

    def timed(self, call: Callable[[], Any]) -> Any:
        """Returns the result of the call and records its duration."""
        began = monotonic()
        try:
            return call()
        finally:
            self.longest_s = max(self.longest_s, monotonic() - began)


class Position:
    """The position of one rank in a pass, and the batches expected from there."""

    def __init__(self, trial: Trial, at: Callable[[int], Any], step: int = 0) -> None:
        self._trial = trial
        self.at = at
        self.step = step

    def next(self) -> Any:
        """Returns the next expected batch, without those of which nothing is delivered."""
        while True:
            keys = self.at(self.step)
            if keys is END or keys is None:
                return END
            self.step += 1
            expected = self._trial.expected.of(keys)
            if expected is not SKIPPED:
                return expected


class Loaders:
    """The loaders of all ranks, and the position of their next pass."""

    def __init__(self, trial: Trial, case: Case, ranks: int, workers: Any) -> None:
        self._trial = trial
        self.case, self.ranks = case, ranks
        self.epoch = 0  # epoch of the next pass, in seed mode
        self.first = 0  # first step of the next pass
        self.continues = False  # the next pass continues an epoch that other loaders have begun
        self.is_quiet = True  # no order is pending, so no later epoch is fixed yet
        self.each: list[Any] = []
        trial.made.begin_run()
        trial.open_loaders.add(self)
        self._works_inline = workers == 0
        for rank in range(ranks):
            options = loader_options(case, rank=rank, ranks=ranks, workers=workers)
            self.each.append(trial.made_loader(options | trial.own_options))

    def begin(self) -> None:
        """Records that a pass begins, after which workers may order the next one at any time."""
        self.continues, self.is_quiet = False, self._works_inline

    def close(self) -> None:
        """Closes all loaders."""
        for loader in self.each:
            loader.close()
        self.each.clear()
        self._trial.open_loaders.discard(self)
        if self.case.program == "closes" and not self._trial.open_loaders:  # running workers would be lost, as with torch
            self._trial.close_descriptors()


class RankPasses:
    """One pass of all ranks, in step with each other."""

    def __init__(self, trial: Trial, loaders: Loaders, positions: list[Position]) -> None:
        self._trial = trial
        self._loaders = loaders
        self.positions = positions
        self.iterators: list[Any] = []
        for rank, loader in enumerate(loaders.each):
            if trial.case.program == "sets":
                trial.set_attribute(loader.dataset, rank)
            self.iterators.append(iter(loader))
            if loaders.is_quiet and trial.case.seed % 3 == 0:
                trial.made.append()  # so that ranks have to agree

    def take(self, most: int | None = None) -> int:
        """Takes `most` batches of each rank, or all that are left. Returns the number of steps."""
        trial = self._trial
        taken, unfinished = 0, list(range(len(self.iterators)))
        while unfinished and (most is None or taken < most):
            for rank in list(unfinished):
                trial.inject_fault()
                if not trial.compare(self.iterators[rank], self.positions[rank], rank):
                    unfinished.remove(rank)
                if self._loaders.is_quiet and trial.case.seed % 2:
                    trial.made.append()  # not seen by any rank in this epoch
            taken += 1
        return taken


class Trial:
    """The run of one case in this process."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.made = CaseDataset(case, folder)
        self.timer_of_next = WaitTimer()
        self.num_batches = 0
        self._rng = random.Random(case.seed)
        self._held: list[tuple[Any, Any, str]] = []
        self._num_faults = 0
        self._timers: list[threading.Timer] = []
        self._unordered: list[tuple[Any, Any]] = []  # (expected, got) of batches whose order is free
        self._costs: list[float] = []  # CPU seconds of this thread per batch
        self._begun: WeakSet[Any] = WeakSet()  # iterators that have given a batch
        self._decoys: list[int] = []  # descriptors that the program opens
        self.open_loaders: set[Loaders] = set()
        self.order: Any = None
        self._sizes: dict[int, int] = {}  # number of samples of a growing dataset, by epoch
        self._orders: dict[int, SeedOrder] = {}
        self.expected = Expected(case)
        self.own_options: dict[str, Any] = {}  # options of all loaders of the case
        self.device = SimulatedDevice(self._rng.randrange) if "d" in case.also else None
        self._own_descriptors = {int(name) for name in os.listdir("/proc/self/fd")}  # those of these tests

    # ------------------------------------------------------------ the whole case

    def run(self) -> None:
        """Runs the case. Raises Wrong, Refused or any unexpected error."""
        case = self.case
        if case.kind == "pipeline":
            from tests.crossing.pipelines import run_pipeline

            self._with_faults(lambda: run_pipeline(self))
        else:
            for number in range(case.loaders):
                if self.device is not None:
                    self.own_options["device"] = self.device
                if not case.is_seeded:
                    if "g" in case.also:
                        self.own_options["generator"] = torch.Generator().manual_seed(case.seed)
                    self.order = TorchOrder(case, self.made)
                    seed_generators(case.seed)
                elif number == 0:
                    self.order = SeedOrder(case, self.made)
                if number < case.loaders - 1:
                    self.start()
                else:
                    self._run_habit()
        self.clean_up()

    def _run_habit(self) -> None:
        if self.case.idle:
            self._check_refusal(IDLE[self.case.idle])
        if self.case.hold == "last":
            self._heap = [[number] for number in range(HEAP_OBJECTS)]
        if "a" in self.case.also:
            self.own_options["audit"] = self.made.folder / "audit"
        self._with_faults(getattr(self, f"habit_{self.case.habit}"))

    def _check_refusal(self, idle: dict[str, Any]) -> None:
        """Checks that an argument without an effect is a ValueError that names it."""
        from shmload import ShmLoader

        options = loader_options(self.case) | self.own_options | idle
        try:
            ShmLoader(self.made.fresh(), **options).close()
        except ValueError as error:
            if "has no effect" in str(error) or "have no effect" in str(error):
                if all(name in str(error) for name in idle):
                    return
                raise Wrong(f"{idle} was refused with a message that does not name it: {error}") from error
            raise Refused(f"ValueError: {error}") from error
        except (TypeError, NotImplementedError) as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        raise Wrong(f"{idle} has no effect and was not refused")

    def _with_faults(self, habit: Callable[[], None]) -> None:
        """Runs the habit and verifies the audit, unless a fault in the workers ended the loader."""
        try:
            habit()
            self._check_costs()
            self.verify()
        except (RuntimeError, Wrong) as error:
            if not (self._num_faults and self._ends_the_loader(error)):
                raise
            self._forget()

    def _check_costs(self) -> None:
        """Checks that kept batches in a process with many objects cost little: all together hardly more than as many first
        batches.
        """
        if self.case.hold != "last" or len(self._costs) < 3 * NUM_FIRST:
            return
        if self.case.deadly or (self.case.harm == "kill" and self._num_faults):  # each worker that is replaced costs a fork
            return
        first, later = sorted(self._costs[:NUM_FIRST])[NUM_FIRST // 2], self._costs[NUM_FIRST:]
        began = thread_time()
        gc.collect()
        allowed_s = len(later) * (10 * first + LATER_S) + 3 * (thread_time() - began)
        if sum(later) > allowed_s:
            raise Wrong(
                f"kept batches are expensive: {len(later)} took {sum(later):.3f} s of CPU, the first ones {first * 1e3:.2f} ms each"
            )

    def verify(self) -> None:
        """Verifies the audit of the deliveries, if there is one."""
        folder = self.made.folder / "audit"
        if not folder.exists():  # nothing was delivered
            return
        report, _ = verify(read_folder(folder))
        case = self.case
        is_lossy = case.after == "fail" or (case.harm == "kill" and not case.is_seeded) or case.habit == "break"
        if case.bad:  # with several ranks a state is that of the furthest rank, which may have skipped batches
            is_lossy = is_lossy or case.on_error == "raise" or (case.on_error == "skip" and case.ranks > 1)
        if wrong := [found for found in report.findings if found.kind != "missing" or not is_lossy]:
            raise Wrong(f"audit: {report.verdict}: {'; '.join(f'{found.kind}: {found.text}' for found in wrong)}")

    def wait_max_s(self) -> float:
        """Returns how long next() may take on a machine as busy as this one is now."""
        imports_torch = self.case.start != "fork" or self.case.backend == "ray"
        return WAIT_MAX_S * (4 if imports_torch else 1) * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    def _ends_the_loader(self, error: BaseException) -> bool:
        """Returns whether a fault in its workers may end the loader with this error; earlier batches have been compared.

        If workers are not replaced, the error is torch's for a dead worker. Otherwise it is that of a deadly batch, if two of the
        kills met one batch.
        """
        case, message = self.case, f"{error} {error.__cause__}"
        if case.harm != "kill":
            return False
        if case.is_seeded or case.restarts:
            return self._num_faults > 1 and "ended its worker twice" in message
        return re.search(ENDED, message) is not None

    def made_loader(self, options: dict[str, Any]) -> Any:
        """Returns a loader over a fresh dataset."""
        from shmload import ShmLoader

        dataset = self.made.fresh()
        try:
            return ShmLoader(dataset, **options)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise Refused(f"{type(error).__name__}: {error}") from error

    def set_attribute(self, dataset: Any, rank: int) -> None:
        """Gives a dataset, or the one within it, another number."""
        while not hasattr(dataset, "set_pass_number"):
            dataset = dataset.datasets[0] if hasattr(dataset, "datasets") else dataset.dataset
        dataset.set_pass_number(dataset.pass_number + 1, self.made.folder / f"pass-{id(dataset)}-{rank}")

    def close_descriptors(self) -> None:
        """Closes all descriptors but those of these tests, as daemons do, and opens other files under their numbers."""
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in self._own_descriptors:
                with suppress(OSError):  # the listing's own descriptor
                    os.close(int(name))
        if not self._decoys:
            self._decoys = [os.open(os.devnull, os.O_RDONLY) for _ in range(32)]
            self._own_descriptors |= set(self._decoys)

    # ------------------------------------------------------------ passes

    def loaders(self, ranks: int | None = None, workers: Any = None) -> Loaders:
        """Returns the loaders of all ranks."""
        case = self.case
        return Loaders(self, case, case.ranks if ranks is None else ranks, case.workers if workers is None else workers)

    def begin(self, loaders: Loaders) -> RankPasses:
        """Begins the next pass of all ranks."""
        if self.case.is_seeded:
            self._settle_size(loaders)
            positions = self._seed_positions(loaders, loaders.epoch, loaders.first)
            loaders.epoch, loaders.first = loaders.epoch + 1, 0
            loaders.begin()
        else:
            remembered = self.order.begin()
            positions = [Position(self, remembered.at)]
        return RankPasses(self, loaders, positions)

    def _settle_size(self, loaders: Loaders) -> None:
        """Sets the order for the number of samples that an epoch of a growing dataset has.

        An epoch has the samples that exist when it begins, and keeps them when it is continued.
        """
        if not self.case.appends:
            return
        if loaders.is_quiet:
            self.made.append()
        if not loaders.continues:
            self._sizes[loaders.epoch] = self.made.size
        size = self._sizes[loaders.epoch]
        if size not in self._orders:
            self._orders[size] = SeedOrder(replace(self.case, n=size, appends=0), self.made)
        self.order = self._orders[size]

    def _seed_positions(self, loaders: Loaders, epoch: int, first: int) -> list[Position]:
        size = self.case.batch_size
        if size and loaders.ranks != self.case.ranks:
            size = self.case.global_batch // loaders.ranks
        steps = self.order.steps(epoch, loaders.ranks, size)

        def at(rank: int) -> Callable[[int], Any]:
            return lambda step: steps[step][rank] if step < len(steps) else END

        return [Position(self, at(rank), first) for rank in range(loaders.ranks)]

    def num_steps(self, passes: RankPasses) -> int:
        """Returns the number of steps of a pass, for the rank that has most."""
        count = 0
        while any(position.at(count) not in (END, None) for position in passes.positions):
            count += 1
        return count

    def num_delivered(self, passes: RankPasses) -> int:
        """Returns the number of steps that deliver something. In torch mode the end is found by asking beyond it."""
        count = self.num_steps(passes)
        if not (self.case.bad and self.case.on_error == "skip") or self.case.is_seeded:
            return count
        (position,) = passes.positions
        return sum(self._is_delivered(position.at(step)) for step in range(count))

    def _is_delivered(self, keys: Any) -> bool:
        """Returns whether these keys give a batch or an error."""
        try:
            return self.expected.of(keys) is not SKIPPED
        except (TypeError, RuntimeError, IndexError):  # torch's collate raises for what the dataset's `__getitems__` returns
            return True

    def strikes_at(self, passes: RankPasses) -> int:
        """Returns the step at which a habit interrupts the pass."""
        count = self.num_delivered(passes)
        if self.case.at >= 1:
            return count
        if self.case.at > 0.99:
            return max(count - 1, 0)
        return int(count * self.case.at)

    # ------------------------------------------------------------ one batch

    def compare(self, iterator: Any, position: Position, rank: int) -> bool:
        """Takes a batch and compares it with the oracle. Returns False at the end."""
        where = f"batch {self.num_batches}, rank {rank}, step {position.step}"
        try:
            expected = position.next()
        except (TypeError, RuntimeError, IndexError) as error:
            expected = Fails(type(error).__name__)
        if not self.case.in_order:
            return self._take_unordered(iterator, expected)
        try:
            got = self._next(iterator)
        except StopIteration:
            if expected is not END:
                raise Wrong(f"{where}: the end instead of {expected if isinstance(expected, Fails) else 'a batch'}") from None
            return False
        except Exception as error:
            if isinstance(expected, Fails):
                if expected.kind in [kind.__name__ for kind in type(error).__mro__] or expected.kind in str(error):
                    return True
                raise Wrong(f"{where}: {type(error).__name__} instead of {expected.kind}: {error}") from error
            raise
        if expected is END:
            raise Wrong(f"{where}: an unexpected batch")
        if isinstance(expected, Fails):
            raise Wrong(f"{where}: a batch instead of {expected.kind}")
        self.num_batches += 1
        if problem := difference(expected, got):
            raise Wrong(f"{where}: {problem}")
        if self.case.hold in ("all", "last") or (self.case.hold == "some" and self._rng.random() < 0.3):
            self._held.append((got, expected, where))
        if self.case.hold == "last":
            del self._held[: -1 - self.case.seed % KEPT_MAX]
        return True

    def _next(self, iterator: Any) -> Any:
        """Returns the next batch as it was before after_batch."""
        began = thread_time()
        try:
            got = self.timer_of_next.timed(lambda: next(iterator))
            if self._had_begun(iterator):  # otherwise the call has started workers, at the cost of a fork
                self._costs.append(thread_time() - began)
        except AfterFailed as failed:
            got = failed.marked
        return self._unmarked(got)

    def _had_begun(self, iterator: Any) -> bool:
        """Returns whether the iterator has given a batch before, and marks it as begun."""
        try:
            had_begun = iterator in self._begun
            self._begun.add(iterator)
        except TypeError:  # a plain iterator, which test_crossing.py puts in place of a loader's
            return True
        return had_begun

    def _unmarked(self, got: Any) -> Any:
        if self.device is not None:
            self.device.run()
        if not self.case.after:
            return got
        if type(got) is not Marked or type(got.batch) is Marked:
            raise Wrong(f"a batch went through after_batch not at all or twice: {str(got)[:200]}")
        return got.batch

    def _take_unordered(self, iterator: Any, expected: Any) -> bool:
        """Takes a batch whose order is free, for `settle` to compare with all that are expected."""
        try:
            got = self._next(iterator)
        except StopIteration:
            if expected is not END:
                raise Wrong(f"batch {self.num_batches}: the end came too early") from None
            return False
        if expected is END:
            raise Wrong(f"batch {self.num_batches}: an unexpected batch")
        self.num_batches += 1
        self._unordered.append((expected, got))
        return True

    def settle(self) -> None:
        """Checks that every batch of a pass came once, in any order."""
        if not self._unordered:
            return
        expected = [wanted for wanted, _ in self._unordered]
        for _, got in self._unordered:
            for number, wanted in enumerate(expected):
                if not difference(wanted, got):
                    del expected[number]
                    break
            else:
                raise Wrong(f"in_order=False: an unexpected or repeated batch: {str(got)[:200]}")
        self._unordered.clear()

    # ------------------------------------------------------------ faults

    def inject_fault(self) -> None:
        """Kills a worker at random, or stops it for a while."""
        case = self.case
        if case.harm == "none" or self._num_faults >= 3 or self._rng.random() > 0.3:
            return
        oracle_workers = self.order.workers if isinstance(self.order, TorchOrder) else ()
        workers = sorted(pid for pid in _workers() if pid not in oracle_workers)
        if not workers:
            return
        self._num_faults += 1
        worker = self._rng.choice(workers)
        try:
            os.kill(worker, signal.SIGKILL if case.harm == "kill" else signal.SIGSTOP)
        except ProcessLookupError:  # it has ended already
            return
        if case.harm == "kill":
            return
        self.timer_of_next.allowed_s = STOP_S
        timer = threading.Timer(STOP_S, _continue, (worker,))
        timer.start()
        self._timers.append(timer)

    # ------------------------------------------------------------ habits

    def start(self) -> None:
        """Takes a loader's first batches, in which workers learn the layout of batches and races are likely."""
        loaders = self.loaders()
        self.begin(loaders).take(NUM_STARTED)
        self._forget()
        loaders.close()

    def habit_pass(self) -> None:
        loaders = self.loaders()
        for _ in range(2):
            self.begin(loaders).take()
            self.settle()
        loaders.close()

    def habit_break(self) -> None:
        loaders = self.loaders()
        for _ in range(2):
            passes = self.begin(loaders)
            if not self.case.is_seeded and self.case.shuffle:
                passes.take(max(self.strikes_at(passes), 1))  # the order is drawn with the first batch
            else:
                passes.take(self.strikes_at(passes))
            self._forget()
            del passes
        self.begin(loaders).take()
        self.settle()
        loaders.close()

    def habit_second(self) -> None:
        loaders = self.loaders()
        first = self.begin(loaders)
        first.take(max(self.strikes_at(first), 1))
        second = self.begin(loaders)
        second.take(max(self.strikes_at(second), 1))
        first.take()
        second.take()
        self._forget()
        loaders.close()

    def habit_resume(self) -> None:
        case = self.case
        loaders = self.loaders()
        passes = self.begin(loaders)
        passes.take(self.strikes_at(passes))
        states = self._states(loaders, passes)
        if self._rng.random() < 0.5:
            loaders.close()
        again = self.loaders(case.then_ranks, case.then_workers)
        if not case.is_seeded and case.shuffle and case.seed % 2:
            seed_generators(case.seed + 1)  # another program has other generators
        self._load(again, states)
        rest = self._resumed(again, passes)
        del passes
        loaders.close()
        rest.take()
        self.settle()
        self._read_later_epochs(again)
        again.close()

    def _read_later_epochs(self, loaders: Loaders) -> None:
        """Reads the epochs after a resumed one, which must equal those of the undisturbed run."""
        case = self.case
        if case.is_seeded:
            self.begin(loaders).take()
        elif not case.is_noisy and (not case.shuffle or self._draws_as_undisturbed()):
            for _ in range(2):
                self.begin(loaders).take()
                self.settle()

    def _draws_as_undisturbed(self) -> bool:
        """Returns whether a resumed loader draws its later orders as the oracle does, which has begun no pass in between."""
        case = self.case
        is_same_kind = not case.persistent or bool(case.workers and (case.then_workers or case.habit != "resume"))
        return case.habit in ("resume", "end", "reload") and is_same_kind

    def _states(self, loaders: Loaders, passes: RankPasses) -> list[str]:
        """Returns the states of the furthest ranks. A rank whose batch was all bad has gone on to the next one, and the others
        follow it.

        A rank that reached its end in this way, while others still have a row in the last step, is not used.
        """
        furthest = max(position.step for position in passes.positions)
        pairs = [pair for pair in zip(loaders.each, passes.positions, strict=True) if pair[1].step == furthest]
        under_way = [pair for pair in pairs if not self._has_ended(pair[1])]
        return [json.dumps(loader.state_dict()) for loader, _ in under_way or pairs]

    def _load(self, loaders: Loaders, states: list[str]) -> None:
        """Loads the state of a random rank into all loaders."""
        state = self._rng.choice(states)
        for loader in loaders.each:
            loader.load_state_dict(json.loads(state))

    def _resumed(self, again: Loaders, passes: RankPasses) -> RankPasses:
        """Begins the pass that continues where all ranks of another stopped."""
        case = self.case
        if not case.is_seeded:
            (position,) = passes.positions  # after the last batch and before the end was seen, nothing is left
            return RankPasses(self, again, [Position(self, position.at, position.step)])
        step, ranks = max(position.step for position in passes.positions), again.ranks
        # continue at the step of the furthest rank: the others skip what they have not read
        epoch, has_ended = again.epoch, all(position.at(step) in (END, None) for position in passes.positions)
        if not has_ended and case.order in BY_BATCH and case.order != "batch_sampler":
            step = step * case.ranks
            if step % ranks:
                raise Refused("the state is between two steps of the new ranks")
            step //= ranks
            rest = self._seed_positions(again, epoch, step)  # the rest may be less than a step of the new ranks
            has_ended = step > 0 and all(self._has_ended(position) for position in rest)
        again.epoch, again.first = (epoch + 1, 0) if has_ended else (epoch, step)
        again.continues = not has_ended
        return self.begin(again)

    @staticmethod
    def _has_ended(position: Position) -> bool:
        return position.at(position.step) in (END, None)

    def habit_reload(self) -> None:
        """Loads a state while a pass of the same loader runs."""
        loaders = self.loaders()
        passes = self.begin(loaders)
        passes.take(max(self.strikes_at(passes), 1))
        states = self._states(loaders, passes)
        steps = [position.step for position in passes.positions]
        passes.take(2)
        for position, step in zip(passes.positions, steps, strict=True):
            position.step = step
        if self.case.is_seeded:
            loaders.epoch = 0
        self._load(loaders, states)
        rest = self._resumed(loaders, passes)
        if self._rng.random() < 0.5:
            del passes
        rest.take()
        self._read_later_epochs(loaders)
        loaders.close()

    def habit_transfer(self) -> None:
        """Loads a state into another loader, which is at the same position of its own pass."""
        loaders = self.loaders()
        passes = self.begin(loaders)
        passes.take(max(self.strikes_at(passes), 1))
        states = self._states(loaders, passes)
        others = self.loaders()
        sizes = dict(self._sizes)  # the others may have begun the epoch with more samples
        own = self.begin(others)
        own.take(max(self.strikes_at(own), 1))
        self._sizes = sizes
        if self.case.is_seeded:
            others.epoch = 0
        self._load(others, states)
        self._resumed(others, passes).take()
        self._read_later_epochs(others)
        del own
        others.close()
        loaders.close()

    def _end_state(self) -> tuple[Loaders, list[str]]:
        loaders = self.loaders()
        self.begin(loaders).take()
        return loaders, [json.dumps(loader.state_dict()) for loader in loaders.each]

    def habit_end(self) -> None:
        """Loads the state of an epoch's end in the middle of the next one."""
        loaders, states = self._end_state()
        passes = self.begin(loaders)
        passes.take(max(self.strikes_at(passes), 1))
        if self.case.is_seeded:
            loaders.epoch, loaders.first = 1, 0
            loaders.continues = loaders.ranks > 1  # several ranks keep what they agreed on for the epoch; one alone looks again
            self._load(loaders, states)
            self.begin(loaders).take()
        else:
            self._load(loaders, states)
            (position,) = passes.positions
            RankPasses(self, loaders, [Position(self, position.at)]).take()
            self._read_later_epochs(loaders)
        loaders.close()

    def habit_threads(self) -> None:
        """Calls next() on one iterator in several threads: one of them gets each batch, or a clear refusal."""
        loaders = self.loaders()
        passes = self.begin(loaders)
        (position,) = passes.positions
        expected = []
        while (one := position.next()) is not END:
            expected.append(one)
        got: list[Any] = []
        errors: list[BaseException] = []
        (iterator,) = passes.iterators

        def read() -> None:
            try:
                got.extend(iterator)  # batch by batch
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=read, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * self.wait_max_s())
            if thread.is_alive():
                raise Wrong("a thread hangs in next()")
        for error in errors:
            if not is_clear_refusal(error):
                raise Wrong(f"threads: {type(error).__name__}: {error}") from error
        missing = list(expected)
        for batch in map(self._unmarked, got):
            for number, one in enumerate(missing):
                if not difference(one, batch):
                    del missing[number]
                    break
            else:
                raise Wrong(
                    f"threads: of {len(got)} batches ({len(expected)} expected) one is wrong or repeated: {str(batch)[:200]}"
                )
        if missing and len(errors) < len(threads):
            raise Wrong(f"threads: {len(missing)} of {len(expected)} batches reached no thread ({len(errors)} errors)")
        got.clear()
        loaders.close()

    def habit_corrupt(self) -> None:
        """Checks that a state with one flipped bit is refused."""
        from shmload import StateMismatch

        loaders = self.loaders()
        passes = self.begin(loaders)
        passes.take(self.strikes_at(passes))
        state = json.dumps(loaders.each[0].state_dict()).encode()
        for _ in range(8):
            harmed = bytearray(state)
            at = self._rng.randrange(len(harmed))
            harmed[at] ^= 1 << self._rng.randrange(7)
            try:
                loaded = json.loads(harmed)
            except ValueError:
                continue
            if loaded == json.loads(state):
                continue
            try:
                loaders.each[0].load_state_dict(loaded)
                list(loaders.each[0])
            except StateMismatch:
                continue
            except Exception as error:
                raise Wrong(f"a state with one flipped bit: {type(error).__name__} instead of StateMismatch: {error}") from error
            shown = harmed[max(at - 30, 0) : at + 10].decode("latin1")
            raise Wrong(f"a state with one flipped bit is accepted: ...{shown}...")
        loaders.close()

    def habit_rebuild(self) -> None:
        """Builds a loader again from its public attributes."""
        from shmload import ShmLoader

        loaders = self.loaders()
        names = list(inspect.signature(ShmLoader.__init__).parameters)[1:]
        for rank, loader in enumerate(loaders.each):
            given = {name: getattr(loader, name) for name in names}
            if self.case.order in BY_BATCH:
                for name in ("batch_size", "shuffle", "sampler", "drop_last"):
                    del given[name]
            else:
                del given["batch_sampler"]
                if given["sampler"] is not None and self.case.order not in ("sampler", "block", "weighted"):
                    del given["sampler"]
            public = {n for n in vars(loader) if not n.startswith("_")}
            if extra := sorted(public - set(names) - set(vars(torch.utils.data.DataLoader([1])))):
                raise Wrong(f"rebuild: public attributes that are not arguments: {extra}")
            loaders.each[rank] = ShmLoader(**given)
            loader.close()
        self.begin(loaders).take()
        loaders.close()

    # ------------------------------------------------------------ cleanup

    def _forget(self) -> None:
        self._unordered.clear()

    def clean_up(self) -> None:
        """Checks that held batches are unchanged and that nothing is left over."""
        for fd in self._decoys:
            if not os.path.samestat(os.fstat(fd), os.stat(os.devnull)):
                raise Wrong(f"descriptor {fd} of the program was closed and reused for another file")
            os.close(fd)
        for got, expected, where in self._held:
            if problem := difference(expected, got):
                raise Wrong(f"held until the end, {where}: {problem}")
        self._held.clear()
        for timer in self._timers:
            timer.join()
        self.order = None
        self.open_loaders.clear()  # a loader that a kill has ended was not closed
        self.made.forget()
        self._unordered.clear()
        if self.device is not None and self.device.violations:
            raise Wrong(f"device: {self.device.violations[0]}")
        gc.collect()
        if left := list(left_over()):
            raise Wrong(f"left over: {'; '.join(left)}")


def is_clear_refusal(error: BaseException) -> bool:
    """Returns whether the error tells a thread that the iterator is in use by another one."""
    message = f"{error} {error.__cause__}"
    return (isinstance(error, RuntimeError) and "thread" in message) or "already executing" in message


def _workers() -> Iterator[int]:
    for child in psutil.Process().children(recursive=True):
        try:
            if child.name().startswith(WORKER_NAME[:14]):
                yield child.pid
        except psutil.Error:  # it has ended already
            pass


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def left_over() -> Iterator[str]:
    """Yields processes, names and descriptors that are still there after a while."""
    deadline, pause = monotonic() + GRACE_S, threading.Event()
    while True:
        found = list(_left_now())
        if not found or monotonic() > deadline:
            yield from found
            return
        pause.wait(0.02)


def _left_now() -> Iterator[str]:
    template_pid = template._current and template._current.process.pid  # lives as long as the process, as HELPERS do
    for child in psutil.Process().children(recursive=True):
        try:
            words = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and child.pid != template_pid and not any(name in words for name in HELPERS):
                yield f"a process: {child.name()} {words[:80]!r}"
        except psutil.Error:
            pass
    from shmload.shm.names import process_stem

    for name in os.listdir("/dev/shm"):
        if process_stem() in name:
            yield f"/dev/shm/{name}"
