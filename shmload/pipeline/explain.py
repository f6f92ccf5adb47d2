"""Explain a pipeline: the cost of each stage, where it runs, and which part is the bottleneck.

    measured_run.py: a run with counters ──▶ StageCost of each stage ──▶ rates of the workers and of the trainer

engine/bottleneck.py judges these times, or the waits of the pipeline itself if it is running.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shmload.engine.bottleneck import MEANING, Bottleneck, judge
from shmload.pipeline.buckets import Bucket
from shmload.pipeline.measured_run import MeasuredRun, measure
from shmload.pipeline.pipeline_engine import PipelineEngine
from shmload.pipeline.plan import Plan
from shmload.pipeline.scan import Scan
from shmload.pipeline.stage_names import Where, places_of
from shmload.pipeline.stages import Collate
from shmload.worker.sample_rng import generators_kept


@dataclass(frozen=True)
class StageCost:
    """The cost of one stage of a pipeline.

    Attributes:
        name: the stage with its arguments, such as "Map(read)".
        where: "workers", "trainer", or "by position" for a stage that only chooses items and costs almost nothing.
        us_per_item: microseconds for each item that it receives, or for each row of a batch after Collate; None if not measured.
        num_in, num_out: number of items that it received and made while it was measured; batches after Collate.
    """

    name: str
    where: Where
    us_per_item: float | None
    num_in: int
    num_out: int


@dataclass(frozen=True)
class Explanation:
    """The costs of a pipeline's stages, and its bottleneck; `str()` of it is a table.

    Attributes:
        stages: in order.
        num_workers: worker processes that the stages request in total.
        bottleneck: "source" (reading its items), "decode" (the other stages, in the workers or, without any, in the trainer),
            "hand-off" (of a running pipeline: the trainer waits although workers are idle), "trainer" (stages that it runs beside
            workers, or the program that consumes the items), "none", or "unknown".
        why: one line that explains it and suggests a remedy.
        items_per_s: items per second that the pipeline can deliver to a fast enough program; None if not known.
        workers_per_s: items per second that its workers can make; None without workers, or if not known.
        trainer_per_s: items per second that the trainer can process; None if it does nothing, or if not known.
        trainer_waits: percentage of the time that the trainer waited for a batch; None unless the pipeline runs with workers.
        workers_busy: percentage of the time that workers were busy; None unless the pipeline runs with workers.
    """

    stages: list[StageCost]
    num_workers: int
    bottleneck: Bottleneck
    why: str
    items_per_s: float | None
    workers_per_s: float | None
    trainer_per_s: float | None
    trainer_waits: float | None
    workers_busy: float | None

    def __str__(self) -> str:
        places = {"workers": _workers(self.num_workers), "trainer": "trainer", "by position": "by position"}
        rows = [("stage", "where", "us an item", "items in -> out")]
        rows += [
            (stage.name, places[stage.where], "-" if stage.us_per_item is None else f"{stage.us_per_item:,.1f}", _flow(stage))
            for stage in self.stages
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]
        if self.trainer_waits is not None:
            lines.append(
                f"running: the trainer waits {self.trainer_waits:.0f} % of the time, workers are busy {self.workers_busy:.0f} %"
            )
        return "\n".join([*lines, self.why])


def _flow(stage: StageCost) -> str:
    if not stage.num_in:
        return ""
    text = f"{stage.num_in:,} -> {stage.num_out:,}"
    if stage.name.startswith(("Collate(", "Bucket(")):
        return f"{text} batches"
    return text if stage.num_out == stage.num_in else f"{text} ({100 * stage.num_out / stage.num_in:.0f} %)"


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}"


# ------------------------------------------------------------ the result


def explained(
    stages: Sequence[Any], block_size: int, engine: PipelineEngine, stats: dict[str, Any], *, items: int, seconds: float
) -> Explanation:
    """Explain a pipeline; see Conveyer.explain.

    Args:
        stages, block_size: of the Conveyer.
        engine: the engine that runs them.
        stats: statistics of the running loader, if any.
        items, seconds: as for Conveyer.explain.
    """
    places = places_of(stages, engine.plan)
    measured: MeasuredRun | None = None
    source: Any = engine.plan.source
    if engine.plan.is_streamed and (source.stream.is_spent_once_read or hasattr(source.stream.iterable, "state_dict")):
        reason = "the Stream's iterable has a position, which reading it would change"
    else:
        with generators_kept():
            measured = measure(stages, engine.plan, block_size, engine.place, items, seconds)
        reason = "of the items that were read none came" if measured.error is None else f"items fail: {measured.error!r:.200}"
    return _Summary(stages, engine.plan, stats, places, measured, reason).explanation()


class _Summary:
    """Derives an Explanation from measurements.

    Args:
        stages, plan: of the Conveyer.
        stats: statistics of the running loader; empty if it does not run.
        places: name of each stage, and where it runs.
        measured: the measured run; None if nothing could be measured.
        reason: why nothing was measured; used only then.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        plan: Plan,
        stats: dict[str, Any],
        places: Sequence[tuple[str, Where]],
        measured: MeasuredRun | None,
        reason: str,
    ) -> None:
        self._places, self._measured, self._reason = places, measured, reason
        self._num_workers, self._num_ranks = plan.pool.num_workers, plan.partition.n_ranks
        self._is_expanding = plan.is_expanding
        ends = [number + isinstance(stage, Bucket) for number, stage in enumerate(stages) if isinstance(stage, Collate | Bucket)]
        self._of_batches = min([*ends, len(stages)])  # the first stage that receives batches, or makes batches of items
        scans = [number for number, stage in enumerate(stages) if isinstance(stage, Scan)]
        self._after_blocks = min([*scans, self._of_batches])  # the first stage after those that make blocks
        self._stats = stats
        self._num_cpus = len(os.sched_getaffinity(0))

    def explanation(self) -> Explanation:
        """Return the explanation."""
        is_live = "time" in self._stats
        workers_us, trainer_us = self._us("workers"), self._us("trainer")
        if is_live and not self._is_expanding:
            workers_us = self._us_of_workers() or workers_us
        at_work = min(self._num_workers, self._num_cpus)
        workers_per_s = 1e6 * at_work / workers_us if workers_us else None
        trainer_per_s = 1e6 / trainer_us if trainer_us else None
        items_per_s = min((rate for rate in (workers_per_s, trainer_per_s) if rate is not None), default=None)
        bottleneck = self._bottleneck(1e6 / workers_per_s if workers_per_s else None, trainer_us or 0.0)
        busy, why = self._workers_busy(), self._why(bottleneck, items_per_s, trainer_per_s)
        if busy is not None and self._stats["bottleneck"] == "unknown":
            why = f"Most of the time so far was the start of the workers, so the waits say little; by the costs above: {why}"
        return Explanation(
            stages=[self._cost(number) for number in range(len(self._places))],
            num_workers=self._num_workers,
            bottleneck=bottleneck,
            why=why,
            items_per_s=items_per_s,
            workers_per_s=workers_per_s,
            trainer_per_s=trainer_per_s,
            trainer_waits=None if busy is None else self._stats["time"]["trainer_waits"],
            workers_busy=busy,
        )

    # ------------------------------------------------------------ costs

    def _cost(self, number: int) -> StageCost:
        name, where = self._places[number]
        if self._measured is None:
            return StageCost(name, where, None, 0, 0)
        count = self._measured.counts[number]
        num_items = self._measured.num_rows if number >= self._of_batches else count.num_in
        us = count.ns / 1e3 / num_items if num_items and where != "by position" else None
        return StageCost(name, where, us, count.num_in, count.num_out)

    def _us(self, where: Where) -> float | None:
        """Return the microseconds per delivered item of all stages that run there; None if not known."""
        if self._measured is None or not self._measured.num_rows:
            return None
        finishing = self._measured.counts[-1].ns / 1e3 / self._num_items(0)
        return finishing * (where == self._maker) + sum(self._shares(where).values())

    @property
    def _maker(self) -> Where:
        """Return the process that makes items."""
        return "workers" if self._num_workers else "trainer"

    def _shares(self, where: Where) -> dict[int, float]:
        """Return the microseconds per delivered item of each stage that runs there."""
        assert self._measured is not None
        return {
            number: self._measured.counts[number].ns / 1e3 / self._num_items(number)
            for number, (_, place) in enumerate(self._places)
            if place == where
        }

    def _num_items(self, number: int) -> float:
        """Return the number of delivered items that a stage worked for. Each rank makes all blocks, but delivers only its part."""
        assert self._measured is not None
        if self._is_expanding and number < self._after_blocks and self._measured.counts[-1].num_out:
            return self._measured.counts[-1].num_out / self._num_ranks
        return self._measured.num_rows

    def _us_of_workers(self) -> float | None:
        """Return the microseconds per item in the running workers."""
        workers = self._stats["workers"]
        busy_s, num_samples = (sum(worker[name] for worker in workers) for name in ("busy_s", "num_samples"))
        return 1e6 * busy_s / num_samples if num_samples else None

    def _workers_busy(self) -> float | None:
        """Return the percentage of their time that running workers have been busy; None if none is running."""
        busy = [100 * worker["busy_share"] for worker in self._stats.get("workers", []) if worker["started_ns"]]
        return sum(busy) / len(busy) if busy and "time" in self._stats else None

    # ------------------------------------------------------------ the bottleneck

    def _bottleneck(self, workers_us: float | None, trainer_us: float) -> Bottleneck:
        """Judge a running pipeline by its own times, and one that is not running by the measured times.

        Args:
            workers_us: microseconds between two items if only the workers took time; None without workers, or if not known.
            trainer_us: the same for the trainer.
        """
        busy, is_measured = self._workers_busy(), self._measured is not None and self._measured.num_rows > 0
        parts = self._shares(self._maker) if is_measured else {}
        whole = sum(parts.values())
        source = parts.get(0, 0.0) / whole if whole else 0.0  # share of an item's time
        if busy is not None and self._stats["bottleneck"] != "unknown":
            time, busy = self._stats["time"], busy / 100
            waits, idle = time["trainer_waits"] / 100, time["workers_wait"] / 100
            return judge(
                trainer_waits=waits, workers_wait=idle, source=busy * source, decode=busy * (1 - source), hand_off=1 - busy
            )
        if not is_measured:
            return "unknown"
        waits, idle = 1.0, 0.0
        if workers_us:
            slowest_us = max(workers_us, trainer_us)
            waits, idle = 1 - trainer_us / slowest_us, 1 - workers_us / slowest_us
        return judge(trainer_waits=waits, workers_wait=idle, source=source, decode=1 - source)

    def _is_trainers_own(self, trainer_per_s: float | None) -> bool:
        """Return whether the pipeline's own functions take most of the program's time between batches."""
        time, measured = self._stats["time"], self._measured
        rate = self._stats["samples_per_s"]
        if self._is_expanding and measured is not None and (blocks := measured.counts[-1]).num_in:  # its samples are blocks
            rate *= blocks.num_out / blocks.num_in / self._num_ranks
        if not rate or not trainer_per_s:
            return False
        program_s = (100 - time["trainer_waits"] - time["start_up"]) / 100 / rate
        return bool(1 / trainer_per_s >= program_s / 2)

    def _most_expensive(self, where: Where) -> int:
        shares = self._shares(where)
        return max(shares, key=lambda number: shares[number])

    def _most(self, where: Where) -> str:
        """Name the most expensive stage that runs there, or the only other work."""
        shares, whole = self._shares(where), self._us(where) or 0.0
        if not shares:
            return f"Making blocks of the items takes {whole:,.1f} us an item"
        number = self._most_expensive(where)
        return f"{self._places[number][0]} takes {shares[number]:,.1f} of the {whole:,.1f} us an item"

    def _why(self, bottleneck: Bottleneck, items_per_s: float | None, trainer_per_s: float | None) -> str:
        most = "" if items_per_s is None else f"at most {items_per_s:,.0f} items/s"
        is_measured = self._measured is not None and self._measured.num_rows > 0
        if bottleneck == "unknown":
            return f"Nothing could be measured: {self._reason}."
        if bottleneck == "none":
            return f"No bottleneck: {MEANING['none']}{f'; {most}' if most else ''}."
        if bottleneck == "trainer":
            is_live = self._workers_busy() is not None
            if not is_measured or (is_live and not self._is_trainers_own(trainer_per_s)):
                known = f", and the pipeline can give {items_per_s:,.0f} items/s" if items_per_s else ""
                return f"Bottleneck is trainer: the program that takes the items; workers wait{known}. Fewer workers would suffice."
            remedy = "before Collate, or as a BatchMap, workers would do that"
            return f"Bottleneck is trainer: {most}. {self._most('trainer')}; {remedy}."
        if not is_measured:
            return f"Bottleneck is {bottleneck}: {MEANING[bottleneck]}. The stages could not be measured: {self._reason}."
        if not self._num_workers:
            is_of_batches = self._most_expensive("trainer") > self._of_batches
            remedy = "before Collate, or as a BatchMap, " if is_of_batches else "n_workers says how many "
            remedy += "workers could do that" if is_of_batches else "workers do that beside the trainer"
            return f"Bottleneck is {bottleneck}, in the trainer: {most}. {self._most('trainer')}; {remedy}."
        if self._num_workers < self._num_cpus:
            remedy = f"more workers would help: there are {self._num_cpus} processors"
        else:
            remedy = f"only less work would help: there are {self._num_cpus} processors for {_workers(self._num_workers)}"
        return f"Bottleneck is {bottleneck}: {_workers(self._num_workers)} make {most}. {self._most('workers')}; {remedy}."
