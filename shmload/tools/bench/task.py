"""A task is a workload at one setting, with its data prepared."""

from dataclasses import dataclass
from pathlib import Path

from shmload.tools.bench.bench_job import MIN_BATCHES, BenchJob
from shmload.tools.bench.bench_options import BenchOptions, Point
from shmload.tools.bench.builtin_workloads import WORKLOADS
from shmload.tools.bench.workload import Workload
from shmload.tools.bench.workload_table import BATCH_SIZE
from shmload.tools.object_reference import UsageError


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


def prepare(options: BenchOptions, folder: Path, notes: list[str]) -> list[BenchTask]:
    """Write the data of built-in workloads into `folder`; add a line to `notes` for each one that is left out.

    Returns:
        the workloads at every requested setting.
    Raises:
        UsageError: there is no room.
    """
    tasks: list[BenchTask] = []
    is_own = bool(options.dataset or options.torch_loader)
    workloads = [WORKLOADS[name] for name in options.workloads or (() if is_own else WORKLOADS)]
    if is_own:  # described like a built-in one
        own = Workload(
            name="dataset" if options.dataset else "loader",
            title=options.dataset or options.torch_loader or "",
            dataset=options.dataset or "",
            batch_size=BATCH_SIZE if options.dataset else None,
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
            raise UsageError(f"{workload.name}: cannot write its data to the temporary folder: {error}; set TMPDIR") from error
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
                min_batches=3 if options.quick else MIN_BATCHES,
                warmup_s=0.1 if options.quick else min(0.75, options.seconds),
                step_s=options.step_ms / 1e3,
                seed=options.seed,
                start_method=options.start_method,
                collate=options.collate if is_this else None,
            )
            tasks.append(BenchTask(workload, job, point, is_this))
    return tasks
