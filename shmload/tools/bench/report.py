"""The results of a benchmark: the figures of all rounds, by workload and loader."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import shmload
from shmload.tools.bench.spread import Spread, paired_ratio

FORMAT = 1


@dataclass
class LoaderReport:
    """One loader on one workload: every metric as median and extremes over rounds.

    `same_bytes` is None if nothing was compared: for the reference itself, or a loader with an order of its own.
    """

    rounds: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, Spread] = field(default_factory=dict)
    ratio: Spread | None = None  # samples/s divided by the reference's, by round
    same_bytes: bool | None = None
    error: str | None = None
    details: str = ""
    digests: list[int] = field(default_factory=list)

    def column(self, metric: str) -> list[float]:
        return [values[metric] for values in self.rounds if metric in values]

    def summarize(self, reference: LoaderReport) -> None:
        for name in dict.fromkeys(name for values in self.rounds for name in values):
            self.metrics[name] = Spread.of(self.column(name))
        self.ratio = paired_ratio(self.column("samples_per_s"), reference.column("samples_per_s"))


@dataclass
class WorkloadReport:
    """All loaders on one workload at one setting, and what one core can do without a loader.

    `verdict` judges the report's `subject`. `limit` is the answer of `measure.probe`.
    """

    name: str
    title: str
    batch_size: int
    limit: dict[str, float]
    loaders: dict[str, LoaderReport]
    notes: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    setting: str = ""
    num_workers: int = 0
    prefetch_factor: int | None = None
    has_too_few_batches: bool = False  # there is no verdict then
    verdict: dict[str, Any] | None = None
    verdict_text: str = ""


_UNEQUAL = (  # in torch's errors
    "stack expects each tensor to be equal size",
    "resize storage that is not resizable",
    "each element in list of batch should be of equal size",
)


@dataclass
class Report:
    """A whole benchmark. Ratios and verdicts are those of the loader `subject`, compared with the loader `reference`."""

    subject: str
    reference: str
    num_workers: int | None  # of the first setting; None if the user's DataLoader sets it
    quick: bool
    start_method: str
    machine: dict[str, Any]
    workloads: list[WorkloadReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is missing, and the command that installs it
    step_ms: float = 0.0
    is_sweep: bool = False
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M %Z"))
    recommendations: dict[str, dict[str, Any]] = field(default_factory=dict)  # by workload

    @property
    def mismatches(self) -> list[str]:
        return [text for workload in self.workloads for text in workload.mismatches]

    @property
    def failures(self) -> list[str]:
        texts = [
            f"{workload.name}: {name} failed: {loader.error}"
            for workload in self.workloads
            for name, loader in workload.loaders.items()
            if loader.error
        ]
        if any(sign in text for text in texts for sign in _UNEQUAL):
            texts.append(
                "samples differ in shape or length, and torch's collate refuses them: give --collate with a function that pads "
                "them, or --torch-loader with your own DataLoader"
            )
        return texts

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, without digests, which only serve the comparison."""
        plain = asdict(self)
        for workload in plain["workloads"]:
            for loader in workload["loaders"].values():
                del loader["digests"]
        return {"format": FORMAT, **plain, "failures": self.failures}


def machine() -> dict[str, Any]:
    """Return the facts about the machine that the figures depend on, without anything that identifies it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "num_cpus": len(os.sched_getaffinity(0)),
        "cpu_model": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "shmload": shmload.__version__,  # even if it is not installed, but run from its folder
        **{name: version(name) for name in ("torch", "numpy")},
    }
