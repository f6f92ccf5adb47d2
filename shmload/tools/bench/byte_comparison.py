"""Compare the bytes that each loader delivered with the reference's."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

from shmload.tools.bench.bench_job import BenchJob, TaskOutcome, run_jobs
from shmload.tools.bench.report import WorkloadReport
from shmload.tools.bench.task import BenchTask

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
