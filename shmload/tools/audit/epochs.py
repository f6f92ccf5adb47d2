"""Judging epochs of the keyed schedule: seed mode.

Where the samples of a step come from is a formula of (epoch, step, rank, world size), so each delivery is held against it, and
what is left to judge is positions: every step's ranks together must cover the step's positions once. Steps may be of different
world sizes, as after a resume on other hardware, since the global batch is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from shmload.audit.file import Batch
from shmload.audit.header import Header
from shmload.schedule.schedule import Schedule
from shmload.tools.audit.passes import ordered_keys
from shmload.tools.audit.timeline import Delivery, EpochReport, Report, ranges

BEHIND_MAX = (
    16  # steps that ranks of a run that ended may be apart: they step together, what is handed over ahead counts
)


@lru_cache(maxsize=64)
def schedule_of(header: Header) -> Schedule:
    """The schedule that a file's loader followed; an order of another kind is known by its positions only."""
    return Schedule(
        header.n or 0,
        batch_size=header.batch_size or 1,
        seed=header.seed or 0,
        shuffle=header.shuffle and header.order is None,
        uneven=header.uneven,  # type: ignore[arg-type]  # the schedule checks it
        world_size=header.world_size,
        version=header.schedule,
    )


def judge_epoch(
    epoch: EpochReport,
    deliveries: list[Delivery],
    has_ended: bool,
    ranks: set[tuple[int, int]],
    *,
    is_last: bool,
    report: Report,
) -> None:
    """Judges one epoch.

    Args:
        deliveries: those that count, of all ranks.
        has_ended: whether any rank's record says that the epoch came to its end.
        ranks: (rank, world size) of every file there is.
    """
    num_found = report.num_found.total()
    known = [one for one in deliveries if _exists(one, report)]
    if not known:
        epoch.state = "defect"
        return
    _check_indices(known, report)
    missing = _uncovered(epoch.epoch, known, report)
    newest = _newest(known)
    schedule = schedule_of(newest.part.header)
    tail = range(max(one.step for one in known) + 1, schedule.num_steps)  # nobody has come there
    if is_last and not has_ended and (missing or tail):
        missing, remaining = _divided(missing, known, ranks, report)
        first = min([step for step, _ in remaining], default=tail.start)
        if remaining or tail:
            epoch.state = "unfinished"
            epoch.remaining = f"positions {schedule.position(first)} to {schedule.position(schedule.num_steps) - 1}"
        if gone := [rank for step, rank in remaining if step == first]:
            epoch.remaining += f", of step {first} only those of rank {ranges(sorted(gone))}"
        tail = range(0)
    _tell_missing(epoch.epoch, missing, tail, newest.part.header, ranks, report)
    if newest.part.header.order is not None and epoch.state == "proven":
        epoch.state = "consistent"
    if report.num_found.total() > num_found:
        epoch.state = "defect"


def _newest(deliveries: Iterable[Delivery]) -> Delivery:
    """The delivery of the highest step."""
    return max(deliveries, key=lambda one: (one.part.start, one.step))


def _exists(one: Delivery, report: Report) -> bool:
    schedule = schedule_of(one.part.header)
    if one.step < schedule.num_steps_of(one.rank):
        return True
    report.found("doubled", f"{one.where}: the epoch has only {schedule.num_steps_of(one.rank)} steps for this rank")
    return False


# ------------------------------------------------------------ the right samples


def _check_indices(deliveries: list[Delivery], report: Report) -> None:
    expected_more: Counter[Any] = Counter()
    for one in deliveries:
        header = one.part.header
        schedule = schedule_of(header)
        batch = one.batch
        assert batch is not None
        expected = schedule.batch(one.epoch, one.step, one.rank)
        ordered = ordered_keys(batch)
        if ordered is None or len(ordered) != len(expected):
            count = 0 if ordered is None else len(ordered)
            report.found("swapped", f"{one.where}: {count} rows were ordered, the schedule has {len(expected)}")
        elif header.order is None and not np.array_equal(expected, ordered):
            report.found("swapped", f"{one.where}: {_other_samples(one, expected, list(ordered))}")
            expected_more.update(expected.tolist())
            expected_more.subtract(int(k) if isinstance(k, int | np.integer) else k for k in ordered)
        elif header.order is None and (wrong := _wrong_substitutes(one, batch, schedule)):
            report.found("swapped", f"{one.where}: {wrong}")
    gone = sorted(key for key, more in expected_more.items() if more > 0)
    extra = sorted((key for key, more in expected_more.items() if more < 0), key=str)
    if gone:
        report.found("missing", f"epoch {deliveries[0].epoch}: samples {ranges(gone)} never came, by what is swapped")
    if extra:
        shown = ", ".join(map(str, extra[:20])) + (" and more" if len(extra) > 20 else "")
        report.found("doubled", f"epoch {deliveries[0].epoch}: samples {shown} came once too often, by what is swapped")


def _other_samples(one: Delivery, expected: np.ndarray[Any, Any], ordered: list[Any]) -> str:
    rows = [row for row, (a, b) in enumerate(zip(expected.tolist(), ordered, strict=True)) if a != b]
    text = f"rows {ranges(rows)} hold other samples than the schedule says, the first is {ordered[rows[0]]} for {expected[rows[0]]}"
    schedule = schedule_of(one.part.header)
    num_near = 64
    for step in range(max(one.step - num_near, 0), min(one.step + num_near, schedule.num_steps)):
        for rank in range(min(schedule.world_size, num_near)):
            if (step, rank) != (one.step, one.rank) and np.array_equal(schedule.batch(one.epoch, step, rank), ordered):
                return f"{text}: it is the batch of step {step}, rank {rank}"
    return text


def _wrong_substitutes(one: Delivery, batch: Batch, schedule: Schedule) -> str:
    for row, _, substitute, tries in batch.changes:
        if substitute is not None and substitute != schedule.index_after(one.epoch, one.step, one.rank, row, tries):
            return f"row {row} has the substitute {substitute}, which is not number {tries} behind it in the order"
    return ""


# ------------------------------------------------------------ every position once


def _uncovered(number: int, deliveries: list[Delivery], report: Report) -> list[tuple[int, int]]:
    """(step, rank) of what nobody delivered up to the last step that anybody was; what was delivered twice is reported."""
    newest = _newest(deliveries).part.header
    by_step: dict[int, list[Delivery]] = {}
    for one in deliveries:
        by_step.setdefault(one.step, []).append(one)
    missing = []
    for step in range(max(by_step) + 1):
        here = by_step.get(step, [])
        worlds = {one.part.header.world_size for one in here}
        header = _newest(here).part.header if here else newest
        schedule = schedule_of(header)
        if len(worlds) > 1:
            where = "; ".join(one.where for one in here)
            report.found(
                "doubled",
                f"epoch {number}, step {step}: delivered to worlds of {ranges(sorted(worlds))} ranks: {where}",
            )
            continue
        count = Counter(one.rank for one in here)
        for rank, times in count.items():
            if times > 1:
                where = "; ".join(one.where for one in here if one.rank == rank)
                report.found("doubled", f"epoch {number}, step {step}, rank {rank}: delivered {times} times: {where}")
        if len(count) < schedule.world_size:
            missing += [
                (step, r) for r in range(schedule.world_size) if r not in count and schedule.num_steps_of(r) > step
            ]
    return missing


def _divided(
    missing: list[tuple[int, int]], deliveries: list[Delivery], ranks: set[tuple[int, int]], report: Report
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(missing, remaining) of an epoch in which the run ended: what lies behind a rank's last step is still to come."""
    header = _newest(deliveries).part.header
    last = dict.fromkeys(range(header.world_size), -1)
    for one in deliveries:
        if one.part.header.world_size == header.world_size:
            last[one.rank] = max(last[one.rank], one.step)
    first_of_world = min(one.step for one in deliveries if one.part.header.world_size == header.world_size)
    present = {rank for rank in last if (rank, header.world_size) in ranks}
    remaining = [(s, r) for s, r in missing if r in present and s > last[r] and s >= first_of_world]
    front = max(last.values())
    behind = [rank for rank in sorted(present) if last[rank] < front - BEHIND_MAX]
    if behind:
        report.unjudged.append(
            f"epoch {deliveries[0].epoch}, where the run ended: the record of rank {ranges(behind)} ends "
            f"{front - min(last[rank] for rank in behind)} steps before the others'. It was stopped earlier, or its file was cut"
        )
    kept = set(remaining)
    return [one for one in missing if one not in kept], remaining


def _tell_missing(
    number: int,
    missing: list[tuple[int, int]],
    tail: range,
    header: Header,
    ranks: set[tuple[int, int]],
    report: Report,
) -> None:
    """One finding per rank, with the first samples by name."""
    by_rank: dict[int, list[int]] = {}
    for step, rank in missing:
        by_rank.setdefault(rank, []).append(step)
    schedule = schedule_of(header)
    for rank in range(header.world_size):
        steps = by_rank.pop(rank, [])
        left = range(tail.start, schedule.num_steps_of(rank)) if tail else tail
        if not steps and not left:
            continue
        first = steps[0] if steps else left.start
        shown = [ranges(steps)] if steps else []
        if left:
            shown.append(f"{left.start}-{left.stop - 1}" if len(left) > 1 else f"{left.start}")
        text = f"rank {rank}, epoch {number}: steps {', '.join(shown)} are not recorded; "
        if header.order is None:
            samples = schedule.batch(number, first, rank)[: schedule.num_valid(first, rank)].tolist()
            names = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
            text += f"step {first} holds samples {names}" if names else f"step {first} holds padding only"
        else:
            text += f"step {first} stands at position {schedule.position(first)}"
        if (rank, header.world_size) not in ranks:
            text += "; there is no file of this rank: is it missing?"
        report.found("missing", text)
    for rank, steps in by_rank.items():
        report.found(
            "missing", f"rank {rank}, of another world size, epoch {number}: steps {ranges(steps)} are not recorded"
        )
