"""The result of a benchmark as data: what the table, the plot and the JSON file are all made from."""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shmload.observe.bench.job import Outcome
from shmload.observe.bench.summary import Spread, paired_ratio

FORMAT = 1


@dataclass
class LoaderReport:
    """One loader on one workload: every metric as median and extremes over rounds.

    `same_bytes` is None where nothing was compared: the reference itself, or a loader with an order of its own.
    """

    rounds: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, Spread] = field(default_factory=dict)
    ratio: Spread | None = None  # samples/s over the reference's, paired by round
    cpu_ratio: Spread | None = None  # CPU per sample over the reference's, paired by round
    same_bytes: bool | None = None
    error: str | None = None
    details: str = ""
    digests: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        if outcome.error:
            self.error, self.details = outcome.error, outcome.details
            return
        self.rounds.append(outcome.values)
        self.digests = self.digests or outcome.digests

    def summarise(self, reference: "LoaderReport") -> None:
        for name in dict.fromkeys(name for values in self.rounds for name in values):
            self.metrics[name] = Spread.of([values[name] for values in self.rounds if name in values])
        self.ratio = paired_ratio(column(self.rounds, "samples_per_s"), column(reference.rounds, "samples_per_s"))
        self.cpu_ratio = paired_ratio(
            column(self.rounds, "cpu_us_per_sample"), column(reference.rounds, "cpu_us_per_sample")
        )


@dataclass
class WorkloadReport:
    """All loaders on one workload, beside what one core can do without any."""

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


@dataclass
class Report:
    """A whole benchmark."""

    subject: str
    reference: str
    num_workers: int
    quick: bool
    start_method: str
    machine: dict[str, Any]
    workloads: list[WorkloadReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is missing, and the command that brings it

    @property
    def mismatches(self) -> list[str]:
        return [text for workload in self.workloads for text in workload.mismatches]

    @property
    def failures(self) -> list[str]:
        return [
            f"{workload.name}: {name} failed: {loader.error}"
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


def column(rounds: Sequence[dict[str, float]], metric: str) -> list[float]:
    return [values[metric] for values in rounds if metric in values]


def machine() -> dict[str, Any]:
    """What the figures depend on, as far as it can be told without saying whose machine it is."""
    return {
        "num_cpus": len(os.sched_getaffinity(0)),
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
