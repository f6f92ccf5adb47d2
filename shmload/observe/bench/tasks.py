"""From what the user asked for to what is measured: one task a workload, setting and state of the page cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shmload.observe.bench.cache import files_below
from shmload.observe.bench.job import Job
from shmload.observe.bench.options import ALL_PEERS, Options
from shmload.observe.bench.peers import PEERS
from shmload.observe.bench.spec import BenchError
from shmload.observe.bench.sweep import Point
from shmload.observe.bench.workloads import WORKLOADS, Workload
from shmload.observe.bench.workloads.photos import photo_files

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
