"""Runs jobs in a fresh process, watches its memory from outside, and brings the answers back."""

import json
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from shmload.tools.bench.measure import descendants, files_below, first_difference, tree_pss_bytes
from shmload.tools.bench.peers import PEERS
from shmload.tools.bench.report import LoaderReport, Report, WorkloadReport, machine
from shmload.tools.bench.settings import (
    ALL_PEERS,
    NEEDS_PROTOCOL,
    OTHER_STREAMS,
    OWN_ORDER,
    Job,
    Options,
    Outcome,
    Point,
)
from shmload.tools.bench.verdict import judge_all
from shmload.tools.bench.workloads import WORKLOADS
from shmload.tools.bench.workloads.photos import photo_files
from shmload.tools.bench.workloads.workload import Workload
from shmload.tools.named import BenchError

PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
BOOT = "import sys; sys.path.append(sys.argv[1]); from shmload.tools.bench.child import main; main()"
SAMPLE_EVERY_S = 0.05
INTERRUPTED_S = 2.0  # ^C reaches the process too; this long it may tidy up
EXIT_S = 10.0  # some loaders hang in their own shutdown; the figures are in by then


def run_jobs(jobs: Sequence[Job], done: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """Measures `jobs` one after another in one fresh interpreter; one outcome a job, also if the process dies."""
    read_fd, write_fd = os.pipe()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryFile("w+") as output, os.fdopen(read_fd, "rb", buffering=0) as events:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                BOOT,
                PACKAGE_PARENT,
                str(write_fd),
            ],  # -P: a source tree here is not the package
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[write_fd],
        )
        os.close(write_fd)
        try:
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(json.dumps([job.as_dict() for job in jobs]).encode())
            for outcome in follow(process, events.fileno(), jobs):
                outcomes.append(outcome)
                done(outcome)
            end(process, EXIT_S)
        finally:
            end(process, INTERRUPTED_S)
        output.seek(0)
        tail = output.read()[-4000:]
    for job in jobs[len(outcomes) :]:
        why = f"its process ended with {ending(process.returncode)} before it answered"
        outcomes.append(Outcome(job, error=why, details=tail))
        done(outcomes[-1])
    return outcomes


def follow(process: "subprocess.Popen[bytes]", fd: int, jobs: Sequence[Job]) -> Any:
    """Yields an outcome per answered job; samples memory while the process asks for it."""
    sampling, peak, pending = False, 0, b""
    answered = 0
    while answered < len(jobs):
        if not select.select([fd], [], [], SAMPLE_EVERY_S if sampling else 0.25)[0]:
            if sampling:
                peak = max(peak, tree_pss_bytes(process.pid))
            elif process.poll() is not None:
                return
            continue
        data = os.read(fd, 1 << 16)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for event in map(json.loads, lines):
            if event["event"] == "memory":
                sampling, peak = True, tree_pss_bytes(process.pid)
                continue
            values = event.get("values", {}) | ({"peak_pss_mb": peak / 1e6} if sampling else {})
            sampling = False
            answered += 1
            yield Outcome(
                jobs[event["job"]],
                values,
                event.get("digests", []),
                event.get("wait_quantiles_ms", []),
                event.get("rows_digest"),
                event.get("error"),
                event.get("bad_usage", False),
                event.get("details", ""),
            )


def end(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """Waits for the process; past the deadline it and all below it are killed."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        for pid in [*descendants(process.pid), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def ending(returncode: int) -> str:
    return f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"code {returncode}"


OWN = "dataset"  # name of the user's own dataset among the workloads
OWN_LOADER = "loader"  # and of their own DataLoader
QUICK_SHARE = 16  # of the samples that peers write


@dataclass(frozen=True)
class Task:
    """A workload ready to run: its job without a loader, and what the report says about it."""

    name: str
    title: str
    unit: str
    meaning: str
    job: Job
    point: Point = field(default_factory=Point)
    cold: bool = False

    @property
    def is_own(self) -> bool:
        return self.name in (OWN, OWN_LOADER)

    @property
    def probe_key(self) -> tuple[str, int | None, bool]:
        """Tasks that are alike in this have the same limit."""
        return self.name, self.job.batch_size, self.cold


def contestants(options: Options, notes: list[str]) -> tuple[str, ...]:
    """The loaders to run, `peers` replaced by those that are installed.

    Raises:
        BenchError: a peer was asked for by name and is not installed.
    """
    found = []
    for name in options.loaders:
        absent = PEERS[name].missing() if name in PEERS else None
        if absent:
            raise BenchError(f"--loader {name}: {absent}")
        if name != ALL_PEERS:
            found.append(name)
            continue
        for peer in PEERS.values():
            absent = peer.missing()
            if absent:
                notes.append(f"{peer.name} left out: {absent}")
            else:
                found.append(peer.name)
    return tuple(dict.fromkeys(found))


def prepare(options: Options, folder: Path, notes: list[str]) -> list[Task]:
    """Writes the data of built-in workloads into `folder`; what is left out is told in `notes`.

    Raises:
        BenchError: there is no room, or the user's files are not there.
    """
    tasks: list[Task] = []
    has_peers = any(name in PEERS or name == ALL_PEERS for name in options.loaders)
    for name in options.selected:
        workload = WORKLOADS[name]
        absent = workload.missing()
        if absent:
            notes.append(f"{name} left out: {absent}")
            continue
        try:
            job, files = built_in(workload, options, folder, has_peers)
        except OSError as error:
            raise BenchError(f"{name}: cannot write its data to the temporary folder: {error}; set TMPDIR") from error
        if options.cold and not files:
            notes.append(f"{name}: its data lie in memory, so there is no cold pass")
        tasks += at_points(
            Task(name, workload.title, workload.unit, workload.meaning, job), options, files if options.cold else []
        )
    if options.dataset or options.torch_loader:
        tasks += at_points(own_task(options), options, own_files(options))
    return tasks


def built_in(workload: Workload, options: Options, folder: Path, has_peers: bool) -> tuple[Job, list[str]]:
    """The job of a built-in workload, and the files it reads."""
    arguments = workload.prepare(folder, options.quick)
    if workload.name == "photos" and options.images:
        arguments["files"] = photo_files(options.images)
    files: list[str] = []
    if has_peers:
        arguments["num_samples"] = workload.num_with_peers // (QUICK_SHARE if options.quick else 1)
    if options.cold and workload.on_disk:
        arguments, files = workload.on_disk(arguments, folder)
    job = template(options, workload.name, workload.dataset, workload.batch_size)
    return replace(job, arguments=arguments, collate=None), files


def own_task(options: Options) -> Task:
    if options.torch_loader:
        meaning = "this is your own DataLoader, with its own arguments"
        job = template(options, OWN_LOADER, "", None)
        return Task(
            OWN_LOADER, options.torch_loader, "samples", meaning, replace(job, torch_loader=options.torch_loader)
        )
    assert options.dataset
    meaning = "this is your own dataset, with your own cost of a sample"
    return Task(OWN, options.dataset, "samples", meaning, template(options, OWN, options.dataset, 64))


def own_files(options: Options) -> list[str]:
    if not options.cold:
        return []
    for path in options.cold_files:
        if not path.exists():
            raise BenchError(f"--cold-files: needs files or folders that exist, given {str(path)!r}")
    files = files_below(options.cold_files)
    if not files:
        raise BenchError(
            f"--cold-files: needs at least one file, found none in {', '.join(map(str, options.cold_files))}"
        )
    return files


def at_points(task: Task, options: Options, cold_files: Sequence[str]) -> list[Task]:
    """The task at every setting that is asked for, warm, and cold if there are files to drop."""
    found = []
    for point in options.points():
        job = replace(
            task.job,
            num_workers=point.num_workers,
            prefetch_factor=point.prefetch_factor,
            batch_size=point.batch_size or task.job.batch_size,
        )
        found.append(replace(task, job=job, point=point))
        if cold_files:
            found.append(replace(task, job=replace(job, cold_files=tuple(cold_files)), point=point, cold=True))
    return found


def template(options: Options, name: str, dataset: str, batch_size: int | None) -> Job:
    return Job(
        workload=name,
        dataset=dataset,
        loader="",
        batch_size=batch_size,
        num_workers=None,
        seconds=0.2 if options.quick else options.seconds,
        epochs=options.epochs,
        warmup_s=0.1 if options.quick else min(0.75, options.seconds),
        step_s=options.step_ms / 1e3,
        seed=options.seed,
        start_method=options.start_method,
        collate=options.collate,
    )


Run = Callable[[Sequence[Job]], list[Outcome]]


def in_any_order(loader: str) -> bool:
    """Whether a loader's order cannot be told, so that the rows of an epoch are compared as a set."""
    return loader in PEERS and not PEERS[loader].keeps_order


def compare(task: Task, report: WorkloadReport, reference: str, run: Run = run_jobs) -> None:
    """Compares every loader's bytes with the reference's and writes down what differs."""
    expected = report.loaders.get(reference, LoaderReport())
    for name, loader in report.loaders.items():
        if name == reference or loader.error:
            continue
        if in_any_order(name):
            compare_rows(report, name, loader, reference, expected)
        elif expected.digests:
            compare_batches(task, report, name, loader, reference, expected.digests, run)


def compare_rows(
    report: WorkloadReport, name: str, loader: LoaderReport, reference: str, expected: LoaderReport
) -> None:
    if not (expected.rows_digest and loader.rows_digest):
        return
    loader.compared = "rows of an epoch in any order"
    loader.same_bytes = loader.rows_digest == expected.rows_digest
    if not loader.same_bytes:
        report.mismatches.append(f"{report.name}: {name} and {reference} delivered different samples in an epoch")


def compare_batches(
    task: Task,
    report: WorkloadReport,
    name: str,
    loader: LoaderReport,
    reference: str,
    expected: list[str],
    run: Run,
) -> None:
    if name in OWN_ORDER:
        report.notes.append(f"{name} delivers in an order of its own: its bytes were not compared")
        return
    number = first_difference(expected, loader.digests)
    loader.compared, loader.same_bytes = "batches in order", number is None
    if number is None:
        return
    text = f"{report.name}: {name} and {reference} delivered different bytes in batch {number}"
    if task.is_own and name in OTHER_STREAMS:
        report.notes.append(f"{text}: a dataset that draws random numbers draws others without workers")
    elif not task.is_own or repeats(task.job, reference, expected, run):
        report.mismatches.append(text)
    else:
        report.notes.append(
            f"{text}, but {reference} does not repeat itself either: the dataset draws random numbers of its own; "
            "key them by the index to have the bytes compared"
        )


def repeats(job: Job, reference: str, expected: list[str], run: Run = run_jobs) -> bool:
    """Whether the reference delivers the same bytes when it is asked again."""
    again = replace(job, loader=reference, seconds=0.0, epochs=0, num_digests=len(expected))
    return first_difference(expected, run([again])[0].digests) is None


MEMORY_S = 0.6
STILL_WARM = 0.05  # a share of files in the page cache from which a cold pass is not called one


class Progress(Protocol):
    """Where the benchmark tells how far it is."""

    def start(self, num_jobs: int) -> None: ...

    def doing(self, text: str) -> None: ...

    def advance(self) -> None: ...


def benchmark(options: Options, progress: Progress) -> Report:
    """Runs everything `options` asks for.

    Raises:
        BenchError: the user's dataset cannot be used, or nothing is left that can run.
    """
    method = options.start_method or multiprocessing.get_start_method()
    num_workers = options.points()[0].num_workers
    report = Report(options.subject, options.reference, num_workers, options.quick, method, machine())
    report.step_ms, report.is_sweep = options.step_ms, len(options.points()) > 1
    loaders = contestants(options, report.notes)
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        progress.doing("preparing data")
        tasks = prepare(options, Path(folder), report.notes)
        if not tasks:
            raise BenchError(f"nothing can run: {'; '.join(report.notes)}")
        turns = Turns(options, loaders, progress, Path(folder))
        progress.start(len({task.probe_key for task in tasks}) + len(tasks) * len(loaders) * options.num_rounds)
        for group in grouped(tasks, options.quick):
            report.workloads += turns.run_group(group)
            turns.forget_files({task.name for task in tasks[tasks.index(group[-1]) + 1 :]})
    judge_all(report)
    return report


def grouped(tasks: Sequence[Task], quick: bool) -> list[list[Task]]:
    """Tasks whose jobs share processes: warm and cold ones never do, for a file that is mapped cannot be dropped."""
    if not quick:
        return [[task] for task in tasks]
    return [group for cold in (False, True) if (group := [task for task in tasks if task.cold == cold])]


class Turns:
    """Runs groups of tasks; keeps what they share: the limits that were measured, and the peers' files."""

    def __init__(self, options: Options, loaders: Sequence[str], progress: Progress, folder: Path) -> None:
        self.options, self.loaders, self.progress, self.folder = options, tuple(loaders), progress, folder
        self.limits: dict[tuple[str, int | None, bool], Outcome] = {}
        self.written: dict[tuple[str, str], str | None] = {}  # (workload, peer): the error, None if all went well

    def run_group(self, tasks: Sequence[Task]) -> list[WorkloadReport]:
        """All rounds of a few tasks whose jobs share processes; one report a task."""
        reports = [self.section(task, limit) for task, limit in zip(tasks, self.probe(tasks), strict=True)]
        for number in range(self.options.num_rounds):
            turn = self.loaders if number % 2 == 0 else self.loaders[::-1]
            for loader in turn:
                self.run_turn(loader, tasks, reports, first=number == 0)
        for task, report in zip(tasks, reports, strict=True):
            compare(task, report, self.options.reference)
            reference = report.loaders.get(self.options.reference, LoaderReport())
            for loader_report in report.loaders.values():
                loader_report.summarise(reference)
            report.note_residence(STILL_WARM)
        return reports

    def probe(self, tasks: Sequence[Task]) -> list[Outcome]:
        """The limit of each task, measured once for those that have the same."""
        new = {task.probe_key: task for task in tasks if task.probe_key not in self.limits}
        if new:
            self.progress.doing(f"{listed(list(new.values()))}: what one core can do")
            seconds = 0.1 if self.options.quick else 0.7
            jobs = [replace(task.job, seconds=seconds, epochs=0) for task in new.values()]
            for task, outcome in zip(
                new.values(), run_jobs(jobs, lambda outcome: self.progress.advance()), strict=True
            ):
                if outcome.error:
                    raise BenchError(
                        outcome.error if outcome.bad_usage else f"{task.name}: reading its samples: {outcome.error}"
                    )
                self.limits[task.probe_key] = outcome
        return [self.limits[task.probe_key] for task in tasks]

    def section(self, task: Task, limit: Outcome) -> WorkloadReport:
        protocol = limit.digests[0]
        notes: list[str] = []
        fit = []
        for name in self.loaders:
            if name in NEEDS_PROTOCOL and protocol not in ("read_into", "read_batch_into"):
                continue
            if name in PEERS and task.is_own:
                notes.append(
                    f"{name} left out: peers run on the built-in workloads, whose samples they store in their format"
                )
                continue
            if name in PEERS and task.name in PEERS[name].unable:
                notes.append(f"{name} left out: {PEERS[name].unable[task.name]}")
                continue
            fit.append(name)
        for _ in range((len(self.loaders) - len(fit)) * self.options.num_rounds):
            self.progress.advance()
        return WorkloadReport(
            task.name,
            task.title,
            task.unit,
            task.meaning,
            int(limit.values["batch_size"]),
            limit.values,
            protocol,
            {name: LoaderReport() for name in fit},
            notes,
            cache="cold" if task.cold else "warm",
            setting=task.point.label(),
            num_workers=int(limit.values["num_workers"] if task.point.num_workers is None else task.point.num_workers),
            prefetch_factor=task.point.prefetch_factor,
        )

    def run_turn(self, loader: str, tasks: Sequence[Task], reports: Sequence[WorkloadReport], *, first: bool) -> None:
        """One loader's turn in a round: a fresh process."""
        chosen = [(task, report) for task, report in zip(tasks, reports, strict=True) if loader in report.loaders]
        ready = []
        for task, report in chosen:
            error = self.write_files(loader, task)
            if error:
                report.loaders[loader].error = error
                self.progress.advance()
            else:
                ready.append((task, report))
        if not ready:
            return
        self.progress.doing(f"{listed([task for task, _ in ready])}: {loader}")
        jobs = [self.job(loader, task, report, first) for task, report in ready]
        for (_, report), outcome in zip(ready, run_jobs(jobs, lambda outcome: self.progress.advance()), strict=True):
            if outcome.bad_usage:
                raise BenchError(outcome.error)
            report.loaders[loader].add(outcome)

    def job(self, loader: str, task: Task, report: WorkloadReport, first: bool) -> Job:
        quick = self.options.quick
        job = replace(task.job, loader=loader, peer_folder=str(self.peer_folder(loader, task.name)))
        if task.cold:
            own = loader in PEERS and PEERS[loader].has_files
            return replace(job, cold_files=tuple(files_below([self.peer_folder(loader, task.name)]))) if own else job
        if not first:
            return job
        as_rows = any(map(in_any_order, report.loaders)) and (loader == self.options.reference or in_any_order(loader))
        return replace(
            job,
            num_digests=0 if in_any_order(loader) else 4 if quick else self.options.num_digests,
            digest_epoch=as_rows,
            memory_s=0.1 if quick else MEMORY_S,
        )

    def peer_folder(self, loader: str, workload: str) -> Path:
        return self.folder / "peers" / workload / loader

    def write_files(self, loader: str, task: Task) -> str | None:
        """Writes a peer's files of a workload, once; returns what went wrong."""
        if loader not in PEERS or not PEERS[loader].has_files:
            return None
        key = task.name, loader
        if key not in self.written:
            folder = self.peer_folder(loader, task.name)
            folder.mkdir(parents=True)
            self.progress.doing(f"{task.name}: writing it in the format of {loader}")
            job = replace(task.job, loader=loader, write_peer=True, peer_folder=str(folder), cold_files=())
            outcome = run_jobs([job])[0]
            self.written[key] = f"writing its files: {outcome.error}" if outcome.error else None
        return self.written[key]

    def forget_files(self, still_needed: set[str]) -> None:
        """Removes the peers' files of workloads that are done."""
        for workload in {workload for workload, _ in self.written} - still_needed:
            shutil.rmtree(self.folder / "peers" / workload, ignore_errors=True)


def listed(tasks: Sequence[Task]) -> str:
    """The tasks' names for the progress line."""
    return ", ".join(
        dict.fromkeys(f"{task.name}{' cold' if task.cold else ''} {task.point.label()}".strip() for task in tasks)
    )
