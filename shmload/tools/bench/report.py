"""Rounds into figures: medians, their spread, and ratios that are paired within a round.

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
from typing import Any

from shmload.tools.bench.settings import Outcome

WAIT_SHARES = (0.0, 0.01, 0.05, *(number / 20 for number in range(2, 20)), 0.98, 0.99, 0.995, 0.999, 1.0)


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


FORMAT = 1


@dataclass
class LoaderReport:
    """One loader on one workload: every metric as median and extremes over rounds.

    `same_bytes` is None where nothing was compared: the reference itself, or a loader with an order of its own. `compared`
    says how. `wait_quantiles_ms` are the waits at the report's `wait_shares`, medians over rounds.
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

    def add(self, outcome: Outcome) -> None:
        if outcome.error:
            self.error, self.details = outcome.error, outcome.details
            return
        self.rounds.append(outcome.values)
        self.digests = self.digests or outcome.digests
        self.rows_digest = self.rows_digest or outcome.rows_digest
        self.round_quantiles_ms += [outcome.wait_quantiles_ms] if outcome.wait_quantiles_ms else []

    def summarise(self, reference: "LoaderReport") -> None:
        for name in dict.fromkeys(name for values in self.rounds for name in values):
            self.metrics[name] = Spread.of([values[name] for values in self.rounds if name in values])
        self.wait_quantiles_ms = [statistics.median(each) for each in zip(*self.round_quantiles_ms, strict=True)]
        self.ratio = paired_ratio(column(self.rounds, "samples_per_s"), column(reference.rounds, "samples_per_s"))
        self.cpu_ratio = paired_ratio(
            column(self.rounds, "cpu_us_per_sample"), column(reference.rounds, "cpu_us_per_sample")
        )


@dataclass
class WorkloadReport:
    """All loaders on one workload at one setting, beside what one core can do without any.

    `cache` is "warm", or "cold" for one pass over files that were dropped from the page cache first. `verdict` and
    `recommendation` are about the subject of the report.
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
        shares = [each["resident_share"] for each in (self.limit,) if "resident_share" in each]
        shares += [spread.high for loader in self.loaders.values() if (spread := loader.metrics.get("resident_share"))]
        if shares and max(shares) > most:
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


def column(rounds: Sequence[dict[str, float]], metric: str) -> list[float]:
    return [values[metric] for values in rounds if metric in values]


def machine() -> dict[str, Any]:
    """What the figures depend on, as far as it can be told without saying whose machine it is."""
    return {
        "num_cpus": len(os.sched_getaffinity(0)),
        "cpu_model": cpu_model(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "free_threaded": not getattr(sys, "_is_gil_enabled", lambda: True)(),
        **{name: installed(name) for name in ("shmload", "torch", "numpy")},
    }


def cpu_model() -> str | None:
    """The processor's name as the kernel tells it; some architectures have none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
    subject = workload.loaders[report.subject]
    rate = workload.limit["fill_samples_per_s"]
    unit = workload.unit
    limit = (
        f"one core with no loader at all puts {figure(rate)} {unit}/s into a batch "
        f"and copies {workload.limit['memcpy_mb_per_s'] / 1e3:.1f} GB/s"
    )
    if subject.error or "samples_per_s" not in subject.metrics:
        return f"{report.subject} did not run; {limit}."
    delivered = subject.metrics["samples_per_s"].median
    against = ""
    if report.subject != report.reference and subject.ratio and subject.cpu_ratio:
        against = (
            f" {subject.ratio.median:.2f}x the {unit}/s of {report.reference}, "
            f"at {subject.cpu_ratio.median:.2f}x its CPU per sample"
        )
    checked = " and with the same bytes" if subject.same_bytes else ""
    step = step_sentence(subject, workload.loaders.get(report.reference), report)
    return (
        f"{report.subject} delivers{against or f' {figure(delivered)} {unit}/s'}{checked}; {workload.meaning}. "
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
    return f"same bytes as {report.reference}: " + "; ".join(
        f"{', '.join(names)} ({way})" for way, names in ways.items()
    )
