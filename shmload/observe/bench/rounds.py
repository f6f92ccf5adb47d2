"""The benchmark: loaders take turns in fresh processes, round after round, and their bytes are compared.

    per workload:  limit | round 0: shmload, torch | round 1: torch, shmload | ...       (--quick: one process a loader)

Order alternates so that a machine that gets slower or faster does not favour one of them. Round 0 also digests
batches in an untimed pass and samples memory. A mismatch of bytes is a failure of the benchmark, unless the user's
dataset does not even repeat itself under the reference, which is then said instead.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from shmload.observe.bench.digests import first_difference
from shmload.observe.bench.job import NEEDS_PROTOCOL, OTHER_STREAMS, OWN_ORDER, Job, Outcome
from shmload.observe.bench.launch import run_jobs
from shmload.observe.bench.options import Options
from shmload.observe.bench.report import LoaderReport, Report, WorkloadReport, machine
from shmload.observe.bench.spec import BenchError
from shmload.observe.bench.workloads import WORKLOADS
from shmload.observe.bench.workloads.photos import photo_files

MEMORY_S = 0.6
OWN = "dataset"  # name of the user's own dataset among the workloads


class Progress(Protocol):
    """Where the benchmark tells how far it is."""

    def start(self, num_jobs: int) -> None: ...

    def doing(self, text: str) -> None: ...

    def advance(self) -> None: ...


@dataclass(frozen=True)
class Task:
    """A workload ready to run: its job without a loader, and what the report says about it."""

    name: str
    title: str
    unit: str
    meaning: str
    job: Job


def benchmark(options: Options, progress: Progress) -> Report:
    """Runs everything `options` asks for.

    Raises:
        BenchError: the user's dataset cannot be used, or nothing is left that can run.
    """
    method = options.start_method or multiprocessing.get_start_method()
    report = Report(options.subject, options.reference, options.num_workers, options.quick, method, machine())
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        progress.doing("preparing data")
        tasks = prepare(options, Path(folder), report.notes)
        if not tasks:
            raise BenchError(f"nothing can run: {'; '.join(report.notes)}")
        progress.start(len(tasks) * (1 + len(options.loaders) * options.rounds))
        groups = [tasks] if options.quick else [[task] for task in tasks]
        for group in groups:
            report.workloads += run_group(group, options, progress)
    return report


def prepare(options: Options, folder: Path, notes: list[str]) -> list[Task]:
    tasks = []
    for name in options.selected:
        workload = WORKLOADS[name]
        absent = workload.missing()
        if absent:
            notes.append(f"{name} left out: {absent}")
            continue
        try:
            arguments = workload.prepare(folder, options.quick)
        except OSError as error:
            raise BenchError(f"{name}: cannot write its data to the temporary folder: {error}; set TMPDIR") from error
        if name == "photos" and options.images:
            arguments["files"] = photo_files(options.images)
        job = template(options, name, workload.dataset, workload.batch_size)
        text = workload.title, workload.unit, workload.meaning
        tasks.append(Task(name, *text, replace(job, arguments=arguments, collate=None)))
    if options.dataset:
        meaning = "this is your own dataset, with your own cost of a sample"
        job = template(options, OWN, options.dataset, 64)
        tasks.append(Task(OWN, options.dataset, "samples", meaning, job))
    return tasks


def template(options: Options, name: str, dataset: str, batch_size: int) -> Job:
    return Job(
        workload=name,
        dataset=dataset,
        loader="",
        batch_size=options.batch_size or batch_size,
        num_workers=options.num_workers,
        seconds=0.2 if options.quick else options.seconds,
        epochs=options.epochs,
        warmup_s=0.1 if options.quick else min(1.0, options.seconds),
        seed=options.seed,
        start_method=options.start_method,
        collate=options.collate,
    )


def run_group(tasks: Sequence[Task], options: Options, progress: Progress) -> list[WorkloadReport]:
    """All rounds of a few workloads whose jobs share processes; one report a workload."""
    progress.doing(f"{', '.join(task.name for task in tasks)}: what one core can do")
    probes = [replace(task.job, seconds=0.1 if options.quick else 0.7, epochs=0) for task in tasks]
    reports = []
    for task, outcome in zip(tasks, run_jobs(probes, lambda outcome: progress.advance()), strict=True):
        if outcome.error:
            raise BenchError(
                outcome.error if outcome.bad_usage else f"{task.name}: reading its samples: {outcome.error}"
            )
        protocol = outcome.digests[0]
        fit = [name for name in options.loaders if protocol != "__getitem__" or name not in NEEDS_PROTOCOL]
        for _ in range((len(options.loaders) - len(fit)) * options.rounds):
            progress.advance()
        loaders = {name: LoaderReport() for name in fit}
        text = task.title, task.unit, task.meaning
        reports.append(WorkloadReport(task.name, *text, task.job.batch_size, outcome.values, protocol, loaders))
    for number in range(options.rounds):
        turn = options.loaders if number % 2 == 0 else options.loaders[::-1]
        for loader in turn:
            run_turn(loader, tasks, reports, options, progress, first=number == 0)
    for task, report in zip(tasks, reports, strict=True):
        compare(task, report, options.reference)
        reference = report.loaders.get(options.reference, LoaderReport())
        for loader_report in report.loaders.values():
            loader_report.summarise(reference)
    return reports


def run_turn(
    loader: str,
    tasks: Sequence[Task],
    reports: Sequence[WorkloadReport],
    options: Options,
    progress: Progress,
    *,
    first: bool,
) -> None:
    """One loader's turn in a round: a fresh process."""
    progress.doing(f"{', '.join(task.name for task in tasks)}: {loader}")
    chosen = [(task, report) for task, report in zip(tasks, reports, strict=True) if loader in report.loaders]
    num_digests = (4 if options.quick else options.num_digests) if first else 0
    memory_s = (0.1 if options.quick else MEMORY_S) if first else 0.0
    jobs = [replace(task.job, loader=loader, num_digests=num_digests, memory_s=memory_s) for task, _ in chosen]
    for (_, report), outcome in zip(chosen, run_jobs(jobs, lambda outcome: progress.advance()), strict=True):
        if outcome.bad_usage:
            raise BenchError(outcome.error)
        report.loaders[loader].add(outcome)


def compare(
    task: Task, report: WorkloadReport, reference: str, run: Callable[[Sequence[Job]], list[Outcome]] = run_jobs
) -> None:
    """Compares every loader's bytes with the reference's and writes down what differs."""
    expected = report.loaders[reference].digests if reference in report.loaders else []
    for name, loader in report.loaders.items():
        if name == reference or loader.error or not expected:
            continue
        if name in OWN_ORDER:
            report.notes.append(f"{name} delivers in an order of its own: its bytes were not compared")
            continue
        number = first_difference(expected, loader.digests)
        loader.same_bytes = number is None
        if number is None:
            continue
        text = f"{report.name}: {name} and {reference} delivered different bytes in batch {number}"
        if task.name == OWN and name in OTHER_STREAMS:
            report.notes.append(f"{text}: a dataset that draws random numbers draws others without workers")
        elif task.name != OWN or repeats(task.job, reference, expected, run):
            report.mismatches.append(text)
        else:
            report.notes.append(
                f"{text}, but {reference} does not repeat itself either: the dataset draws random numbers of its own; "
                "key them by the index to have the bytes compared"
            )


def repeats(
    job: Job, reference: str, expected: list[str], run: Callable[[Sequence[Job]], list[Outcome]] = run_jobs
) -> bool:
    """Whether the reference delivers the same bytes when it is asked again."""
    again = replace(job, loader=reference, seconds=0.0, epochs=0, num_digests=len(expected))
    return first_difference(expected, run([again])[0].digests) is None
