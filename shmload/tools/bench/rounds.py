"""Run a whole benchmark: in each round, every loader runs every task in a fresh process."""

import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from shmload.tools.bench.bench_job import BenchJob, TaskOutcome, run_jobs
from shmload.tools.bench.bench_options import BenchOptions
from shmload.tools.bench.byte_comparison import compare
from shmload.tools.bench.conclusions import judge_all
from shmload.tools.bench.report import LoaderReport, Report, WorkloadReport, machine
from shmload.tools.bench.task import BenchTask, prepare
from shmload.tools.object_reference import UsageError

NUM_DIGESTS = 32
MEMORY_S = 0.6
Limits = dict[tuple[str, int | None], dict[str, float]]  # what one core can do, by probe_key


class RoundsProgress(Protocol):
    """The receiver of the benchmark's progress."""

    def start(self, num_jobs: int) -> None: ...

    def doing(self, text: str) -> None: ...

    def advance(self) -> None: ...


def benchmark(options: BenchOptions, progress: RoundsProgress) -> Report:
    """Run everything that `options` requests.

    Raises:
        UsageError: the user's dataset cannot be used, or nothing is left that can run.
    """
    method = options.start_method or multiprocessing.get_start_method()
    report = Report(options.loaders[0], options.reference, options.points()[0].num_workers, options.quick, method, machine())
    report.step_ms, report.is_sweep = options.step_ms, len(options.points()) > 1
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as name:
        folder = Path(name)
        progress.doing("preparing data")
        tasks = prepare(options, folder, report.notes)
        if not tasks:
            raise UsageError(f"nothing can run: {'; '.join(report.notes)}")
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
        UsageError: the user's dataset or options are at fault.
    """
    progress.doing(f"{', '.join(task.label for task in tasks)}: {what}")
    outcomes = run_jobs(jobs)
    for outcome in outcomes:
        progress.advance()
        if outcome.bad_usage:
            raise UsageError(outcome.error)
    return outcomes


def probe(tasks: Sequence[BenchTask], limits: Limits, options: BenchOptions, progress: RoundsProgress) -> None:
    """Measure the limit of each task, once for those with the same limit."""
    new = {task.probe_key: task for task in tasks if task.probe_key not in limits}
    if not new:
        return
    jobs = [replace(task.job, seconds=0.1 if options.quick else 0.7) for task in new.values()]
    for key, outcome in zip(new, measured(jobs, list(new.values()), "what one core can do", progress), strict=True):
        if outcome.error:
            raise UsageError(f"{key[0]}: reading its samples: {outcome.error}")
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
            each.summarize(report.loaders[options.reference])
    return reports
