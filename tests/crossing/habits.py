"""What is done with the loaders of a case, and how each batch is held against the oracle.

`Trial` runs one case in this process and gives what was found; `process.py` sees to it that the process is one of its own.
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
from tests.crossing.datasets import Made
from tests.crossing.options import IDLE, AfterFailed, Marked, loader_options
from tests.crossing.oracle import END, SKIPPED, Expected, Fails, SeedOrder, TorchOrder, difference, seed_generators
from tests.stand_in.device import StandIn

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
WORKER_NAME = "pt_data_worker"
STOPPED_S = 0.15
STARTED = 9  # batches
MOST_KEPT = 24  # batches that are kept at a time
HEAP_OBJECTS = 300_000  # a full collection goes over them in 20 to 40 ms
NUM_FIRST = 5  # batches that say what one costs
LATER_S = 0.003  # CPU of a later batch beyond that, on a loaded machine
GONE_S = 5.0
WAIT_MAX_S = 5.0  # with forked workers, on an idle machine
ENDED = r"DataLoader worker \(pid(\(s\))? \d+\) (exited unexpectedly|is killed by signal)"


class Wrong(AssertionError):
    """Something is not as it must be."""


class Refused(Exception):
    """The product refuses the case when a loader is made."""


class Watch:
    """How long `next()` takes at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.allowed_s = 0.0  # what was done to workers may cost

    def timed(self, call: Callable[[], Any]) -> Any:
        """What the call gives."""
        began = monotonic()
        try:
            return call()
        finally:
            self.longest_s = max(self.longest_s, monotonic() - began)


class Place:
    """Where a pass of one rank stands, and what it must give next."""

    def __init__(self, trial: Trial, at: Callable[[int], Any], step: int = 0) -> None:
        self._trial = trial
        self.at = at
        self.step = step

    def next(self) -> Any:
        """The expectation of the next batch that comes at all."""
        while True:
            keys = self.at(self.step)
            if keys is END or keys is None:
                return END
            self.step += 1
            expected = self._trial.expected.of(keys)
            if expected is not SKIPPED:
                return expected


class Loaders:
    """The loaders of all ranks, and what they must give."""

    def __init__(self, trial: Trial, case: Case, ranks: int, workers: Any) -> None:
        self._trial = trial
        self.case, self.ranks = case, ranks
        self.epoch = 0  # of the next pass, in seed mode
        self.first = 0  # its first step
        self.goes_on = False  # in the midst of an epoch that other loaders have begun
        self.is_quiet = True  # nothing is ordered, and so no later epoch settled
        self.each: list[Any] = []
        trial.made.begin_run()
        trial.open_loaders.add(self)
        self._works_inline = workers == 0
        for rank in range(ranks):
            options = loader_options(case, rank=rank, ranks=ranks, workers=workers)
            self.each.append(trial.made_loader(options | trial.own_options))

    def begin(self) -> None:
        """Says that a pass begins, behind which workers order the next one whenever they like."""
        self.goes_on, self.is_quiet = False, self._works_inline

    def close(self) -> None:
        """Ends them."""
        for loader in self.each:
            loader.close()
        self.each.clear()
        self._trial.open_loaders.discard(self)
        if self.case.program == "closes" and not self._trial.open_loaders:  # workers that run would be lost, as with torch
            self._trial.close_descriptors()


class Passes:
    """One pass of all ranks, in step."""

    def __init__(self, trial: Trial, loaders: Loaders, places: list[Place]) -> None:
        self._trial = trial
        self._loaders = loaders
        self.places = places
        self.iterators: list[Any] = []
        for loader in loaders.each:
            self.iterators.append(iter(loader))
            if loaders.is_quiet and trial.case.seed % 3 == 0:
                trial.made.append()  # so that ranks have to agree

    def take(self, most: int | None = None) -> int:
        """So many batches of each rank, or all to the end; how many it were."""
        trial = self._trial
        taken, open_ones = 0, list(range(len(self.iterators)))
        while open_ones and (most is None or taken < most):
            for rank in list(open_ones):
                trial.harm()
                if not trial.compare(self.iterators[rank], self.places[rank], rank):
                    open_ones.remove(rank)
                if self._loaders.is_quiet and trial.case.seed % 2:
                    trial.made.append()  # which no rank sees in this epoch
            taken += 1
        return taken


class Trial:
    """One case, run in this process."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.made = Made(case, folder)
        self.watch = Watch()
        self.num_batches = 0
        self._rng = random.Random(case.seed)
        self._held: list[tuple[Any, Any, str]] = []
        self._harms = 0
        self._timers: list[threading.Timer] = []
        self._loose: list[tuple[Any, Any]] = []  # batches whose order is free
        self._costs: list[float] = []  # CPU seconds of this thread for each batch
        self._begun: WeakSet[Any] = WeakSet()  # iterators that have given a batch
        self._decoys: list[int] = []  # descriptors of the program's
        self.open_loaders: set[Loaders] = set()
        self.order: Any = None
        self._sizes: dict[int, int] = {}  # of epochs that a growing dataset's samples are read in
        self._orders: dict[int, SeedOrder] = {}
        self.expected = Expected(case)
        self.own_options: dict[str, Any] = {}  # of all its loaders
        self.device = StandIn(self._rng.randrange) if "d" in case.also else None
        self._own_descriptors = {int(name) for name in os.listdir("/proc/self/fd")}  # of these tests

    # ------------------------------------------------------------ the whole of it

    def run(self) -> None:
        """Raises Wrong, Refused, or whatever comes that must not."""
        case = self.case
        if case.kind == "pipeline":
            from tests.crossing.pipelines import run_pipeline

            self._harmed(lambda: run_pipeline(self))
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
                    self._practise()
        self.clean_up()

    def _practise(self) -> None:
        if self.case.idle:
            self._refuses(IDLE[self.case.idle])
        if self.case.hold == "last":
            self._heap = [[number] for number in range(HEAP_OBJECTS)]
        if "a" in self.case.also:
            self.own_options["audit"] = self.made.folder / "audit"
        self._harmed(getattr(self, f"habit_{self.case.habit}"))

    def _refuses(self, idle: dict[str, Any]) -> None:
        """An argument without an effect is a ValueError that names it."""
        from shmload import ShmLoader

        options = loader_options(self.case) | self.own_options | idle
        try:
            ShmLoader(self.made.fresh(), **options).close()
        except ValueError as error:
            if "has no effect" in str(error) or "have no effect" in str(error):
                if all(name in str(error) for name in idle):
                    return
                raise Wrong(f"{idle} was refused by a text that does not name it: {error}") from error
            raise Refused(f"ValueError: {error}") from error
        except (TypeError, NotImplementedError) as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        raise Wrong(f"{idle} has no effect and was not refused")

    def _harmed(self, practise: Callable[[], None]) -> None:
        """Goes through with it and holds the record against what it should be, unless what was done to the workers ended the loader."""
        try:
            practise()
            self._check_costs()
            self.verify()
        except (RuntimeError, Wrong) as error:
            if not (self._harms and self._ends_the_loader(error)):
                raise
            self._forget()

    def _check_costs(self) -> None:
        """Keeping batches in a process with many objects makes no batch dear: all together cost little more than as many first ones."""
        if self.case.hold != "last" or len(self._costs) < 3 * NUM_FIRST:
            return
        first, later = sorted(self._costs[:NUM_FIRST])[NUM_FIRST // 2], self._costs[NUM_FIRST:]
        began = thread_time()
        gc.collect()
        allowed_s = len(later) * (10 * first + LATER_S) + 3 * (thread_time() - began)
        if sum(later) > allowed_s:
            raise Wrong(
                f"{len(later)} batches took {sum(later):.3f} s of CPU, the first ones {first * 1e3:.2f} ms each: kept batches are dear"
            )

    def verify(self) -> None:
        """Holds what was recorded against what it should be."""
        folder = self.made.folder / "audit"
        if not folder.exists():  # nothing was delivered
            return
        report, _ = verify(read_folder(folder))
        case = self.case
        is_lossy = case.after == "fail" or (case.harm == "kill" and not case.is_seeded) or case.habit == "break"
        if case.bad:  # with several ranks a state is of the one that has come furthest, as one does whose batches are all bad
            is_lossy = is_lossy or case.on_error == "raise" or (case.on_error == "skip" and case.ranks > 1)
        if wrong := [found for found in report.findings if found.kind != "missing" or not is_lossy]:
            raise Wrong(f"audit: {report.verdict}: {'; '.join(f'{found.kind}: {found.text}' for found in wrong)}")

    def wait_max_s(self) -> float:
        """How long next() may take on a machine as busy as this one is now."""
        imports_torch = self.case.start != "fork" or self.case.backend == "ray"
        return WAIT_MAX_S * (4 if imports_torch else 1) * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    def _ends_the_loader(self, error: BaseException) -> bool:
        """Whether a loader may end so of what was done to its workers; what came before it has been compared.

        Where none is replaced, as torch says it of a dead worker; else, if two of the kills have met one batch, as if it were deadly.
        """
        case, said = self.case, f"{error} {error.__cause__}"
        if case.harm != "kill":
            return False
        if case.is_seeded or case.restarts:
            return self._harms > 1 and "ended its worker twice" in said
        return re.search(ENDED, said) is not None

    def made_loader(self, options: dict[str, Any]) -> Any:
        """A loader over a fresh dataset."""
        from shmload import ShmLoader

        dataset = self.made.fresh()
        try:
            return ShmLoader(dataset, **options)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise Refused(f"{type(error).__name__}: {error}") from error

    def close_descriptors(self) -> None:
        """Closes all descriptors that are not of these tests, as daemons do, and opens other files by their numbers."""
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in self._own_descriptors:
                with suppress(OSError):  # that of the listing itself
                    os.close(int(name))
        if not self._decoys:
            self._decoys = [os.open(os.devnull, os.O_RDONLY) for _ in range(32)]
            self._own_descriptors |= set(self._decoys)

    # ------------------------------------------------------------ passes

    def loaders(self, ranks: int | None = None, workers: Any = None) -> Loaders:
        """Of all ranks."""
        case = self.case
        return Loaders(self, case, case.ranks if ranks is None else ranks, case.workers if workers is None else workers)

    def begin(self, loaders: Loaders) -> Passes:
        """The next pass of all ranks."""
        if self.case.is_seeded:
            self._settle_size(loaders)
            places = self._seed_places(loaders, loaders.epoch, loaders.first)
            loaders.epoch, loaders.first = loaders.epoch + 1, 0
            loaders.begin()
        else:
            remembered = self.order.begin()
            places = [Place(self, remembered.at)]
        return Passes(self, loaders, places)

    def _settle_size(self, loaders: Loaders) -> None:
        """Which samples an epoch of a followed dataset has: all that are there when it is begun, and no others when it goes on."""
        if not self.case.appends:
            return
        if loaders.is_quiet:
            self.made.append()
        if not loaders.goes_on:
            self._sizes[loaders.epoch] = self.made.size
        size = self._sizes[loaders.epoch]
        if size not in self._orders:
            self._orders[size] = SeedOrder(replace(self.case, n=size, appends=0), self.made)
        self.order = self._orders[size]

    def _seed_places(self, loaders: Loaders, epoch: int, first: int) -> list[Place]:
        size = self.case.batch_size
        if size and loaders.ranks != self.case.ranks:
            size = self.case.global_batch // loaders.ranks
        steps = self.order.steps(epoch, loaders.ranks, size)

        def at(rank: int) -> Callable[[int], Any]:
            return lambda step: steps[step][rank] if step < len(steps) else END

        return [Place(self, at(rank), first) for rank in range(loaders.ranks)]

    def num_steps(self, passes: Passes) -> int:
        """Of that pass, for the rank that has most."""
        count = 0
        while any(place.at(count) not in (END, None) for place in passes.places):
            count += 1
        return count

    def num_delivered(self, passes: Passes) -> int:
        """Its steps from which something comes: in torch mode, where they end is told by what is asked for beyond."""
        count = self.num_steps(passes)
        if not (self.case.bad and self.case.on_error == "skip") or self.case.is_seeded:
            return count
        (place,) = passes.places
        return sum(self._is_delivered(place.at(step)) for step in range(count))

    def _is_delivered(self, keys: Any) -> bool:
        """Return whether a batch or an error comes of these keys."""
        try:
            return self.expected.of(keys) is not SKIPPED
        except (TypeError, RuntimeError, IndexError):  # torch's collate raises for what the dataset's `__getitems__` returns
            return True

    def strikes_at(self, passes: Passes) -> int:
        """The step at which a habit strikes."""
        count = self.num_delivered(passes)
        if self.case.at >= 1:
            return count
        if self.case.at > 0.99:
            return max(count - 1, 0)
        return int(count * self.case.at)

    # ------------------------------------------------------------ one batch

    def compare(self, iterator: Any, place: Place, rank: int) -> bool:
        """Takes a batch and holds it against the oracle; False at the end."""
        where = f"batch {self.num_batches}, rank {rank}, step {place.step}"
        try:
            expected = place.next()
        except (TypeError, RuntimeError, IndexError) as error:
            expected = Fails(type(error).__name__)
        if not self.case.in_order:
            return self._take_unordered(iterator, expected)
        try:
            got = self._next(iterator)
        except StopIteration:
            if expected is not END:
                raise Wrong(f"{where}: the end, and not {expected if isinstance(expected, Fails) else 'a batch'}") from None
            return False
        except Exception as error:
            if isinstance(expected, Fails):
                if expected.kind in [kind.__name__ for kind in type(error).__mro__] or expected.kind in str(error):
                    return True
                raise Wrong(f"{where}: {type(error).__name__} and not {expected.kind}: {error}") from error
            raise
        if expected is END:
            raise Wrong(f"{where}: a batch too many")
        if isinstance(expected, Fails):
            raise Wrong(f"{where}: a batch and not {expected.kind}")
        self.num_batches += 1
        if problem := difference(expected, got):
            raise Wrong(f"{where}: {problem}")
        if self.case.hold in ("all", "last") or (self.case.hold == "some" and self._rng.random() < 0.3):
            self._held.append((got, expected, where))
        if self.case.hold == "last":
            del self._held[: -1 - self.case.seed % MOST_KEPT]
        return True

    def _next(self, iterator: Any) -> Any:
        """The next batch, as it was before after_batch."""
        began = thread_time()
        try:
            got = self.watch.timed(lambda: next(iterator))
            if self._had_begun(iterator):  # else the call has started workers, which costs what a fork costs
                self._costs.append(thread_time() - began)
        except AfterFailed as failed:
            got = failed.marked
        return self._unmarked(got)

    def _had_begun(self, iterator: Any) -> bool:
        """Return whether the iterator has given a batch before, and note that it has given one now."""
        try:
            had_begun = iterator in self._begun
            self._begun.add(iterator)
        except TypeError:  # a plain iterator, which the tests of the crossings put in a loader's place
            return True
        return had_begun

    def _unmarked(self, got: Any) -> Any:
        if self.device is not None:
            self.device.run()
        if not self.case.after:
            return got
        if type(got) is not Marked or type(got.batch) is Marked:
            raise Wrong(f"a batch that has not been through after_batch, or twice: {str(got)[:200]}")
        return got.batch

    def _take_unordered(self, iterator: Any, expected: Any) -> bool:
        """Where order is free: batches are gathered, and held against all that were expected in `settle`."""
        try:
            got = self._next(iterator)
        except StopIteration:
            if expected is not END:
                raise Wrong(f"batch {self.num_batches}: the end too early") from None
            return False
        if expected is END:
            raise Wrong(f"batch {self.num_batches}: a batch too many")
        self.num_batches += 1
        self._loose.append((expected, got))
        return True

    def settle(self) -> None:
        """Every batch of a pass came once, in whatever order."""
        if not self._loose:
            return
        expected = [wanted for wanted, _ in self._loose]
        for _, got in self._loose:
            for number, wanted in enumerate(expected):
                if not difference(wanted, got):
                    del expected[number]
                    break
            else:
                raise Wrong(f"in_order=False: a batch that was not expected, or came twice: {str(got)[:200]}")
        self._loose.clear()

    # ------------------------------------------------------------ harm

    def harm(self) -> None:
        """Now and then a worker is killed, or stopped for a while."""
        case = self.case
        if case.harm == "none" or self._harms >= 3 or self._rng.random() > 0.3:
            return
        spared = self.order.workers if isinstance(self.order, TorchOrder) else ()
        workers = sorted(pid for pid in _workers() if pid not in spared)
        if not workers:
            return
        self._harms += 1
        victim = self._rng.choice(workers)
        try:
            os.kill(victim, signal.SIGKILL if case.harm == "kill" else signal.SIGSTOP)
        except ProcessLookupError:  # it has ended since
            return
        if case.harm == "kill":
            return
        self.watch.allowed_s = STOPPED_S
        timer = threading.Timer(STOPPED_S, _goes_on, (victim,))
        timer.start()
        self._timers.append(timer)

    # ------------------------------------------------------------ habits

    def start(self) -> None:
        """A loader's first batches: where workers learn how batches are laid out, races are."""
        loaders = self.loaders()
        self.begin(loaders).take(STARTED)
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
            seed_generators(case.seed + 1)  # as another program has them, which restores none
        self._load(again, states)
        rest = self._resumed(again, passes)
        del passes
        loaders.close()
        rest.take()
        self.settle()
        self._go_on(again)
        again.close()

    def _go_on(self, loaders: Loaders) -> None:
        """Read the epochs after a resumed one, which are the undisturbed run's."""
        case = self.case
        if case.is_seeded:
            self.begin(loaders).take()
        elif not case.is_noisy and (not case.shuffle or self._draws_as_undisturbed()):
            for _ in range(2):
                self.begin(loaders).take()
                self.settle()

    def _draws_as_undisturbed(self) -> bool:
        """Return whether a resumed loader draws its later orders as the oracle, which has begun no pass in between, does."""
        case = self.case
        is_same_kind = not case.persistent or bool(case.workers and (case.then_workers or case.habit != "resume"))
        return case.habit in ("resume", "end", "living") and is_same_kind

    def _states(self, loaders: Loaders, passes: Passes) -> list[str]:
        """Of the ranks that have come furthest: one whose batch was all bad has gone on to the next, and the others follow it.

        One that so came to its own end, while others still have a row in the last step, is over already.
        """
        furthest = max(place.step for place in passes.places)
        pairs = [pair for pair in zip(loaders.each, passes.places, strict=True) if pair[1].step == furthest]
        under_way = [pair for pair in pairs if not self._has_ended(pair[1])]
        return [json.dumps(loader.state_dict()) for loader, _ in under_way or pairs]

    def _load(self, loaders: Loaders, states: list[str]) -> None:
        """Any rank's state is good for all."""
        state = self._rng.choice(states)
        for loader in loaders.each:
            loader.load_state_dict(json.loads(state))

    def _resumed(self, again: Loaders, passes: Passes) -> Passes:
        """The pass that goes on where all ranks of another stand."""
        case = self.case
        if not case.is_seeded:
            (place,) = passes.places  # behind the last batch, before the end was seen, the rest is nothing
            return Passes(self, again, [Place(self, place.at, place.step)])
        step, ranks = max(place.step for place in passes.places), again.ranks
        # at the step of the furthest: the others follow it beyond what they have not read
        epoch, has_ended = again.epoch, all(place.at(step) in (END, None) for place in passes.places)
        if not has_ended and case.order in BY_BATCH and case.order != "batch_sampler":
            step = step * case.ranks
            if step % ranks:
                raise Refused("a state between two steps of other ranks")
            step //= ranks
            rest = self._seed_places(again, epoch, step)  # what is left may be no step of so many ranks
            has_ended = step > 0 and all(self._has_ended(place) for place in rest)
        again.epoch, again.first = (epoch + 1, 0) if has_ended else (epoch, step)
        again.goes_on = not has_ended
        return self.begin(again)

    @staticmethod
    def _has_ended(place: Place) -> bool:
        return place.at(place.step) in (END, None)

    def habit_living(self) -> None:
        """A state is loaded while a pass of the same loader runs."""
        loaders = self.loaders()
        passes = self.begin(loaders)
        passes.take(max(self.strikes_at(passes), 1))
        states = self._states(loaders, passes)
        steps = [place.step for place in passes.places]
        passes.take(2)
        for place, step in zip(passes.places, steps, strict=True):
            place.step = step
        if self.case.is_seeded:
            loaders.epoch = 0
        self._load(loaders, states)
        rest = self._resumed(loaders, passes)
        if self._rng.random() < 0.5:
            del passes
        rest.take()
        self._go_on(loaders)
        loaders.close()

    def habit_standing(self) -> None:
        """A state is loaded into another loader, which stands at the same place of a pass of its own."""
        loaders = self.loaders()
        passes = self.begin(loaders)
        passes.take(max(self.strikes_at(passes), 1))
        states = self._states(loaders, passes)
        others = self.loaders()
        sizes = dict(self._sizes)  # the others may have begun the epoch when there was more of it
        own = self.begin(others)
        own.take(max(self.strikes_at(own), 1))
        self._sizes = sizes
        if self.case.is_seeded:
            others.epoch = 0
        self._load(others, states)
        self._resumed(others, passes).take()
        self._go_on(others)
        del own
        others.close()
        loaders.close()

    def _end_state(self) -> tuple[Loaders, list[str]]:
        loaders = self.loaders()
        self.begin(loaders).take()
        return loaders, [json.dumps(loader.state_dict()) for loader in loaders.each]

    def habit_end(self) -> None:
        """A state of an epoch's end is loaded in the middle of the next one."""
        loaders, states = self._end_state()
        passes = self.begin(loaders)
        passes.take(max(self.strikes_at(passes), 1))
        if self.case.is_seeded:
            loaders.epoch, loaders.first = 1, 0
            loaders.goes_on = loaders.ranks > 1  # ranks keep to what they agreed on for the epoch, one by itself looks again
            self._load(loaders, states)
            self.begin(loaders).take()
        else:
            self._load(loaders, states)
            (place,) = passes.places
            Passes(self, loaders, [Place(self, place.at)]).take()
            self._go_on(loaders)
        loaders.close()

    def habit_threads(self) -> None:
        """Several threads call next() on one iterator: each batch to one of them, or a plain refusal."""
        loaders = self.loaders()
        passes = self.begin(loaders)
        (place,) = passes.places
        expected = []
        while (one := place.next()) is not END:
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
            if not is_plain_refusal(error):
                raise Wrong(f"threads: {type(error).__name__}: {error}") from error
        wanted = list(expected)
        for batch in map(self._unmarked, got):
            for number, one in enumerate(wanted):
                if not difference(one, batch):
                    del wanted[number]
                    break
            else:
                raise Wrong(f"threads: {len(got)} batches of {len(expected)}, one of them twice or wrong: {str(batch)[:200]}")
        if wanted and len(errors) < len(threads):
            raise Wrong(f"threads: {len(wanted)} of {len(expected)} batches came to no thread ({len(errors)} errors)")
        got.clear()
        loaders.close()

    def habit_corrupt(self) -> None:
        """A state with one bit changed is refused."""
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
                raise Wrong(f"a state with one bit changed: {type(error).__name__}, not StateMismatch: {error}") from error
            shown = harmed[max(at - 30, 0) : at + 10].decode("latin1")
            raise Wrong(f"a state with one bit changed is taken: ...{shown}...")
        loaders.close()

    def habit_rebuild(self) -> None:
        """A loader is made again of its public attributes."""
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
                raise Wrong(f"rebuild: public attributes that are no arguments: {extra}")
            loaders.each[rank] = ShmLoader(**given)
            loader.close()
        self.begin(loaders).take()
        loaders.close()

    # ------------------------------------------------------------ afterwards

    def _forget(self) -> None:
        self._loose.clear()

    def clean_up(self) -> None:
        """What was held is as it came, and nothing is left behind."""
        for fd in self._decoys:
            if not os.path.samestat(os.fstat(fd), os.stat(os.devnull)):
                raise Wrong(f"descriptor {fd} of the program was closed, and is another file's")
            os.close(fd)
        for got, expected, where in self._held:
            if problem := difference(expected, got):
                raise Wrong(f"held until the end, {where}: {problem}")
        self._held.clear()
        for timer in self._timers:
            timer.join()
        self.order = None
        self.open_loaders.clear()  # one that a kill has ended was not closed
        self.made.forget()
        self._loose.clear()
        if self.device is not None and self.device.violations:
            raise Wrong(f"device: {self.device.violations[0]}")
        gc.collect()
        if left := list(left_behind()):
            raise Wrong(f"left behind: {'; '.join(left)}")


def is_plain_refusal(error: BaseException) -> bool:
    """Whether a thread is told that the iterator is another's."""
    said = f"{error} {error.__cause__}"
    return (isinstance(error, RuntimeError) and "thread" in said) or "already executing" in said


def _workers() -> Iterator[int]:
    for child in psutil.Process().children(recursive=True):
        try:
            if child.name().startswith(WORKER_NAME[:14]):
                yield child.pid
        except psutil.Error:  # it has ended since
            pass


def _goes_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def left_behind() -> Iterator[str]:
    """Processes, names and descriptors that are still there after a while."""
    deadline, pause = monotonic() + GONE_S, threading.Event()
    while True:
        found = list(_left_now())
        if not found or monotonic() > deadline:
            yield from found
            return
        pause.wait(0.02)


def _left_now() -> Iterator[str]:
    template_pid = template._current and template._current.process.pid  # it stays for the process's life, as HELPERS do
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
