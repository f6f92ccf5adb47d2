"""What bounds a loader on a workload, worked out from measured figures. How, in words: docs/bench.md.

A batch is made in two places that work side by side: the workers and the trainer. Each has a demand, in seconds a
batch, and the longer one sets the pace:

    workers = source (asleep until data comes) + decode (computing) + workers' hand-off (copying, coordination)
    trainer = consumer (touching the batch, the training step) + trainer's hand-off (what the loader computes there)

Demands are CPU time and sleep, not wall time: other work on the machine makes a run longer, but does not change what bounds it.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shmload.tools.bench.report import Report, WorkloadReport

WAIT_MAX = 0.10  # below this share of its time a trainer that waits is no loader's problem
EXPLAINED_MIN = 0.5  # demands should account for as much of the time of a batch
INSTANT_S = 1e-6  # a demand that cannot be told from nothing

SOURCE, DECODE, HAND_OFF, CONSUMER = "source", "decode", "hand-off", "consumer"
MEANING = {
    SOURCE: "workers sleep until the storage answers",
    DECODE: "workers compute: decoding and transforming samples is most of the work",
    HAND_OFF: "moving batches to the trainer is most of the work",
    CONSUMER: "the trainer finds its batches ready: the loader is fast enough",
}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one loader on one workload, per batch, with the shares of the trainer's time.

    Args:
        read_cpu_s, read_blocked_s: reading all samples of a batch on one core, computing and asleep.
        copy_s: the least time in which a core copies the batch's bytes.
        worker_cpu_s, trainer_cpu_s: what the loader's processes computed; the trainer's own work not included.
        consumer_s: the trainer's own work: touching the batch, and the simulated step.
        wall_s, wait_share: time from batch to batch, and the share of it in which the trainer waited.
    """

    num_workers: int
    num_cpus: int
    read_cpu_s: float
    read_blocked_s: float
    copy_s: float
    worker_cpu_s: float
    trainer_cpu_s: float
    consumer_s: float
    wall_s: float
    wait_share: float


@dataclass(frozen=True)
class Demands:
    """Seconds per batch, workers already divided over."""

    source_s: float
    decode_s: float
    worker_hand_off_s: float
    trainer_hand_off_s: float
    consumer_s: float
    in_parallel: bool  # workers beside the trainer, or everything in the trainer

    @property
    def hand_off_s(self) -> float:
        return self.worker_hand_off_s + self.trainer_hand_off_s

    def pace_s(self, *, without: str = "") -> float:
        """Seconds from batch to batch if these demands were all, one of them taken away."""
        costs = {  # of workers, of the trainer
            SOURCE: (self.source_s, 0.0),
            DECODE: (self.decode_s, 0.0),
            HAND_OFF: (self.worker_hand_off_s, self.trainer_hand_off_s),
            CONSUMER: (0.0, self.consumer_s),
        }
        workers_s = sum(of_workers for name, (of_workers, _) in costs.items() if name != without)
        trainer_s = sum(of_trainer for name, (_, of_trainer) in costs.items() if name != without)
        return max(max(workers_s, trainer_s) if self.in_parallel else workers_s + trainer_s, INSTANT_S)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What bounds the loader, and what would be won without it.

    Args:
        bound: source, decode, hand-off or consumer.
        headroom_ratio: how many times faster the loader would be if that cost nothing.
        *_ms: the demands it was worked out from, per batch.
        explained_share: of the time of a batch, by the longer demand.
    """

    bound: str
    headroom_ratio: float
    wait_share: float
    source_ms: float
    decode_ms: float
    hand_off_ms: float
    consumer_ms: float
    batch_wall_ms: float
    explained_share: float

    def sentence(self) -> str:
        """The verdict in words."""
        gain = f"without that it could be {ratio_words(self.headroom_ratio)} as fast"
        if self.bound == CONSUMER:
            gain = f"the loader alone could deliver {ratio_words(self.headroom_ratio)} as fast"
        return (
            f"{self.bound} bound: {MEANING[self.bound]}; the trainer waits {self.wait_share:.0%} of its time; {gain} "
            f"(ms a batch: source {ms(self.source_ms)}, decode {ms(self.decode_ms)}, hand-off {ms(self.hand_off_ms)}, "
            f"consumer {ms(self.consumer_ms)})"
        )


def demands(figures: Figures) -> Demands:
    """What each part of the way asks for, per batch.

    Waiting workers overlap, so their sleep is divided by all of them; computing ones share the cores. Reading a batch
    includes placing its bytes: as much as a copy of them takes counts as hand-off, the rest as decode. Reading cannot cost
    more than all that the loader computed: where it did when measured alone, files were new to memory then.
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
        figures.consumer_s,
        figures.num_workers > 0,
    )


def judge(figures: Figures) -> Verdict:
    """The verdict on one loader's figures.

    A trainer that hardly waits is the bound itself. Else it is the largest demand among those that it can wait for.
    """
    found = demands(figures)
    by_name = {SOURCE: found.source_s, DECODE: found.decode_s, HAND_OFF: found.hand_off_s}
    bound = CONSUMER if figures.wait_share <= WAIT_MAX else max(by_name, key=lambda name: by_name[name])
    pace_s = found.pace_s()
    return Verdict(
        bound=bound,
        headroom_ratio=pace_s / found.pace_s(without=bound),
        wait_share=figures.wait_share,
        **{f"{name}_ms": getattr(found, f"{name}_s") * 1e3 for name in ("source", "decode", "hand_off", "consumer")},
        batch_wall_ms=figures.wall_s * 1e3,
        explained_share=pace_s / figures.wall_s if figures.wall_s else 1.0,
    )


def ratio_words(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < 10 else f"{ratio:,.0f}x" if ratio < 1000 else "more than 1,000x"


def ms(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}" if value >= INSTANT_S * 1e3 else "0"


STEP_WAIT_MAX = 0.05  # of the step
RATE_SHARE = 0.95  # of the best rate
MARGIN = 1.25  # work is not even, and the trainer needs a core now and then
PREFETCH = 2  # torch's default


@dataclass(frozen=True)
class Tried:
    """One point of a sweep."""

    num_workers: int
    prefetch_factor: int | None
    batch_size: int
    samples_per_s: float
    wait_ms: float  # mean


@dataclass(frozen=True)
class Recommendation:
    """A setting, and where it comes from: "sweep" or "model"."""

    num_workers: int
    prefetch_factor: int
    batch_size: int | None
    origin: str
    reason: str

    def sentence(self) -> str:
        batch = f", batch_size={self.batch_size}" if self.batch_size else ""
        return f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}{batch} ({self.reason})"


def from_sweep(tried: Sequence[Tried], step_ms: float) -> Recommendation:
    """The least setting that was measured and is good enough; the fastest if none is.

    Batch sizes are the model's affair, not the loader's: only those of the largest rate are looked at, if there are several.
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
    """ceil(what the workers must do for a batch / what the trainer takes for one, with a margin), bounded by the cores.

    What workers sleep is not bounded by the cores: two sleeping workers need no second one.
    """
    parts = demands(figures)
    computing = max(1, min(figures.num_workers, figures.num_cpus))
    compute_s = (parts.decode_s + parts.worker_hand_off_s) * computing
    trainer_s = max(parts.consumer_s + parts.trainer_hand_off_s, 1e-6)
    needed = math.ceil(MARGIN * (compute_s + figures.read_blocked_s) / trainer_s)
    most = figures.num_cpus * min(1 + figures.read_blocked_s / max(compute_s, 1e-9), 8.0)
    num_workers = max(1, min(needed, math.floor(most)))
    reason = "by the model: the work of a batch over the step, and a quarter more"
    if not step_ms:
        reason = "without a training step the trainer takes all it can get; --step-ms tells how few workers yours needs"
    elif needed > num_workers:
        reason += "; more would help, but the cores are at their end"
    return Recommendation(num_workers, PREFETCH, None, "model", reason)


def judge_all(report: Report) -> None:
    """Writes verdicts into the sections and one recommendation a workload into the report."""
    num_cpus = report.machine["num_cpus"]
    for section in report.workloads:
        figures = figures_of(section, report.subject, num_cpus)
        if figures is None:
            continue
        verdict = judge(figures)
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
    """What the verdict on the subject is worked out from; None if it did not run."""
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
        consumer_s=metrics["consumer_ms_per_batch"] / 1e3,
        wall_s=metrics["batch_wall_ms"] / 1e3,
        wait_share=metrics["wait_share"],
    )


def recommend(sections: list[WorkloadReport], report: Report, num_cpus: int) -> Recommendation | None:
    """One workload's setting: out of the warm sections of a sweep, else by the model from the only one."""
    warm = [section for section in sections if section.cache == "warm"]
    ran = [(section, found) for section in warm if (found := figures_of(section, report.subject, num_cpus))]
    if not ran:
        return None
    if len(warm) == 1:
        return from_model(ran[0][1], step_ms=report.step_ms)
    tried = []
    for section, _ in ran:
        metrics = section.loaders[report.subject].metrics
        rate, wait_ms = metrics["samples_per_s"].median, metrics["wait_mean_ms"].median
        tried.append(Tried(section.num_workers, section.prefetch_factor, section.batch_size, rate, wait_ms))
    return from_sweep(tried, report.step_ms)
