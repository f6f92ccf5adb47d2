"""A whole benchmark: its options, jobs in fresh processes round after round, and the comparison of their bytes.

A task is a workload at one setting. In each round every loader runs it in a process of its own (`measure.py`); jobs and answers
are passed as JSON.
"""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shmload.tools.bench.conclusions import judge_all
from shmload.tools.bench.contestants import WORKLOADS, Workload
from shmload.tools.bench.report import LoaderReport, Report, WorkloadReport, machine
from shmload.tools.object_reference import BenchError

LOADERS = ("shmload", "torch", "shmload-seed")
AS_BUILT = ("shmload", "torch")  # contestants that can be made of a DataLoader that the user built
START_METHODS = ("fork", "spawn", "forkserver")
NUM_DIGESTS = 32
MEMORY_S = 0.6


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """A job for a fresh process: measure one loader on one dataset.

    Args:
        workload: name used in reports.
        dataset: `module:name` of the dataset or its factory; called with `arguments`.
        loader: a name of the contestants' table or `module:factory`; empty means the limit without any loader.
        batch_size, num_workers: None if the user's own DataLoader sets it.
        prefetch_factor: batches ordered ahead for each worker; None is torch's default.
        torch_loader: `module:name` of a torch DataLoader or of the function that makes it; `dataset` is then empty.
        arguments: keyword arguments of the dataset's factory.
        seconds: length of the timed part; 0 skips it.
        warmup_s: least length of the part before it, which is not timed.
        step_s: how long the trainer sleeps after each batch, in place of a training step.
        seed: seed of the order.
        start_method: start method of the workers; None is Python's default.
        collate: `module:name` of a collate function; None is the loader's default.
        num_digests: batches of an untimed pass whose bytes are digested; none are of a loader with an order of its own.
        memory_s: seconds of delivery during which memory is sampled.
        scratch: a folder for the loader's own files.
    """

    workload: str
    dataset: str
    loader: str
    batch_size: int | None
    num_workers: int | None
    prefetch_factor: int | None = None
    torch_loader: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float = 2.0
    warmup_s: float = 1.0
    step_s: float = 0.0
    seed: int = 0
    start_method: str | None = None
    collate: str | None = None
    num_digests: int = 0
    memory_s: float = 0.0
    scratch: str | None = None


@dataclass(frozen=True)
class TaskOutcome:
    """The answer to one job: `values` by metric and batch `digests`, or an `error` line.

    `bad_usage` means that the user's dataset or options are at fault, not a loader.
    """

    values: dict[str, float] = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)
    error: str | None = None
    bad_usage: bool = False
    details: str = ""


class Point(NamedTuple):
    """One setting of every loader; None means the value of the workload, the user's DataLoader or torch."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None

    def label(self) -> str:
        """Return the requested values in the form that the table shows."""
        parts = [f"{self.num_workers} worker{'s' * (self.num_workers != 1)}"] if self.num_workers is not None else []
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
        seconds: length of each timed part.
        rounds: None is 3, or 1 if several settings are measured.
        seed: seed of the order, the same for all loaders.
        start_method: start method of the workers; None is Python's default.
        collate: `module:name` of a collate function for `dataset`; None is the loader's default.
        quick: small data, one process per loader, fractions of a second: to check that it works, not how fast.

    Raises:
        BenchError: a value cannot be measured; the message says what is needed.
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
            raise BenchError(text)

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
                    built = " or ".join(AS_BUILT)
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


PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
BOOT = "import sys; sys.path.append(sys.argv[1]); from shmload.tools.bench.measure import main; main()"
INTERRUPTED_S = 2.0  # after forwarding ^C, the time the process has to clean up


def run_jobs(jobs: Sequence[BenchJob]) -> list[TaskOutcome]:
    """Measure `jobs` one after another in one fresh interpreter; return one outcome per job, even if the process dies."""
    with tempfile.TemporaryFile("w+") as output, tempfile.NamedTemporaryFile() as answers:
        # -P: a source tree in the current folder is not the package to measure
        command = [sys.executable, "-P", "-c", BOOT, PACKAGE_PARENT, answers.name]
        # a session of its own, so that everything a loader leaves running is ended with it
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
        try:
            process.communicate(json.dumps([asdict(job) for job in jobs]).encode())
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPTED_S)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        outcomes = [TaskOutcome(**json.loads(line)) for line in answers if line.endswith(b"\n")]
        output.seek(0)
        tail = output.read()[-4000:]
    status = process.returncode
    ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"code {status}"
    why = f"its process ended with {ending} before it answered"
    return outcomes + [TaskOutcome(error=why, details=tail) for _ in jobs[len(outcomes) :]]


@dataclass(frozen=True)
class BenchTask:
    """A workload ready to run at one setting: its job without a loader."""

    workload: Workload
    job: BenchJob
    point: Point
    is_own: bool = False

    @property
    def label(self) -> str:
        return f"{self.workload.name} {self.point.label()}".strip()

    @property
    def probe_key(self) -> tuple[str, int | None]:
        """Return the key of the task's limit. Tasks with equal keys have the same limit."""
        return self.workload.name, self.job.batch_size


Limits = dict[tuple[str, int | None], dict[str, float]]  # what one core can do, by probe_key


def prepare(options: BenchOptions, folder: Path, notes: list[str]) -> list[BenchTask]:
    """Write the data of built-in workloads into `folder`; add a line to `notes` for each one that is left out.

    Returns:
        the workloads at every requested setting.
    Raises:
        BenchError: there is no room.
    """
    tasks: list[BenchTask] = []
    is_own = bool(options.dataset or options.torch_loader)
    workloads = [WORKLOADS[name] for name in options.workloads or (() if is_own else WORKLOADS)]
    if is_own:  # described like a built-in one
        own = Workload(
            name="dataset" if options.dataset else "loader",
            title=options.dataset or options.torch_loader or "",
            dataset=options.dataset or "",
            batch_size=64 if options.dataset else None,
            prepare=lambda folder, small: {},
        )
        workloads.append(own)
    for number, workload in enumerate(workloads, 1):
        absent = workload.missing()
        if absent:
            notes.append(f"{workload.name} left out: {absent}")
            continue
        try:
            arguments = workload.prepare(folder, options.quick)
        except OSError as error:
            raise BenchError(f"{workload.name}: cannot write its data to the temporary folder: {error}; set TMPDIR") from error
        is_this = is_own and number == len(workloads)
        for point in options.points():
            job = BenchJob(
                workload=workload.name,
                dataset=workload.dataset,
                loader="",
                batch_size=point.batch_size or workload.batch_size,
                num_workers=point.num_workers,
                prefetch_factor=point.prefetch_factor,
                torch_loader=options.torch_loader if is_this else None,
                arguments=arguments,
                seconds=0.2 if options.quick else options.seconds,
                warmup_s=0.1 if options.quick else min(0.75, options.seconds),
                step_s=options.step_ms / 1e3,
                seed=options.seed,
                start_method=options.start_method,
                collate=options.collate if is_this else None,
            )
            tasks.append(BenchTask(workload, job, point, is_this))
    return tasks


class RoundsProgress(Protocol):
    """The receiver of the benchmark's progress."""

    def start(self, num_jobs: int) -> None: ...

    def doing(self, text: str) -> None: ...

    def advance(self) -> None: ...


def benchmark(options: BenchOptions, progress: RoundsProgress) -> Report:
    """Run everything that `options` requests.

    Raises:
        BenchError: the user's dataset cannot be used, or nothing is left that can run.
    """
    method = options.start_method or multiprocessing.get_start_method()
    report = Report(options.loaders[0], options.reference, options.points()[0].num_workers, options.quick, method, machine())
    report.step_ms, report.is_sweep = options.step_ms, len(options.points()) > 1
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as name:
        folder = Path(name)
        progress.doing("preparing data")
        tasks = prepare(options, folder, report.notes)
        if not tasks:
            raise BenchError(f"nothing can run: {'; '.join(report.notes)}")
        limits: Limits = {}
        progress.start(len({task.probe_key for task in tasks}) + len(tasks) * len(options.loaders) * options.num_rounds)
        for group in [tasks] if options.quick else [[task] for task in tasks]:  # their jobs share processes
            probe(group, limits, options, progress)
            report.workloads += rounds_of(group, limits, options, folder, progress)
    judge_all(report)
    return report


def measured(jobs: Sequence[BenchJob], tasks: Sequence[BenchTask], what: str, progress: RoundsProgress) -> list[TaskOutcome]:
    """Run the jobs in one fresh process, and report progress.

    Raises:
        BenchError: the user's dataset or options are at fault.
    """
    progress.doing(f"{', '.join(task.label for task in tasks)}: {what}")
    outcomes = run_jobs(jobs)
    for outcome in outcomes:
        progress.advance()
        if outcome.bad_usage:
            raise BenchError(outcome.error)
    return outcomes


def probe(tasks: Sequence[BenchTask], limits: Limits, options: BenchOptions, progress: RoundsProgress) -> None:
    """Measure the limit of each task, once for those with the same limit."""
    new = {task.probe_key: task for task in tasks if task.probe_key not in limits}
    if not new:
        return
    jobs = [replace(task.job, seconds=0.1 if options.quick else 0.7) for task in new.values()]
    for key, outcome in zip(new, measured(jobs, list(new.values()), "what one core can do", progress), strict=True):
        if outcome.error:
            raise BenchError(f"{key[0]}: reading its samples: {outcome.error}")
        limits[key] = outcome.values


def rounds_of(
    tasks: Sequence[BenchTask], limits: Limits, options: BenchOptions, folder: Path, progress: RoundsProgress
) -> list[WorkloadReport]:
    """Run all rounds of tasks whose jobs share processes; return one report per task."""
    reports = []
    for task in tasks:
        limit, point = limits[task.probe_key], task.point
        section = WorkloadReport(task.workload.name, task.workload.title, int(limit["batch_size"]), limit, {})
        section.loaders = {name: LoaderReport() for name in options.loaders}
        section.setting = point.label()
        section.num_workers = int(limit["num_workers"] if point.num_workers is None else point.num_workers)
        section.prefetch_factor = point.prefetch_factor
        reports.append(section)
    # only in the first round are bytes digested and memory sampled
    first = {"num_digests": 4, "memory_s": 0.1} if options.quick else {"num_digests": NUM_DIGESTS, "memory_s": MEMORY_S}
    for number in range(options.num_rounds):
        for loader in options.loaders[:: 1 if number % 2 == 0 else -1]:
            jobs = []
            for task in tasks:
                scratch = folder / "scratch" / task.workload.name / str(options.loaders.index(loader))
                more: dict[str, Any] = first if number == 0 else {}
                jobs.append(replace(task.job, loader=loader, scratch=str(scratch), **more))
            for report, outcome in zip(reports, measured(jobs, tasks, loader, progress), strict=True):
                found = report.loaders[loader]
                if outcome.error:
                    found.error, found.details = outcome.error, outcome.details
                else:
                    found.rounds.append(outcome.values)
                    found.digests = found.digests or outcome.digests
    for task, report in zip(tasks, reports, strict=True):
        compare(task, report, options.reference)
        for each in report.loaders.values():
            each.summarise(report.loaders[options.reference])
    return reports


Run = Callable[[Sequence[BenchJob]], list[TaskOutcome]]


def compare(task: BenchTask, report: WorkloadReport, reference: str, run: Run = run_jobs) -> None:
    """Compare every loader's bytes with the reference's, and record the differences.

    Args:
        task: the workload and setting.
        report: receives the results.
        reference: the name of the reference.
        run: runs the reference once more without timing, to find out whether the user's dataset is repeatable at all.
    """
    expected = report.loaders[reference]
    for name, loader in report.loaders.items():
        if name == reference or not (loader.digests and expected.digests):
            continue
        number = first_difference(expected.digests, loader.digests)
        loader.same_bytes = number is None
        if number is None:
            continue
        text = f"{report.name}: {name} and {reference} delivered different bytes in batch {number}"
        if task.is_own:
            job = replace(task.job, loader=reference, seconds=0.0, num_digests=len(expected.digests))
            if first_difference(expected.digests, run([job])[0].digests) is not None:
                report.notes.append(
                    f"{text}, but {reference} does not repeat itself either: the dataset draws random numbers of its own; "
                    "key them by the index to have the bytes compared"
                )
                continue
        report.mismatches.append(text)


def first_difference(reference: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the number of the first batch whose digests differ or that only one has; None if all are equal."""
    pairs = enumerate(zip_longest(reference, other))
    return next((number for number, (expected, got) in pairs if expected != got), None)
