"""The options of a whole benchmark, and the settings that they ask for."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from shmload.tools.bench.builtin_workloads import WORKLOADS
from shmload.tools.counted import counted
from shmload.tools.object_reference import UsageError

LOADERS = ("shmload", "shmload-threads", "torch", "shmload-seed")
AS_BUILT = ("shmload", "shmload-threads", "torch")  # contestants that can be made of a DataLoader that the user built
START_METHODS = ("fork", "spawn", "forkserver")


class Point(NamedTuple):
    """One setting of every loader; None means the value of the workload, the user's DataLoader or torch."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None

    def label(self) -> str:
        """Return the requested values in the form that the table shows."""
        parts = [counted(self.num_workers, "worker")] if self.num_workers is not None else []
        parts += [f"{self.prefetch_factor} ahead"] if self.prefetch_factor is not None else []
        return ", ".join([*parts, *([f"batch {self.batch_size}"] if self.batch_size else [])])


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Arguments of a whole benchmark.

    Args:
        workloads: names of built-in ones; empty means all, or none if `dataset` or `torch_loader` is given.
        dataset, torch_loader: the user's own, as `module:name`.
        loaders: names of contestants. The verdict is on the first; ratios are to `torch`, or to the last if it is not among them.
        num_workers, prefetch_factor, batch_size: with more than one value each, every combination is measured.
        step_ms: length of the simulated training step after each batch.
        seconds: length of each timed part; it may be longer, to have enough batches.
        rounds: None is 3, or 1 if several settings are measured.
        seed: seed of the order, the same for all loaders.
        start_method: start method of the workers; None is Python's default.
        collate: `module:name` of a collate function for `dataset`; None is the loader's default.
        quick: small data, one process per loader, fractions of a second: to check that it works, not how fast.

    Raises:
        UsageError: a value cannot be measured; the message says what is needed.
    """

    workloads: tuple[str, ...] = ()
    dataset: str | None = None
    torch_loader: str | None = None
    loaders: tuple[str, ...] = ("shmload", "torch")
    num_workers: tuple[int, ...] = ()
    prefetch_factor: tuple[int, ...] = ()
    batch_size: tuple[int, ...] = ()
    step_ms: float = 0.0
    seconds: float = 1.5
    rounds: int | None = None
    seed: int = 0
    start_method: str | None = None
    collate: str | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        for text in self._complaints():
            raise UsageError(text)

    def _complaints(self) -> Iterator[str]:
        """Yield a line for each option that cannot be measured."""
        known = f"{', '.join(LOADERS)} or module:factory"
        for names, has, option, allowed in (
            (self.workloads, WORKLOADS.__contains__, "--workload", ", ".join(WORKLOADS)),
            (self.loaders, lambda name: name in LOADERS or ":" in name, "--loader", known),
            ((self.start_method or "fork",), START_METHODS.__contains__, "--start-method", ", ".join(START_METHODS)),
        ):
            yield from (f"{option}: needs one of {allowed}, given {name!r}" for name in names if not has(name))
        if not self.loaders:
            yield f"--loader: needs at least one of {known}, given none"
        for option, values, least in (
            ("--batch-size", self.batch_size, 1),
            ("--workers", self.num_workers, 0),
            ("--prefetch", self.prefetch_factor, 1),
            ("--rounds", (1 if self.rounds is None else self.rounds,), 1),
        ):
            yield from (f"{option}: needs at least {least}, given {value}" for value in values if value < least)
        if not 0 < self.seconds < math.inf:
            yield f"--seconds: needs more than 0, given {self.seconds:g}"
        for name in ("dataset", "torch_loader", "collate"):
            if getattr(self, name) == "":  # as from an unset shell variable; it must not select the built-in workloads
                yield f"--{name.replace('_', '-')}: needs package.module:name, given ''"
        if self.collate and not (self.dataset or self.torch_loader):
            yield "--collate: needs --dataset, whose samples it is for; built-in workloads have their own"
        if not 0 <= self.step_ms < 60_000:
            yield f"--step-ms: needs 0 to 60000, given {self.step_ms:g}"
        if self.torch_loader:
            for name in ("dataset", "workloads", "collate", "batch_size", "start_method"):
                if getattr(self, name):
                    option = f"--{name.removesuffix('s').replace('_', '-')}"
                    yield f"{option}: needs no --torch-loader, whose DataLoader says that itself; give one of the two"
            for name in self.loaders:
                if name not in AS_BUILT:
                    built = f"{', '.join(AS_BUILT[:-1])} or {AS_BUILT[-1]}"
                    yield f"--loader: needs {built} with --torch-loader, given {name!r}: others cannot take its arguments"

    @property
    def reference(self) -> str:
        """Return the name of the loader that ratios and bytes are compared with."""
        return "torch" if "torch" in self.loaders else self.loaders[-1]

    @property
    def num_rounds(self) -> int:
        if self.quick:
            return 1
        return self.rounds or (1 if len(self.points()) > 1 else 3)

    def points(self) -> list[Point]:
        """Return the settings to measure, the batch size outermost. Two workers, unless the user's own DataLoader sets the number.

        Without workers nothing is prefetched, so there all prefetch factors are one point.
        """
        workers: tuple[int | None, ...] = self.num_workers or ((None,) if self.torch_loader else (2,))
        found = product(self.batch_size or (None,), workers, self.prefetch_factor or (None,))
        return list(dict.fromkeys(Point(count, ahead if count != 0 else None, size) for size, count, ahead in found))
