"""The bottleneck of a loader, computed from measured figures; docs/bench.md describes how.

Two sides make a batch in parallel: the workers and the trainer. Each has a demand, in seconds a batch, and the longer one sets the
pace:

    workers = source (asleep until data comes) + decode (computing) + workers' hand-off (copying, coordination)
    trainer = its own work (touching the batch, the training step) + trainer's hand-off (what the loader computes there)

Demands are CPU time and sleep, not wall time: other work on the machine makes a run longer, but does not change its bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmload.engine.bottleneck import MEANING, Bottleneck, judge, remedy_of

DECODING_HELPS = ("decode", "hand-off")  # what a dataset with `read_into` has less of
EXPLAINED_MIN = 0.5  # minimum share of a batch's time that demands should account for
INSTANT_S = 1e-6  # a demand below this counts as zero


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The measurements of one loader on one workload, per batch.

    Args:
        num_workers: number of workers; 0 if the trainer reads.
        are_threads: whether the workers are threads of the trainer.
        num_cpus: processors that they may use.
        read_cpu_s, read_blocked_s: reading all samples of a batch on one core, computing and asleep.
        copy_s: the least time in which a core copies the batch's bytes.
        worker_cpu_s, trainer_cpu_s: CPU time of the loader's processes, without the trainer's own work. The trainer's includes
            that of its threads.
        trainer_s: the trainer's own work: touching the batch, and the simulated step.
        wall_s, wait_share: time from batch to batch, and the share of it in which the trainer waited.
    """

    num_workers: int
    are_threads: bool = False
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
        wait_share: share of the time in which the trainer waited.
        source_ms, decode_ms, hand_off_ms, trainer_ms: the demands from which it follows, per batch.
        batch_wall_ms: time from batch to batch.
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

    def sentence(self, *, decodes_in_place: bool = False, has_collate_fn: bool = False) -> str:
        """Return the verdict and the remedy in words; no verdict if the figures do not explain the time.

        Args:
            decodes_in_place: the dataset has `read_into` already.
            has_collate_fn: the program's own function makes the batches.
        """
        if self.explained_share < EXPLAINED_MIN:
            return (
                f"none, because the figures explain only {self.explained_share:.0%} of the time of a batch: other programs may "
                "have used the cores; measure again while the machine is idle, or watch your own program with `shmload top`"
            )
        gain = f"; without that it could be {ratio_words(self.headroom_ratio)} as fast"
        if self.bottleneck == "trainer":
            gain = f"; the loader alone could deliver {ratio_words(self.headroom_ratio)} as fast"
        remedy = (
            "measure longer with --seconds"
            if self.bottleneck == "unknown"
            else remedy_of(self.bottleneck, has_collate_fn=has_collate_fn)
        )
        if remedy and self.bottleneck in DECODING_HELPS and not decodes_in_place and not has_collate_fn:
            remedy += ", or a `schema` with `read_into`"
        return (
            f"bottleneck is {self.bottleneck}: {MEANING[self.bottleneck]}; the trainer waits {self.wait_share:.0%} of its time"
            f"{gain if self.headroom_ratio > 1 else ''}{f'. Remedy: {remedy}' if remedy else ''}"
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
    if figures.num_workers and not figures.are_threads:
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
