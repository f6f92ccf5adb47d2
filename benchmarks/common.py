"""Shared parts of the benchmarks: run cases in turn in fresh processes, make the rows of a result table, and save with `--json`.

They use the measuring engine of `shmload bench` (shmload/tools/bench). Run the benchmarks from the project's root:

    python -m benchmarks.photos            one benchmark
    python -m benchmarks --json all.json   all of them, in one table
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from shmload.tools.bench.bench_job import BenchJob, run_jobs
from shmload.tools.bench.bench_options import BenchOptions
from shmload.tools.bench.report import Report, WorkloadReport, machine
from shmload.tools.bench.report_table import WIDE, show
from shmload.tools.bench.rounds import benchmark
from shmload.tools.bench.spread import Spread

T = TypeVar("T")
ROUND = "SHMLOAD_BENCHMARK_ROUND"  # set by benchmarks.against: the number of the round, of which each is its own process
FIRST_ROUND = int(os.environ.get(ROUND, "0"))

# ways to read without ShmLoader, in addition to a DataLoader with workers
THREADS, GETITEMS, INLINE = (f"benchmarks.contestants.ways:{name}" for name in ("Threads", "torch_getitems", "torch_inline"))


@dataclass(frozen=True)
class Settings:
    """The number of rounds, and the seconds of each timed part."""

    rounds: int = 3
    seconds: float = 2.0


@dataclass(frozen=True)
class Row:
    """A row of the table: what was measured, the result, figures for comparison, and the aim."""

    what: str
    got: float
    unit: str
    beside: str
    aim: str
    met: bool


@dataclass
class Result:
    """The rows of the table, and all measurements, which `--json` saves."""

    rows: list[Row]
    measured: dict[str, Any] = field(default_factory=dict)


class NoProgress:
    """A progress display that shows nothing."""

    def start(self, num_jobs: int) -> None: ...

    def doing(self, text: str) -> None: ...

    def advance(self) -> None: ...


def side_by_side(workload: str, loaders: Sequence[str], settings: Settings) -> tuple[WorkloadReport, Report]:
    """Runs one built-in workload with the engine of `shmload bench`, which compares the loaders' bytes."""
    options = BenchOptions(
        workloads=(workload,),
        loaders=tuple(loaders),
        rounds=settings.rounds,
        seconds=settings.seconds,
        num_workers=(2,),
        start_method="fork",
    )
    report = benchmark(options, NoProgress())
    if report.failures or report.mismatches:
        raise SystemExit("\n".join([*report.failures, *report.mismatches]))
    show(report, Console(stderr=True, width=None if sys.stderr.isatty() else WIDE))
    return report.workloads[0], report


def ratio(report: WorkloadReport, metric: str, loader: str, other: str) -> float:
    """Returns `loader`'s metric over `other`'s: the median of the ratios within rounds."""
    pairs = zip(report.loaders[loader].rounds, report.loaders[other].rounds, strict=True)
    return Spread.of([mine[metric] / theirs[metric] for mine, theirs in pairs]).median


def forked(settings: Settings, **job: Any) -> BenchJob:
    """Returns a job of 2 forked workers with the duration of the settings."""
    return BenchJob(num_workers=2, start_method="fork", seconds=settings.seconds, warmup_s=min(1.0, settings.seconds), **job)


def ways(
    name: str, cases: Mapping[str, tuple[str, str]], settings: Settings, batch_size: int, **arguments: Any
) -> dict[str, BenchJob]:
    """Returns the jobs of one benchmark by case. `cases` gives, for each, the loader and the dataset in module `name`."""
    return {
        case: forked(
            settings,
            workload=name,
            dataset=f"benchmarks.{name}:{dataset}",
            arguments=arguments,
            loader=loader,
            batch_size=batch_size,
        )
        for case, (loader, dataset) in cases.items()
    }


def in_order(names: Iterable[T], number: int) -> list[T]:
    """Returns the cases in the order of a round, which is reversed in every other one."""
    found = list(names)
    return found if (number + FIRST_ROUND) % 2 == 0 else found[::-1]


def fresh(call: Callable[..., T], *arguments: Any) -> T:
    """Calls a function in a new, spawned process and returns its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(call, *arguments).result()


def in_turn(cases: dict[str, BenchJob], settings: Settings) -> dict[str, dict[str, Spread]]:
    """Runs every case in a fresh process, round after round. Returns the metrics by case."""
    values: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(settings.rounds):
        for name in in_order(cases, number):
            outcome = run_jobs([cases[name]])[0]
            if outcome.error:
                raise SystemExit(f"{name}: {outcome.error}\n{outcome.details}")
            values[name].append(outcome.values)
    return {
        name: {metric: Spread.of([each[metric] for each in rounds if metric in each]) for metric in rounds[0]}
        for name, rounds in values.items()
    }


def cpu_us(measured: dict[str, dict[str, Spread]]) -> tuple[dict[str, float], str]:
    """Returns the CPU microseconds per sample of all processes by case, and as text."""
    cost = {name: each["cpu_us_per_sample"].median for name, each in measured.items()}
    return cost, ", ".join(f"{name} {us:.3g}" for name, us in cost.items())


def plain(measured: dict[str, dict[str, Spread]]) -> dict[str, Any]:
    return {name: {metric: asdict(spread) for metric, spread in each.items()} for name, each in measured.items()}


def table(rows: Sequence[Row]) -> Table:
    made = Table("measured", "result", "beside", "aim", "")
    for row in rows:
        made.add_row(row.what, figure(row), row.beside, row.aim, "[green]met[/]" if row.met else "[red]missed[/]")
    return made


def figure(row: Row) -> str:
    return f"{row.got:.3g} {row.unit}".strip()


def markdown(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| measured | result | beside | aim | |", "|---|---|---|---|---|"]
    lines += [f"| {row.what} | {figure(row)} | {row.beside} | {row.aim} | {'met' if row.met else 'missed'} |" for row in rows]
    return "\n".join(lines)


def repeated(step: Callable[[], object], seconds: float) -> tuple[int, float]:
    """Calls `step` for `seconds`, and at least once. Returns the number of calls and the seconds that they took."""
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < seconds:
        step()
        count += 1
    return count, time.perf_counter() - began


def endless(loader: Iterable[T]) -> Iterator[T]:
    """Yields batch after batch, epoch after epoch."""
    while True:
        yield from loader


def arguments(doc: str | None) -> tuple[Settings, Path | None]:
    given = parser(doc).parse_args()
    return Settings(given.rounds, given.seconds), given.json


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Settings.rounds, help="fresh processes of every case")
    parser.add_argument("--seconds", type=float, default=Settings.seconds, help="of every timed part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    return parser


def save(path: Path | None, results: dict[str, Result]) -> None:
    if path is not None:
        found = {name: {"rows": [asdict(row) for row in each.rows], **each.measured} for name, each in results.items()}
        path.write_text(json.dumps({"machine": machine(), "results": found}, indent=1) + "\n")


def main(name: str, doc: str | None, measure: Callable[[Settings], Result], write: Callable[[Result], None] | None = None) -> None:
    """Runs a benchmark from the command line.

    Args:
        write: writes the result to its own page if `--write` is given.
    """
    known = parser(doc)
    if write is not None:
        known.add_argument("--write", action="store_true", help="write the page of these figures in docs/")
    given = known.parse_args()
    result = measure(Settings(given.rounds, given.seconds))
    Console(width=None if sys.stdout.isatty() else WIDE).print(table(result.rows))
    save(given.json, {name: result})
    if write is not None and given.write:
        write(result)
