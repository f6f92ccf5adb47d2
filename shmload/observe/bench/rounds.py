"""The benchmark: loaders take turns in fresh processes, round after round, and their bytes are compared.

    per task:  limit | round 0: shmload, torch | round 1: torch, shmload | ...           (--quick: one process a loader)

A task is a workload at one setting, warm or cold. Order alternates so that a machine that gets slower or faster does not favour
one of them. Round 0 also digests batches in an untimed pass and samples memory. A mismatch of bytes is a failure of the
benchmark, unless the user's dataset does not even repeat itself under the reference, which is then said instead.
"""

import multiprocessing
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from shmload.observe.bench.cache import files_below
from shmload.observe.bench.comparing import compare, in_any_order
from shmload.observe.bench.job import NEEDS_PROTOCOL, Job, Outcome
from shmload.observe.bench.judged import judge_all
from shmload.observe.bench.launch import run_jobs
from shmload.observe.bench.options import Options
from shmload.observe.bench.peers import PEERS
from shmload.observe.bench.report import LoaderReport, Report, WorkloadReport, machine
from shmload.observe.bench.spec import BenchError
from shmload.observe.bench.tasks import Task, contestants, prepare

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
