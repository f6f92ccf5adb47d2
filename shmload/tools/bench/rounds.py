"""A whole benchmark: its options, jobs in fresh processes round after round, and the comparison of their bytes.

A task is a workload at one setting, warm or cold. Every loader has its turn at it in a process of its own (`measure.py`), round
after round; jobs and answers travel as JSON.
"""

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from shmload.tools.bench.contestants import WORKLOADS, Prepared, Workload
from shmload.tools.bench.report import LoaderReport, Report, WorkloadReport, machine
from shmload.tools.bench.verdict import judge_all
from shmload.tools.named import BenchError

LOADERS = ("shmload", "torch", "shmload-seed")
AS_BUILT = ("shmload", "torch")  # what can be made of a DataLoader that the user built
START_METHODS = ("fork", "spawn", "forkserver")
NUM_DIGESTS = 32
MEMORY_S = 0.6
STILL_WARM = 0.05  # a share of files in the page cache from which a cold pass is not called one


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """What one fresh process is asked to measure: one loader on one dataset.

    Args:
        workload: name used in reports.
        dataset: `module:name` of the dataset or its factory; called with `arguments`.
        loader: a name of the contestants' table or `module:factory`; empty means the limit without any loader.
        batch_size, num_workers: None where the user's own DataLoader says it.
        prefetch_factor: None is torch's default.
        torch_loader: `module:name` of a torch DataLoader or of the function that makes it; then there is no `dataset`.
        seconds: the timed part ends after so many; 0 skips it.
        step_s: how long the trainer sleeps after each batch, in place of a training step.
        cold_files: dropped from the page cache first; then the one pass from there on is timed, without a warm-up.
        num_digests: batches of the untimed pass whose bytes are digested; of a loader with an order of its own a whole epoch.
        digest_rows: digest a whole epoch row by row.
        memory_s: seconds of delivery during which memory is looked at.
        scratch: a folder for files of the loader's own.
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
    cold_files: tuple[str, ...] = ()
    seed: int = 0
    start_method: str | None = None
    collate: str | None = None
    num_digests: int = 0
    digest_rows: bool = False
    memory_s: float = 0.0
    scratch: str | None = None


@dataclass(frozen=True)
class TaskOutcome:
    """The answer to one job: `values` by metric and batch `digests`, or an `error` line.

    `wait_quantiles_ms` are the waits at the shares of `report.WAIT_SHARES`; `rows_digest` is that of a whole epoch.
    `bad_usage` says that the user's dataset or options are at fault, not a loader.
    """

    job: BenchJob
    values: dict[str, float] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    wait_quantiles_ms: list[float] = field(default_factory=list)
    rows_digest: str | None = None
    error: str | None = None
    bad_usage: bool = False
    details: str = ""


@dataclass(frozen=True)
class Point:
    """One setting of every loader; None is what the workload, the user's DataLoader or torch says."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None

    def label(self) -> str:
        """The parts that were asked for, as a reader of the table knows them."""
        workers = f"{self.num_workers} worker{'' if self.num_workers == 1 else 's'}"
        parts = [workers] if self.num_workers is not None else []
        parts += [f"{self.prefetch_factor} ahead"] if self.prefetch_factor is not None else []
        return ", ".join([*parts, *([f"batch {self.batch_size}"] if self.batch_size else [])])


def points(
    num_workers: Sequence[int | None], prefetch_factors: Sequence[int | None], batch_sizes: Sequence[int | None]
) -> list[Point]:
    """The cross product, the batch size outermost. Without workers nothing is prefetched, so there those are one point."""
    found = product(batch_sizes or [None], num_workers or [None], prefetch_factors or [None])
    return list(dict.fromkeys(Point(workers, ahead if workers != 0 else None, size) for size, workers, ahead in found))


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Arguments of a whole benchmark.

    Args:
        workloads: built-in ones by name; empty means all, or none if `dataset` or `torch_loader` is given.
        dataset, torch_loader: the user's own, as `module:name`.
        loaders: the first is the subject of every ratio, `torch` (else the last) its reference.
        num_workers, prefetch_factor, batch_size: with more than one value each, every combination is measured.
        step_ms: length of the simulated training step after each batch.
        cold: each loader also reads once with the workload's files dropped from the page cache.
        cold_files: files and folders that `dataset` or `torch_loader` read.
        seconds: length of each timed part.
        rounds: None is 3, or 1 where several settings are measured.
        quick: small data, one process a loader, fractions of a second: to see that it works, not how fast.

    Raises:
        BenchError: a value that cannot be measured, named with what was needed.
    """

    workloads: tuple[str, ...] = ()
    dataset: str | None = None
    torch_loader: str | None = None
    loaders: tuple[str, ...] = ("shmload", "torch")
    num_workers: tuple[int, ...] = ()
    prefetch_factor: tuple[int, ...] = ()
    batch_size: tuple[int, ...] = ()
    step_ms: float = 0.0
    cold: bool = False
    cold_files: tuple[Path, ...] = ()
    seconds: float = 1.5
    rounds: int | None = None
    seed: int = 0
    start_method: str | None = None
    collate: str | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        self._check_names()
        for option, values, least in (
            ("--batch-size", self.batch_size, 1),
            ("--workers", self.num_workers, 0),
            ("--prefetch", self.prefetch_factor, 1),
            ("--rounds", (1 if self.rounds is None else self.rounds,), 1),
        ):
            for value in values:
                if value < least:
                    raise BenchError(f"{option}: needs at least {least}, given {value}")
        if not self.seconds > 0:
            raise BenchError(f"--seconds: needs more than 0, given {self.seconds:g}")
        if not 0 <= self.step_ms < 60_000:
            raise BenchError(f"--step-ms: needs 0 to 60000, given {self.step_ms:g}")
        if self.start_method not in (None, *START_METHODS):
            raise BenchError(f"--start-method: needs one of {', '.join(START_METHODS)}, given {self.start_method!r}")
        if self.cold_files and not self.cold:
            raise BenchError("--cold-files: needs --cold, which measures a pass with them dropped from the page cache")
        if self.cold and (self.dataset or self.torch_loader) and not self.cold_files:
            raise BenchError(
                "--cold: needs --cold-files with your own data: the files and folders it reads, which are to be dropped "
                "from the page cache"
            )

    def _check_names(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise BenchError(f"--workload: needs one of {', '.join(WORKLOADS)}, given {name!r}")
        known = f"{', '.join(LOADERS)} or module:factory"
        for name in self.loaders:
            if name not in LOADERS and ":" not in name:
                raise BenchError(f"--loader: needs one of {known}, given {name!r}")
        if not self.loaders:
            raise BenchError(f"--loader: needs at least one of {known}, given none")
        if not self.torch_loader:
            return
        for option, given in (
            ("--dataset", self.dataset),
            ("--workload", self.workloads),
            ("--collate", self.collate),
            ("--batch-size", self.batch_size),
            ("--start-method", self.start_method),
        ):
            if given:
                raise BenchError(f"{option}: needs no --torch-loader, whose DataLoader says that itself; give one of the two")
        for name in self.loaders:
            if name not in AS_BUILT:
                raise BenchError(
                    f"--loader: needs {' or '.join(AS_BUILT)} with --torch-loader, given {name!r}: others cannot take its arguments"
                )

    @property
    def selected(self) -> tuple[str, ...]:
        """The built-in workloads to run."""
        return self.workloads or (() if self.dataset or self.torch_loader else tuple(WORKLOADS))

    @property
    def subject(self) -> str:
        return self.loaders[0]

    @property
    def reference(self) -> str:
        """What ratios and bytes are compared with."""
        return "torch" if "torch" in self.loaders else self.loaders[-1]

    @property
    def num_rounds(self) -> int:
        if self.quick:
            return 1
        return self.rounds or (1 if len(self.points()) > 1 else 3)

    def points(self) -> list[Point]:
        """The settings to measure. Two workers, unless the user's own DataLoader says how many."""
        default = (None,) if self.torch_loader else (2,)
        return points(self.num_workers or default, self.prefetch_factor, self.batch_size)


PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
BOOT = "import sys; sys.path.append(sys.argv[1]); from shmload.tools.bench.measure import main; main()"
INTERRUPTED_S = 2.0  # ^C is handed on; this long the process may tidy up
EXIT_S = 10.0  # some loaders hang in their own shutdown; the figures are in by then


def run_jobs(jobs: Sequence[BenchJob]) -> list[TaskOutcome]:
    """Measures `jobs` one after another in one fresh interpreter; one outcome a job, also if the process dies."""
    read_fd, write_fd = os.pipe()
    # -P: a source tree in the current folder is not the package that is measured
    command = [sys.executable, "-P", "-c", BOOT, PACKAGE_PARENT, str(write_fd)]
    with tempfile.TemporaryFile("w+") as output, os.fdopen(read_fd, "rb", buffering=0):
        # a session of its own: whatever a loader leaves behind is ended with it
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[write_fd], start_new_session=True
        )
        os.close(write_fd)
        retry_policy_s = INTERRUPTED_S
        try:
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(json.dumps([asdict(job) for job in jobs]).encode())
            answers = read_answers(process, read_fd, len(jobs))
            retry_policy_s = EXIT_S
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            raise
        finally:
            end(process, retry_policy_s)
        output.seek(0)
        tail = output.read()[-4000:]
    outcomes = [TaskOutcome(job, **answer) for job, answer in zip(jobs, answers, strict=False)]
    status = process.returncode
    ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"code {status}"
    why = f"its process ended with {ending} before it answered"
    return outcomes + [TaskOutcome(job, error=why, details=tail) for job in jobs[len(outcomes) :]]


def read_answers(process: "subprocess.Popen[bytes]", fd: int, count: int) -> list[dict[str, Any]]:
    """The answers, at most `count`: fewer if the process ends before. Processes that outlive it may hold the pipe open."""
    data = b""
    while data.count(b"\n") < count:
        if select.select([fd], [], [], 0.25)[0]:
            more = os.read(fd, 1 << 16)
            if not more:
                break
            data += more
        elif process.poll() is not None:
            break
    return [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def end(process: "subprocess.Popen[bytes]", retry_policy_s: float) -> None:
    """Waits for the process; then it, if need be, and all of its session are killed."""
    try:
        process.wait(retry_policy_s)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


@dataclass(frozen=True)
class BenchTask:
    """A workload ready to run at one setting: its job without a loader."""

    workload: Workload
    job: BenchJob
    point: Point = field(default_factory=Point)
    is_own: bool = False

    @property
    def label(self) -> str:
        return f"{self.workload.name}{' cold' if self.job.cold_files else ''} {self.point.label()}".strip()

    @property
    def probe_key(self) -> tuple[str, int | None, bool]:
        """Tasks that are alike in this have the same limit."""
        return self.workload.name, self.job.batch_size, bool(self.job.cold_files)


def own_workload(options: BenchOptions) -> Workload | None:
    """The user's own dataset or DataLoader, in the form of a built-in workload."""
    if options.dataset:
        name, dataset, batch_size = "dataset", options.dataset, 64
        meaning = "this is your own dataset, with your own cost of a sample"
    elif options.torch_loader:
        name, dataset, batch_size = "loader", "", None
        meaning = "this is your own DataLoader, with its own arguments"
    else:
        return None
    return Workload(
        name=name,
        title=options.dataset or options.torch_loader or "",
        dataset=dataset,
        batch_size=batch_size,
        unit="samples",
        meaning=meaning,
        prepare=lambda folder, small, cold: ({}, files_below(options.cold_files) if cold else []),
    )


def files_below(paths: Iterable[Path]) -> list[str]:
    """The files that are named, and those in named folders, sorted; absolute, so that a folder may change.

    Raises:
        BenchError: there are none.
    """
    found: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise BenchError(f"--cold-files: needs files or folders that exist, given {str(path)!r}")
        found.update([path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()])
    if not found:
        raise BenchError(f"--cold-files: needs at least one file, found none in {', '.join(map(str, paths))}")
    return sorted(str(path.absolute()) for path in found)


def prepare(options: BenchOptions, folder: Path, notes: list[str]) -> list[BenchTask]:
    """Writes the data of built-in workloads into `folder`; what is left out is told in `notes`.

    Raises:
        BenchError: there is no room, or the user's files are not there.
    """
    tasks: list[BenchTask] = []
    own = own_workload(options)
    for workload in [*(WORKLOADS[name] for name in options.selected), *([own] if own else [])]:
        absent = workload.missing()
        if absent:
            notes.append(f"{workload.name} left out: {absent}")
            continue
        try:
            prepared = workload.prepare(folder, options.quick, options.cold)
        except OSError as error:
            raise BenchError(f"{workload.name}: cannot write its data to the temporary folder: {error}; set TMPDIR") from error
        if options.cold and not prepared[1]:
            notes.append(f"{workload.name}: its data lie in memory, so there is no cold pass")
        tasks += tasks_of(workload, prepared, options, is_own=workload is own)
    return tasks


def tasks_of(workload: Workload, prepared: Prepared, options: BenchOptions, *, is_own: bool) -> list[BenchTask]:
    """The workload at every setting that is asked for, warm, and cold if there are files to drop."""
    arguments, files = prepared
    job = BenchJob(
        workload=workload.name,
        dataset=workload.dataset,
        loader="",
        batch_size=workload.batch_size,
        num_workers=None,
        torch_loader=options.torch_loader if is_own else None,
        arguments=arguments,
        seconds=0.2 if options.quick else options.seconds,
        warmup_s=0.1 if options.quick else min(0.75, options.seconds),
        step_s=options.step_ms / 1e3,
        seed=options.seed,
        start_method=options.start_method,
        collate=options.collate if is_own else None,
    )
    tasks = []
    for point in options.points():
        size = point.batch_size or workload.batch_size
        warm = replace(job, num_workers=point.num_workers, prefetch_factor=point.prefetch_factor, batch_size=size)
        tasks.append(BenchTask(workload, warm, point, is_own))
        if options.cold and files:
            tasks.append(BenchTask(workload, replace(warm, cold_files=tuple(files)), point, is_own))
    return tasks


class RoundsProgress(Protocol):
    """Where the benchmark tells how far it is."""

    def start(self, num_jobs: int) -> None: ...

    def doing(self, text: str) -> None: ...

    def advance(self) -> None: ...


def benchmark(options: BenchOptions, progress: RoundsProgress) -> Report:
    """Runs everything `options` asks for.

    Raises:
        BenchError: the user's dataset cannot be used, or nothing is left that can run.
    """
    method = options.start_method or multiprocessing.get_start_method()
    num_workers = options.points()[0].num_workers
    report = Report(options.subject, options.reference, num_workers, options.quick, method, machine())
    report.step_ms, report.is_sweep = options.step_ms, len(options.points()) > 1
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        progress.doing("preparing data")
        tasks = prepare(options, Path(folder), report.notes)
        if not tasks:
            raise BenchError(f"nothing can run: {'; '.join(report.notes)}")
        turns = RoundTurns(options, progress, Path(folder))
        num_probes = len({task.probe_key for task in tasks})
        progress.start(num_probes + len(tasks) * len(options.loaders) * options.num_rounds)
        for group in grouped(tasks, options.quick):
            report.workloads += turns.run(group)
    judge_all(report)
    return report


def grouped(tasks: Sequence[BenchTask], quick: bool) -> list[list[BenchTask]]:
    """Tasks whose jobs share processes: warm and cold ones never do, for a file that is mapped cannot be dropped."""
    if not quick:
        return [[task] for task in tasks]
    return [group for cold in (False, True) if (group := [t for t in tasks if bool(t.job.cold_files) == cold])]


class RoundTurns:
    """Runs groups of tasks; keeps the limits that were measured, which several tasks share."""

    def __init__(self, options: BenchOptions, progress: RoundsProgress, folder: Path) -> None:
        self.options, self.progress, self.folder = options, progress, folder
        self.limits: dict[tuple[str, int | None, bool], TaskOutcome] = {}

    def run(self, tasks: Sequence[BenchTask]) -> list[WorkloadReport]:
        """All rounds of a few tasks whose jobs share processes; one report a task."""
        self.probe(tasks)
        reports = [self.section(task, self.limits[task.probe_key]) for task in tasks]
        for number in range(self.options.num_rounds):
            for loader in self.options.loaders[:: 1 if number % 2 == 0 else -1]:
                jobs = [self.job(task, loader, first=number == 0) for task in tasks]
                for report, outcome in zip(reports, self.measured(jobs, tasks, loader), strict=True):
                    if outcome.bad_usage:
                        raise BenchError(outcome.error)
                    report.loaders[loader].add(outcome)
        for task, report in zip(tasks, reports, strict=True):
            jobs_by_name = {name: self.job(task, name, first=False) for name in report.loaders}
            compare(task, report, self.options.reference, jobs_by_name)
            for loader_report in report.loaders.values():
                loader_report.summarise(report.loaders[self.options.reference])
            report.note_residence(STILL_WARM)
        return reports

    def measured(self, jobs: Sequence[BenchJob], tasks: Sequence[BenchTask], what: str) -> list[TaskOutcome]:
        self.progress.doing(f"{', '.join(dict.fromkeys(task.label for task in tasks))}: {what}")
        outcomes = run_jobs(jobs)
        for _ in jobs:
            self.progress.advance()
        return outcomes

    def probe(self, tasks: Sequence[BenchTask]) -> None:
        """Measures the limit of each task, once for those that have the same."""
        new = {task.probe_key: task for task in tasks if task.probe_key not in self.limits}
        if not new:
            return
        jobs = [replace(task.job, seconds=0.1 if self.options.quick else 0.7) for task in new.values()]
        outcomes = self.measured(jobs, list(new.values()), "what one core can do")
        for key, outcome in zip(new, outcomes, strict=True):
            if outcome.error:
                where = "" if outcome.bad_usage else f"{key[0]}: reading its samples: "
                raise BenchError(where + outcome.error)
            self.limits[key] = outcome

    def section(self, task: BenchTask, limit: TaskOutcome) -> WorkloadReport:
        workload, workers = task.workload, task.point.num_workers
        return WorkloadReport(
            workload.name,
            workload.title,
            workload.unit,
            workload.meaning,
            int(limit.values["batch_size"]),
            limit.values,
            limit.digests[0],
            {name: LoaderReport() for name in self.options.loaders},
            cache="cold" if task.job.cold_files else "warm",
            setting=task.point.label(),
            num_workers=int(limit.values["num_workers"] if workers is None else workers),
            prefetch_factor=task.point.prefetch_factor,
        )

    def job(self, task: BenchTask, loader: str, *, first: bool) -> BenchJob:
        """A loader's turn. Only in the first round are bytes digested and memory looked at; never in a cold pass."""
        scratch = self.folder / "scratch" / task.workload.name / str(self.options.loaders.index(loader))
        job = replace(task.job, loader=loader, scratch=str(scratch))
        if not first or task.job.cold_files:
            return job
        quick = self.options.quick
        return replace(job, num_digests=4 if quick else NUM_DIGESTS, memory_s=0.1 if quick else MEMORY_S)


Run = Callable[[Sequence[BenchJob]], list[TaskOutcome]]


def compare(task: BenchTask, report: WorkloadReport, reference: str, jobs: dict[str, BenchJob], run: Run = run_jobs) -> None:
    """Compares every loader's bytes with the reference's and writes down what differs.

    Args:
        jobs: by name, to ask a loader once more, without timing it.
    """

    def again(name: str, **what: Any) -> TaskOutcome:
        return run([replace(jobs[name], seconds=0.0, **what)])[0]

    expected = report.loaders[reference]
    for name, loader in report.loaders.items():
        if name == reference or loader.error or expected.error or not (loader.digests or loader.rows_digest):
            continue
        if loader.rows_digest or not expected.digests:  # one of them has an order of its own
            for each, of in ((reference, expected), (name, loader)):
                of.rows_digest = of.rows_digest or again(each, digest_rows=True).rows_digest
            loader.compared, loader.same_bytes = ("rows of an epoch in any order", loader.rows_digest == expected.rows_digest)
            text = f"{report.name}: {name} and {reference} delivered different samples in an epoch"
            excuse = "a dataset that draws random numbers draws others in another order"
        else:
            number = first_difference(expected.digests, loader.digests)
            loader.compared, loader.same_bytes = "batches in order", number is None
            text = f"{report.name}: {name} and {reference} delivered different bytes in batch {number}"
            excuse = ""
            if number is not None and task.is_own:
                repeated = again(reference, num_digests=len(expected.digests)).digests
                if first_difference(expected.digests, repeated) is not None:
                    excuse = (
                        f"but {reference} does not repeat itself either: the dataset draws random numbers of its own; "
                        "key them by the index to have the bytes compared"
                    )
        if not loader.same_bytes:
            if task.is_own and excuse:
                report.notes.append(f"{text}, {excuse}")
            else:
                report.mismatches.append(text)


def first_difference(reference: Sequence[str], other: Sequence[str]) -> int | None:
    """Number of the first batch whose digests differ or that only one of them has; None if all are equal."""
    for number, (expected, got) in enumerate(zip(reference, other, strict=False)):
        if expected != got:
            return number
    return None if len(reference) == len(other) else min(len(reference), len(other))
