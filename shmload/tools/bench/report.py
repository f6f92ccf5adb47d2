"""Rounds into figures, and figures into what the terminal says: a table, then what it means in plain sentences.

The machine's load changes from minute to minute. A ratio is therefore taken between runs of the same round, which
stood next to each other in time, and only then the median over rounds.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from shmload.tools.bench.rounds import TaskOutcome

WAIT_SHARES = (0.0, 0.01, 0.05, *(number / 20 for number in range(2, 20)), 0.98, 0.99, 0.995, 0.999, 1.0)
FORMAT = 1


@dataclass(frozen=True)
class Spread:
    """Median and extremes of the same figure over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            raise ValueError("a spread needs at least one value, given none")
        return cls(statistics.median(values), min(values), max(values))


def quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank): always one that was measured."""
    if not ascending:
        raise ValueError("a quantile needs at least one value, given none")
    rank = -(-len(ascending) * share // 1)  # ceiling
    return ascending[min(len(ascending), max(1, int(rank))) - 1]


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread | None:
    """Spread of the ratios of runs of equal rounds; None where no round has both."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=False) if b > 0]
    return Spread.of(ratios) if ratios else None


@dataclass
class LoaderReport:
    """One loader on one workload: every metric as median and extremes over rounds.

    `same_bytes` is None where nothing was compared: the reference itself, or a cold pass. `compared` says how.
    `wait_quantiles_ms` are the waits at the report's `wait_shares`, medians over rounds.
    """

    rounds: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, Spread] = field(default_factory=dict)
    ratio: Spread | None = None  # samples/s over the reference's, paired by round
    cpu_ratio: Spread | None = None  # CPU per sample over the reference's, paired by round
    same_bytes: bool | None = None
    compared: str | None = None
    wait_quantiles_ms: list[float] = field(default_factory=list)
    error: str | None = None
    details: str = ""
    digests: list[str] = field(default_factory=list)
    rows_digest: str | None = None
    round_quantiles_ms: list[list[float]] = field(default_factory=list)

    def add(self, outcome: "TaskOutcome") -> None:
        if outcome.error:
            self.error, self.details = outcome.error, outcome.details
            return
        self.rounds.append(outcome.values)
        self.digests = self.digests or outcome.digests
        self.rows_digest = self.rows_digest or outcome.rows_digest
        self.round_quantiles_ms += [outcome.wait_quantiles_ms] if outcome.wait_quantiles_ms else []

    def column(self, metric: str) -> list[float]:
        return [values[metric] for values in self.rounds if metric in values]

    def summarise(self, reference: "LoaderReport") -> None:
        for name in dict.fromkeys(name for values in self.rounds for name in values):
            self.metrics[name] = Spread.of(self.column(name))
        self.wait_quantiles_ms = [statistics.median(each) for each in zip(*self.round_quantiles_ms, strict=True)]
        self.ratio = paired_ratio(self.column("samples_per_s"), reference.column("samples_per_s"))
        self.cpu_ratio = paired_ratio(self.column("cpu_us_per_sample"), reference.column("cpu_us_per_sample"))


@dataclass
class WorkloadReport:
    """All loaders on one workload at one setting, beside what one core can do without any.

    `cache` is "warm", or "cold" for one pass over files that were dropped from the page cache first. `verdict` is about the
    subject of the report.
    """

    name: str
    title: str
    unit: str
    meaning: str
    batch_size: int
    limit: dict[str, float]
    protocol: str
    loaders: dict[str, LoaderReport]
    notes: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    cache: str = "warm"
    setting: str = ""
    num_workers: int = 0
    prefetch_factor: int | None = None
    verdict: dict[str, Any] | None = None
    verdict_text: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} cold" if self.cache == "cold" else self.name

    def note_residence(self, most: float) -> None:
        """Says where files stayed in the page cache although they were to be dropped."""
        shares = [self.limit.get("resident_share", 0.0)]
        shares += [spread.high for loader in self.loaders.values() if (spread := loader.metrics.get("resident_share"))]
        if max(shares) > most:
            self.notes.append(
                f"{max(shares):.0%} of its files stayed in the page cache (tmpfs, a file system that keeps them, or another "
                "process has them mapped): these figures are not cold ones"
            )


@dataclass
class Report:
    """A whole benchmark."""

    subject: str
    reference: str
    num_workers: int | None  # of the first setting; None: as the user's DataLoader says
    quick: bool
    start_method: str
    machine: dict[str, Any]
    workloads: list[WorkloadReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is missing, and the command that brings it
    step_ms: float = 0.0
    is_sweep: bool = False
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M %Z"))
    recommendations: dict[str, dict[str, Any]] = field(default_factory=dict)  # by workload
    wait_shares: tuple[float, ...] = WAIT_SHARES

    @property
    def mismatches(self) -> list[str]:
        return [text for workload in self.workloads for text in workload.mismatches]

    @property
    def failures(self) -> list[str]:
        return [
            f"{workload.label}: {name} failed: {loader.error}"
            for workload in self.workloads
            for name, loader in workload.loaders.items()
            if loader.error
        ]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; digests are left out, they only serve the comparison."""
        plain = asdict(self)
        for workload in plain["workloads"]:
            for loader in workload["loaders"].values():
                for name in ("digests", "rows_digest", "round_quantiles_ms"):
                    del loader[name]
        return {"format": FORMAT, **plain, "failures": self.failures}


def machine() -> dict[str, Any]:
    """What the figures depend on, as far as it can be told without saying whose machine it is."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return {
        "num_cpus": len(os.sched_getaffinity(0)),
        "cpu_model": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "free_threaded": not getattr(sys, "_is_gil_enabled", lambda: True)(),
        **{name: installed(name) for name in ("shmload", "torch", "numpy")},
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


WIDE = 128  # terminal columns of the full table
MEDIUM = 100
SETTING_WIDTH, STEP_WIDTH = 12, 7  # of columns that not every report has

# header, metric, width of terminal from which it is shown
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("samples\n/s", "samples_per_s", 0),
    ("step\nkept %", "step_efficiency", 0),
    ("MB/s", "mb_per_s", WIDE),
    ("CPU us\n/sample", "cpu_us_per_sample", 0),
    ("first\nbatch ms", "first_batch_ms", MEDIUM),
    ("wait ms\np50", "wait_p50_ms", WIDE),
    ("wait ms\np99", "wait_p99_ms", MEDIUM),
    ("trainer\nus/batch", "trainer_us_per_batch", 0),
    ("trainer\ns/GiB", "trainer_s_per_gib", WIDE),
    ("peak\nMB", "peak_pss_mb", MEDIUM),
)


def show(report: Report, console: Console) -> None:
    """Prints the table, the sentences, what is missing and what went wrong."""

    def say(text: str, head: str = "", style: str = "") -> None:
        indent = head[: len(head) - len(head.lstrip())]
        start = f"{indent}[bold]{escape(head.lstrip())}[/]: " if head else ""
        console.print(start + escape(text), highlight=False, style=style or None)

    def recommend(name: str) -> None:
        if name in report.recommendations:
            say(f"{report.recommendations[name]['sentence']}.", "  recommended")

    console.print(table(report, console.width))
    for workload in report.workloads:
        if not report.is_sweep:
            say(sentence(workload, report), workload.label)
            if compared := comparison(workload, report):
                say(f"  {compared}.")
            if workload.verdict:
                say(f"{workload.verdict_text}.", "  verdict")
            if workload.cache == "warm":
                recommend(workload.name)
        for note in workload.notes:
            say(f"  note: {f'{workload.label}, {workload.setting}: ' if report.is_sweep else ''}{note}")
    for name in dict.fromkeys(each.name for each in report.workloads if report.is_sweep):
        # the verdict of a sweep is that of the setting in which the subject was fastest
        ran = [each for each in report.workloads if each.name == name and each.verdict and each.cache == "warm"]
        if ran:
            best = max(ran, key=lambda each: each.loaders[report.subject].metrics["samples_per_s"].median)
            say(f"{report.subject} is fastest with {best.setting}", name)
            say(f"{best.verdict_text}.", "  verdict there")
            recommend(name)
    for note in report.notes:
        say(note, style="yellow")
    if report.quick:
        say("--quick shows that it works; its figures say nothing about speed", style="yellow")
    for text in report.failures:
        say(f"FAILED {text}", style="bold red")
    for details in {loader.details for workload in report.workloads for loader in workload.loaders.values()} - {""}:
        say(details.strip(), style="dim")
    for text in report.mismatches:
        say(f"DIFFERENT BYTES {text}", style="bold red")


def table(report: Report, width: int) -> Table:
    """One row a loader, a section a workload and setting; the subject's ratio stands out."""
    machine = report.machine
    workers = "" if report.is_sweep or report.num_workers is None else f"{report.num_workers} workers "
    step = f", a step of {report.step_ms:g} ms after each batch" if report.step_ms else ""
    made = Table(
        title=(
            f"{workers}({report.start_method}) on {machine['num_cpus']} cores, "
            f"Python {machine['python']}, torch {machine['torch']}; medians over rounds, \\[lowest-highest]{step}"
        ),
        caption="trainer: CPU of the consuming process without reading the batch; peak: memory of all processes (PSS)",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    for header in ("workload", "setting", "loader") if report.is_sweep else ("workload", "loader"):
        made.add_column(header, no_wrap=True)
    width -= SETTING_WIDTH * report.is_sweep + STEP_WIDTH * bool(report.step_ms)
    measured = {name for workload in report.workloads for each in workload.loaders.values() for name in each.metrics}
    shown = [column for column in COLUMNS if width >= column[2] and column[1] in measured | {"samples_per_s"}]
    for header in (f"x {report.reference}\nsamples/s", *(header for header, _, _ in shown)):
        made.add_column(header, justify="right", no_wrap=True)
    for workload in report.workloads:
        where = [workload.label, workload.setting] if report.is_sweep else [workload.label]
        for name, loader in workload.loaders.items():
            cells = [number(loader, metric) for _, metric, _ in shown]
            if loader.error:
                cells = ["failed", *[""] * (len(shown) - 1)]
            # of benchmarks.contestants.grain:open_loader what tells it from the others
            shown_name = name.rpartition(".")[2]
            made.add_row(*where, shown_name, ratio_cell(name, loader, report), *cells)
            where = [""] * len(where)
        made.add_section()
    return made


def ratio_cell(name: str, loader: LoaderReport, report: Report) -> str:
    if name == report.reference or loader.ratio is None:
        return "1" if name == report.reference and loader.rounds else ""
    ratio = loader.ratio
    text = f"{ratio.median:.2f}x"
    if ratio.low != ratio.high:
        text += f" \\[{ratio.low:.2f}-{ratio.high:.2f}]"
    if name != report.subject:
        return text
    return f"[bold {'green' if ratio.median >= 1 else 'red'}]{text}[/]"


def number(loader: LoaderReport, metric: str) -> str:
    spread = loader.metrics.get(metric)
    if spread is None:
        return ""
    return figure(spread.median * 100 if metric == "step_efficiency" else spread.median)


def figure(value: float) -> str:
    """About three digits, thousands separated."""
    if value != value:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def sentence(workload: WorkloadReport, report: Report) -> str:
    """What the ratio means on this workload, and how far the limit is."""
    subject, unit = workload.loaders[report.subject], workload.unit
    rate = workload.limit["fill_samples_per_s"]
    limit = (
        f"one core with no loader at all puts {figure(rate)} {unit}/s into a batch "
        f"and copies {workload.limit['memcpy_mb_per_s'] / 1e3:.1f} GB/s"
    )
    if subject.error or "samples_per_s" not in subject.metrics:
        return f"{report.subject} did not run; {limit}."
    delivered = subject.metrics["samples_per_s"].median
    rated = f"{figure(delivered)} {unit}/s"
    if report.subject != report.reference and subject.ratio and subject.cpu_ratio:
        rated = (
            f"{subject.ratio.median:.2f}x the {unit}/s of {report.reference}, at {subject.cpu_ratio.median:.2f}x its CPU per sample"
        )
    checked = " and with the same bytes" if subject.same_bytes else ""
    step = step_sentence(subject, workload.loaders.get(report.reference), report)
    return (
        f"{report.subject} delivers {rated}{checked}; {workload.meaning}. "
        f"{step}The limit: {limit}; {report.subject} reaches {delivered / rate:.0%} of that core."
    )


def step_sentence(subject: LoaderReport, reference: LoaderReport | None, report: Report) -> str:
    """How much of the simulated step was kept, and what the trainer waited for each; empty without a step."""
    kept = subject.metrics.get("step_efficiency")
    if kept is None:
        return ""
    other = reference.metrics.get("step_efficiency") if reference and reference is not subject else None
    beside = f" ({report.reference} {other.median:.0%})" if other else ""
    p50, p99 = (subject.metrics[f"wait_{name}_ms"].median for name in ("p50", "p99"))
    return (
        f"Of a step of {report.step_ms:g} ms it keeps {kept.median:.0%}{beside}, with a wait of {figure(p50)} ms (p50) and "
        f"{figure(p99)} ms (p99) before each. "
    )


def comparison(workload: WorkloadReport, report: Report) -> str:
    """Which loaders' bytes were compared with the reference's, and how; empty where the table's sentence says it all."""
    ways: dict[str, list[str]] = {}
    for name, loader in workload.loaders.items():
        if loader.same_bytes and loader.compared:
            ways.setdefault(loader.compared, []).append(name)
    if sum(map(len, ways.values())) < 2:
        return ""
    return f"same bytes as {report.reference}: " + "; ".join(f"{', '.join(each)} ({way})" for way, each in ways.items())
