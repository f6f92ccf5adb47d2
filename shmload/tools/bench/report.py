"""Rounds into figures, and figures into what the terminal says: a table, then what it means in plain sentences.

The machine's load changes from minute to minute. A ratio is therefore taken between runs of the same round, which
stood next to each other in time, and only then the median over rounds.
"""

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

FORMAT = 1


@dataclass(frozen=True)
class Spread:
    """Median and extremes of the same figure over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


def quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank): always one that was measured."""
    rank = -(-len(ascending) * share // 1)  # ceiling
    return ascending[min(len(ascending), max(1, int(rank))) - 1]


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread | None:
    """Spread of the ratios of runs of equal rounds; None where no round has both."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=False) if b > 0]
    return Spread.of(ratios) if ratios else None


@dataclass
class LoaderReport:
    """One loader on one workload: every metric as median and extremes over rounds.

    `same_bytes` is None where nothing was compared: the reference itself, a loader in an order of its own, or a cold pass.
    """

    rounds: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, Spread] = field(default_factory=dict)
    ratio: Spread | None = None  # samples/s over the reference's, paired by round
    same_bytes: bool | None = None
    error: str | None = None
    details: str = ""
    digests: list[int] = field(default_factory=list)

    def column(self, metric: str) -> list[float]:
        return [values[metric] for values in self.rounds if metric in values]

    def summarise(self, reference: "LoaderReport") -> None:
        for name in dict.fromkeys(name for values in self.rounds for name in values):
            self.metrics[name] = Spread.of(self.column(name))
        self.ratio = paired_ratio(self.column("samples_per_s"), reference.column("samples_per_s"))


@dataclass
class WorkloadReport:
    """All loaders on one workload at one setting, beside what one core can do without any.

    `cache` is "warm", or "cold" for one pass over files that were dropped from the page cache first. `verdict` is about the
    subject of the report.
    """

    name: str
    title: str
    batch_size: int
    limit: dict[str, float]
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
                del loader["digests"]
        return {"format": FORMAT, **plain, "failures": self.failures}


def machine() -> dict[str, Any]:
    """What the figures depend on, as far as it can be said without saying whose machine it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "num_cpus": len(os.sched_getaffinity(0)),
        "cpu_model": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("shmload", "torch", "numpy")},
    }


WIDE = 128  # terminal columns of the full table

# header, metric, width of terminal from which it is shown
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("samples\n/s", "samples_per_s", 0),
    ("step\nkept %", "step_efficiency", 0),
    ("MB/s", "mb_per_s", WIDE),
    ("CPU us\n/sample", "cpu_us_per_sample", 0),
    ("first\nbatch ms", "first_batch_ms", 100),
    ("wait ms\np50", "wait_p50_ms", WIDE),
    ("wait ms\np99", "wait_p99_ms", 100),
    ("trainer\nus/batch", "trainer_us_per_batch", 0),
    ("trainer\ns/GiB", "trainer_s_per_gib", WIDE),
    ("peak\nMB", "peak_pss_mb", 100),
)


def show(report: Report, console: Console) -> None:
    """Prints the table, the sentences, what is missing and what went wrong."""

    def say(text: str, head: str = "", style: str = "") -> None:
        start = f"[bold]{escape(head)}[/]: " if head else ""
        console.print(start + escape(text), highlight=False, style=style or None)

    console.print(table(report, console.width))
    for label in dict.fromkeys(section.label for section in report.workloads):
        sections = [section for section in report.workloads if section.label == label]
        # what is said of a sweep is said of the setting in which the subject was fastest
        best = max(sections, key=lambda section: rate(section, report.subject))
        say(sentence(best, report), label)
        if best.verdict:
            say(f"{best.verdict_text}.", "  verdict")
        if best.cache == "warm" and best.name in report.recommendations:
            say(f"{report.recommendations[best.name]['sentence']}.", "  recommended")
        for section in sections:
            for note in section.notes:
                say(f"  note: {f'{section.setting}: ' if report.is_sweep else ''}{note}")
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


def rate(section: WorkloadReport, loader: str) -> float:
    """Samples a second; 0 where the loader did not run."""
    found = section.loaders[loader].metrics.get("samples_per_s")
    return found.median if found else 0.0


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
    width -= 12 * report.is_sweep + 7 * bool(report.step_ms)  # of columns that not every report has
    measured = {name for workload in report.workloads for each in workload.loaders.values() for name in each.metrics}
    shown = [column for column in COLUMNS if width >= column[2] and column[1] in measured | {"samples_per_s"}]
    for header in (f"x {report.reference}\nsamples/s", *(header for header, _, _ in shown)):
        made.add_column(header, justify="right", no_wrap=True)
    for workload in report.workloads:
        where = [workload.label, workload.setting] if report.is_sweep else [workload.label]
        for name, loader in workload.loaders.items():
            cells = ["failed"] if loader.error else [number(loader, metric) for _, metric, _ in shown]
            # of benchmarks.contestants.grain:open_loader what tells it from the others
            made.add_row(*where, name.rpartition(".")[2], ratio_cell(name, loader, report), *cells)
            where = [""] * len(where)
        made.add_section()
    return made


def ratio_cell(name: str, loader: LoaderReport, report: Report) -> str:
    ratio = loader.ratio
    if name == report.reference or ratio is None:
        return "1" if name == report.reference and loader.rounds else ""
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


def sentence(section: WorkloadReport, report: Report) -> str:
    """What the subject delivers on this workload, and how far the limit is."""
    subject, limit = section.loaders[report.subject], section.limit["fill_samples_per_s"]
    copies = f"copies {section.limit['memcpy_mb_per_s'] / 1e3:.1f} GB/s"
    core = f"one core with no loader at all puts {figure(limit)} samples/s into a batch and {copies}"
    delivered = rate(section, report.subject)
    if subject.error or not delivered:
        return f"{report.subject} did not run; {core}."
    beside = f", {subject.ratio.median:.2f}x {report.reference}" if subject.ratio and report.subject != report.reference else ""
    checked = " and with the same bytes" if subject.same_bytes else ""
    where = f" with {section.setting}, where it is fastest" if report.is_sweep else ""
    return (
        f"{report.subject} delivers {figure(delivered)} samples/s{beside}{checked}{where}. "
        f"The limit: {core}; {report.subject} reaches {delivered / limit:.0%} of that core."
    )
