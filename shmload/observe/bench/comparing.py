"""Whether loaders delivered the same bytes: batch by batch in the same order, or all rows of an epoch in any order."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shmload.observe.bench.digests import first_difference
from shmload.observe.bench.job import OTHER_STREAMS, OWN_ORDER, Job, Outcome
from shmload.observe.bench.launch import run_jobs
from shmload.observe.bench.peers import PEERS
from shmload.observe.bench.report import LoaderReport, WorkloadReport
from shmload.observe.bench.tasks import Task

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
