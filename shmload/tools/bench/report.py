"""Benchmark results: the figures of all rounds, the table and sentences that the terminal shows, and the bottleneck of a loader.

The machine's load changes from minute to minute. A ratio is therefore computed between runs of the same round, which ran one
after the other, and only then the median over rounds.

The bottleneck is computed from measured figures; docs/bench.md describes how. Two sides make a batch in parallel: the workers and
the trainer. Each has a demand, in seconds a batch, and the longer one sets the pace:

    workers = source (asleep until data comes) + decode (computing) + workers' hand-off (copying, coordination)
    trainer = its own work (touching the batch, the training step) + trainer's hand-off (what the loader computes there)

Demands are CPU time and sleep, not wall time: other work on the machine makes a run longer, but does not change its bottleneck.
"""

import math
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

import shmload
from shmload.engine.bottleneck import MEANING, Bottleneck, judge

FORMAT = 1


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of a figure over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed (nearest rank); it is always a measured one."""
    rank = -(-len(ascending) * share // 1)  # ceiling
    return ascending[min(len(ascending), max(1, int(rank))) - 1]


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread | None:
    """Return the spread of the ratios of runs of the same rounds; None if no round has both."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=False) if b > 0]
    return Spread.of(ratios) if ratios else None


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

    def summarise(self, reference: "LoaderReport") -> None:
        for name in dict.fromkeys(name for values in self.rounds for name in values):
            self.metrics[name] = Spread.of(self.column(name))
        self.ratio = paired_ratio(self.column("samples_per_s"), reference.column("samples_per_s"))


@dataclass
class WorkloadReport:
    """All loaders on one workload at one setting, and what one core can do without a loader.

    `verdict` is about the subject of the report.
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
    verdict: dict[str, Any] | None = None
    verdict_text: str = ""


@dataclass
class Report:
    """A whole benchmark."""

    subject: str
    reference: str
    num_workers: int | None  # of the first setting; None: as the user's DataLoader has it
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
        return [
            f"{workload.name}: {name} failed: {loader.error}"
            for workload in self.workloads
            for name, loader in workload.loaders.items()
            if loader.error
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, without digests, which only serve the comparison."""
        plain = asdict(self)
        for workload in plain["workloads"]:
            for loader in workload["loaders"].values():
                del loader["digests"]
        return {"format": FORMAT, **plain, "failures": self.failures}


def machine() -> dict[str, Any]:
    """Return what the figures depend on, without anything that identifies the machine."""
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


WIDE = 128  # terminal columns of the full table

# header, metric, minimum width of the terminal that shows it
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
    """Print the table, the sentences, and what is missing or has failed."""

    def say(text: str, head: str = "", style: str = "") -> None:
        start = f"[bold]{escape(head)}[/]: " if head else ""
        console.print(start + escape(text), highlight=False, style=style or None)

    console.print(table(report, console.width))
    for label in dict.fromkeys(section.name for section in report.workloads):
        sections = [section for section in report.workloads if section.name == label]
        # for a sweep, the sentences describe the setting in which the subject was fastest
        best = max(sections, key=lambda section: rate(section, report.subject))
        say(sentence(best, report), label)
        if best.verdict:
            say(f"{best.verdict_text}.", "  verdict")
        if best.name in report.recommendations:
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
    """Return samples a second; 0 if the loader did not run."""
    found = section.loaders[loader].metrics.get("samples_per_s")
    return found.median if found else 0.0


def table(report: Report, width: int) -> Table:
    """Return a table with one row a loader, one section a workload and setting; the subject's ratio is highlighted."""
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
    width -= 12 * report.is_sweep + 7 * bool(report.step_ms)  # columns that only some reports have
    measured = {name for workload in report.workloads for each in workload.loaders.values() for name in each.metrics}
    shown = [column for column in COLUMNS if width >= column[2] and column[1] in measured | {"samples_per_s"}]
    for header in (f"x {report.reference}\nsamples/s", *(header for header, _, _ in shown)):
        made.add_column(header, justify="right", no_wrap=True)
    for workload in report.workloads:
        where = [workload.name, workload.setting] if report.is_sweep else [workload.name]
        for name, loader in workload.loaders.items():
            cells = ["failed"] if loader.error else [number(loader, metric) for _, metric, _ in shown]
            # of benchmarks.contestants.grain:open_loader, the part that differs between loaders
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
    """Return a number with about three digits, thousands separated."""
    if value != value:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def sentence(section: WorkloadReport, report: Report) -> str:
    """Return the subject's rate on this workload and the distance to the limit, as a sentence."""
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


EXPLAINED_MIN = 0.5  # minimum share of a batch's time that demands should account for
INSTANT_S = 1e-6  # a demand below this counts as zero


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The measurements of one loader on one workload, per batch, with the shares of the trainer's time.

    Args:
        read_cpu_s, read_blocked_s: reading all samples of a batch on one core, computing and asleep.
        copy_s: the least time in which a core copies the batch's bytes.
        worker_cpu_s, trainer_cpu_s: CPU time of the loader's processes, without the trainer's own work.
        trainer_s: the trainer's own work: touching the batch, and the simulated step.
        wall_s, wait_share: time from batch to batch, and the share of it in which the trainer waited.
    """

    num_workers: int
    num_cpus: int
    read_cpu_s: float
    read_blocked_s: float
    copy_s: float
    worker_cpu_s: float
    trainer_cpu_s: float
    trainer_s: float
    wall_s: float
    wait_share: float


@dataclass(frozen=True)
class Demands:
    """Seconds per batch, with the workers' demands already divided by their number."""

    source_s: float
    decode_s: float
    worker_hand_off_s: float
    trainer_hand_off_s: float
    trainer_s: float
    in_parallel: bool  # whether workers run beside the trainer; else everything runs in the trainer

    @property
    def hand_off_s(self) -> float:
        return self.worker_hand_off_s + self.trainer_hand_off_s

    def pace_s(self, *, without: Bottleneck = "none") -> float:
        """Return the seconds from batch to batch that these demands allow, with one of them left out."""
        costs: dict[Bottleneck, tuple[float, float]] = {  # of workers, of the trainer
            "source": (self.source_s, 0.0),
            "decode": (self.decode_s, 0.0),
            "hand-off": (self.worker_hand_off_s, self.trainer_hand_off_s),
            "trainer": (0.0, self.trainer_s),
        }
        workers_s = sum(of_workers for name, (of_workers, _) in costs.items() if name != without)
        trainer_s = sum(of_trainer for name, (_, of_trainer) in costs.items() if name != without)
        return max(max(workers_s, trainer_s) if self.in_parallel else workers_s + trainer_s, INSTANT_S)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The bottleneck of a loader, and the gain of removing it.

    Args:
        bottleneck: its name, as in engine/bottleneck.py.
        headroom_ratio: how many times faster the loader would be if the bottleneck cost nothing.
        *_ms: the demands from which it follows, per batch.
        explained_share: share of a batch's time that the longer demand accounts for.
    """

    bottleneck: Bottleneck
    headroom_ratio: float
    wait_share: float
    source_ms: float
    decode_ms: float
    hand_off_ms: float
    trainer_ms: float
    batch_wall_ms: float
    explained_share: float

    def sentence(self) -> str:
        """Return the verdict as a sentence."""
        gain = f"; without that it could be {ratio_words(self.headroom_ratio)} as fast"
        if self.bottleneck == "trainer":
            gain = f"; the loader alone could deliver {ratio_words(self.headroom_ratio)} as fast"
        return (
            f"bottleneck is {self.bottleneck}: {MEANING[self.bottleneck]}; the trainer waits {self.wait_share:.0%} of its time"
            f"{gain if self.headroom_ratio > 1 else ''} (ms a batch: source {ms(self.source_ms)}, decode {ms(self.decode_ms)}, "
            f"hand-off {ms(self.hand_off_ms)}, trainer {ms(self.trainer_ms)})"
        )


def demands(figures: Figures) -> Demands:
    """Return the demand of each stage, per batch.

    Waiting workers overlap, so their sleep is divided by their number; computing ones share the cores. Reading a batch includes
    placing its bytes: the time of a copy of them counts as hand-off, the rest as decode. Reading cannot cost more than everything
    the loader computed; if it did when measured alone, the files were not in the page cache then.
    """
    workers = max(1, figures.num_workers)
    computing = max(1, min(workers, figures.num_cpus))
    decode_cpu_s = max(0.0, min(figures.read_cpu_s, figures.worker_cpu_s + figures.trainer_cpu_s) - figures.copy_s)
    if figures.num_workers:
        worker_cpu_s = max(figures.worker_cpu_s - decode_cpu_s, 0.0)
        trainer_cpu_s = figures.trainer_cpu_s
    else:
        worker_cpu_s, trainer_cpu_s = 0.0, max(figures.trainer_cpu_s - decode_cpu_s, 0.0)
    return Demands(
        figures.read_blocked_s / workers,
        decode_cpu_s / computing,
        worker_cpu_s / computing,
        trainer_cpu_s,
        figures.trainer_s,
        figures.num_workers > 0,
    )


def judged(figures: Figures) -> Verdict:
    """Return the verdict on one loader's figures. Workers are idle for the part of a batch's time that their demand leaves."""
    found = demands(figures)
    workers_s = found.source_s + found.decode_s + found.worker_hand_off_s
    idle = max(1 - workers_s / figures.wall_s, 0.0) if figures.num_workers and figures.wall_s else 0.0
    bottleneck = judge(
        trainer_waits=figures.wait_share,
        workers_wait=idle * (1 - figures.wait_share),
        source=found.source_s,
        decode=found.decode_s,
        hand_off=found.hand_off_s,
    )
    pace_s = found.pace_s()
    return Verdict(
        bottleneck=bottleneck,
        headroom_ratio=pace_s / found.pace_s(without=bottleneck),
        wait_share=figures.wait_share,
        **{f"{name}_ms": getattr(found, f"{name}_s") * 1e3 for name in ("source", "decode", "hand_off", "trainer")},
        batch_wall_ms=figures.wall_s * 1e3,
        explained_share=pace_s / figures.wall_s if figures.wall_s else 1.0,
    )


def ratio_words(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < 10 else f"{ratio:,.0f}x" if ratio < 1000 else "more than 1,000x"


def ms(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}" if value >= INSTANT_S * 1e3 else "0"


STEP_WAIT_MAX = 0.05  # maximum share of the step spent waiting
RATE_SHARE = 0.95  # minimum share of the best rate
MARGIN = 1.25  # work is uneven, and the trainer needs a core now and then
PREFETCH = 2  # torch's default


@dataclass(frozen=True)
class MeasuredSetting:
    """One point of a sweep."""

    num_workers: int
    prefetch_factor: int | None
    batch_size: int
    samples_per_s: float
    wait_ms: float  # mean


@dataclass(frozen=True)
class Recommendation:
    """A setting, and its source: "sweep" or "model"."""

    num_workers: int
    prefetch_factor: int
    batch_size: int | None
    origin: str
    reason: str

    def sentence(self) -> str:
        batch = f", batch_size={self.batch_size}" if self.batch_size else ""
        return f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}{batch} ({self.reason})"


def from_sweep(tried: Sequence[MeasuredSetting], step_ms: float) -> Recommendation:
    """Return the smallest measured setting that is good enough; the fastest if none is.

    The batch size depends on the model, not the loader: of several sizes only the one with the highest rate is considered.
    """
    best = max(tried, key=lambda each: each.samples_per_s)
    alike = [each for each in tried if each.batch_size == best.batch_size]
    alike.sort(key=lambda each: (each.num_workers, each.prefetch_factor or PREFETCH))
    if step_ms:
        least = next((each for each in alike if each.wait_ms <= STEP_WAIT_MAX * step_ms), None)
        reason = f"the least that was tried with which the trainer waits at most {STEP_WAIT_MAX:.0%} of a step"
        missed = f"none that was tried kept the wait within {STEP_WAIT_MAX:.0%} of a step: the fastest of them"
    else:
        least = next(each for each in alike if each.samples_per_s >= RATE_SHARE * best.samples_per_s)
        reason, missed = f"the least that was tried with {RATE_SHARE:.0%} of the best rate", ""
    chosen = least or best
    several = len({each.batch_size for each in tried}) > 1
    batch_size = chosen.batch_size if several else None
    ahead = chosen.prefetch_factor or PREFETCH
    return Recommendation(chosen.num_workers, ahead, batch_size, "sweep", reason if least else missed)


def from_model(figures: Figures, *, step_ms: float) -> Recommendation:
    """Return the setting of the model: ceil(the workers' demand per batch / the trainer's, with a margin), limited by the cores.

    The cores do not limit the workers' sleep: two sleeping workers need no second one.
    """
    parts = demands(figures)
    computing = max(1, min(figures.num_workers, figures.num_cpus))
    compute_s = (parts.decode_s + parts.worker_hand_off_s) * computing
    trainer_s = max(parts.trainer_s + parts.trainer_hand_off_s, 1e-6)
    needed = math.ceil(MARGIN * (compute_s + figures.read_blocked_s) / trainer_s)
    most = figures.num_cpus * min(1 + figures.read_blocked_s / max(compute_s, 1e-9), 8.0)
    num_workers = max(1, min(needed, math.floor(most)))
    reason = "by the model: the work of a batch over the step, and a quarter more"
    if not step_ms:
        reason = "without a training step the trainer takes all it can get; --step-ms shows how few workers yours needs"
    elif needed > num_workers:
        reason += "; more would help, but the cores are at their end"
    return Recommendation(num_workers, PREFETCH, None, "model", reason)


def judge_all(report: Report) -> None:
    """Write verdicts into the sections, and one recommendation a workload into the report."""
    num_cpus = report.machine["num_cpus"]
    for section in report.workloads:
        figures = figures_of(section, report.subject, num_cpus)
        if figures is None:
            continue
        verdict = judged(figures)
        section.verdict, section.verdict_text = asdict(verdict), verdict.sentence()
        if verdict.explained_share < EXPLAINED_MIN:
            section.notes.append(
                f"only {verdict.explained_share:.0%} of the time of a batch is accounted for: it sleeps and wakes, or the machine "
                "has other work"
            )
    for name in dict.fromkeys(section.name for section in report.workloads):
        found = recommend([section for section in report.workloads if section.name == name], report, num_cpus)
        if found is not None:
            report.recommendations[name] = asdict(found) | {"sentence": found.sentence()}


def figures_of(section: WorkloadReport, subject: str, num_cpus: int) -> Figures | None:
    """Return the measurements for the verdict on the subject; None if it did not run."""
    loader = section.loaders.get(subject)
    if loader is None or loader.error or not loader.metrics:
        return None
    metrics = {name: spread.median for name, spread in loader.metrics.items()}
    limit, rows = section.limit, metrics["samples_per_batch"]
    trainer_cpu_s = metrics["trainer_us_per_batch"] / 1e6
    return Figures(
        num_workers=section.num_workers,
        num_cpus=num_cpus,
        read_cpu_s=limit["read_cpu_us_per_sample"] * rows / 1e6,
        read_blocked_s=limit["read_blocked_us_per_sample"] * rows / 1e6,
        copy_s=limit["batch_nbytes"] / section.batch_size * rows / (limit["memcpy_mb_per_s"] * 1e6),
        worker_cpu_s=max(0.0, metrics["cpu_us_per_sample"] * rows / 1e6 - trainer_cpu_s),
        trainer_cpu_s=trainer_cpu_s,
        trainer_s=metrics["trainer_own_ms_per_batch"] / 1e3,
        wall_s=metrics["batch_wall_ms"] / 1e3,
        wait_share=metrics["wait_share"],
    )


def recommend(sections: list[WorkloadReport], report: Report, num_cpus: int) -> Recommendation | None:
    """Return a workload's recommended setting: from the sections of a sweep, else by the model from the only section."""
    ran = [(section, found) for section in sections if (found := figures_of(section, report.subject, num_cpus))]
    if not ran:
        return None
    if len(sections) == 1:
        return from_model(ran[0][1], step_ms=report.step_ms)
    tried = []
    for section, _ in ran:
        metrics = section.loaders[report.subject].metrics
        rate, wait_ms = metrics["samples_per_s"].median, metrics["wait_mean_ms"].median
        tried.append(MeasuredSetting(section.num_workers, section.prefetch_factor, section.batch_size, rate, wait_ms))
    return from_sweep(tried, report.step_ms)
