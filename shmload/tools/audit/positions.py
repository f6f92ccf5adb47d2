"""Judge epochs by positions (seed mode, pipelines).

Every position of an epoch, or of a stream of items, must have been delivered once over all ranks. A record's step and rank
determine the positions of its rows, so runs on any number of ranks share one scale. In seed mode each position's sample is known,
too, and each delivery is compared with the schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shmload.audit.audit_file import Header, Mode
from shmload.schedule.schedule import Schedule
from shmload.schedule.stream_positions import stream_positions
from shmload.tools.audit.batch_keys import is_numeric_keys, ordered_keys
from shmload.tools.audit.deliveries import AuditPart, Delivery
from shmload.tools.audit.findings import AuditReport, EpochReport, Keys, ranges

BEHIND_MAX = 16  # steps by which ranks may differ when a run ends: they train in step, but a program may take batches ahead


@lru_cache(maxsize=64)
def schedule_of(header: Header) -> Schedule:
    """Return the schedule that a file's loader followed; for an order that a sampler made, only its positions are meaningful."""
    return Schedule(
        header.n or 0,
        batch_size=header.batch_size or 1,
        seed=header.seed or 0,
        shuffle=header.shuffle and header.order is None,
        uneven=header.uneven,  # type: ignore[arg-type]  # the schedule checks it
        world_size=header.world_size,
        version=header.schedule,
    )


class JudgedEpoch(NamedTuple):
    """An epoch whose positions have been judged."""

    keys: Keys  # of its deliveries, without padding and repeated rows
    is_whole: bool  # no position up to the last is missing


def judge_positions(
    epoch: EpochReport,
    deliveries: list[Delivery],
    parts: Sequence[AuditPart],
    *,
    is_last: bool,
    has_ended: bool,
    report: AuditReport,
) -> JudgedEpoch:
    """Judge the positions of one epoch; a repeating pipeline has one epoch.

    Args:
        epoch: the report to fill.
        deliveries: those of all ranks that no resume has rolled back.
        parts: all files.
        is_last: whether no record belongs to a later epoch.
        has_ended: whether a rank has recorded the end of the epoch.
        report: receives the findings.
    """
    newest = _newest(deliveries)
    header, is_open = newest.part.header, is_last and not has_ended
    rows = [_rows(one, report) for one in deliveries]
    if header.mode == Mode.SEED and header.order is None:
        _check_indices([one for one, (positions, _) in zip(deliveries, rows, strict=True) if len(positions)], report)
    delivered = _once([positions for positions, _ in rows], deliveries, report)
    start_at = min(_at(one) for one in deliveries if one.part.start == newest.part.start)  # where the newest start began
    reached = int(delivered[-1]) + 1 if len(delivered) else 0
    end = _end_of_epoch(header, start_at, reached, [part.header for part in parts if part.start > newest.part.start])
    due = reached if end is None or is_open else end  # positions below this should have been delivered
    step_end = min(due, reached + (start_at - reached) % _stride(header))  # the end of the step that was reached
    gaps = _gaps(delivered, step_end)
    remaining = _remaining(gaps, start_at, deliveries, newest, parts, report) if is_open else gaps[:0]
    _report_missing(deliveries, np.setdiff1d(gaps, remaining, assume_unique=True), range(step_end, due), parts, report)
    if is_open and (len(remaining) or end is None or due < end):
        epoch.state = "unfinished"
        epoch.remaining = f"positions after {np.append(remaining, due)[0] - 1}"
    if header.mode == Mode.SEED and header.order is not None:
        epoch.state = "consistent"
    keys = np.concatenate([np.empty(0, np.int64), *(keys for _, keys in rows)])
    return JudgedEpoch(keys, not len(gaps) and header.uneven != "drop")


def _newest(deliveries: Sequence[Delivery]) -> Delivery:
    """Return the delivery of the highest step of the newest start."""
    return max(deliveries, key=lambda one: (one.part.start, one.step))


def _rows(one: Delivery, report: AuditReport) -> tuple[Keys, Keys]:
    """Return the (positions, keys) that count: without rows repeated after a resume and, in pipelines, without padding."""
    header = one.part.header
    keys = ordered_keys(one.batch)
    positions = _positions(_at(one), header, 0 if keys is None else len(keys))
    if keys is None or not is_numeric_keys(keys) or len(keys) != len(positions):
        num_rows = 0 if keys is None else len(keys)
        report.found("swapped", f"{one.where}: {num_rows} rows were ordered, the schedule has {len(positions)}")
        return np.empty(0, np.int64), np.empty(0, np.int64)
    counts = np.ones(len(positions), np.bool_)
    if header.mode == Mode.PIPELINE:
        for bound in (_end(header), one.until):
            if bound is not None:
                counts &= positions < bound
    return positions[counts], np.asarray(keys, np.int64)[counts]


def _check_indices(deliveries: list[Delivery], report: AuditReport) -> None:
    """Check in seed mode that each delivery has the schedule's samples."""
    expected_more: Counter[Any] = Counter()
    for one in deliveries:
        schedule = schedule_of(one.part.header)
        expected, ordered = schedule.batch(one.epoch, one.step, one.rank), np.asarray(ordered_keys(one.batch))
        if not np.array_equal(expected, ordered):
            report.found("swapped", f"{one.where}: {_other_samples(one, expected, ordered.tolist())}")
            expected_more.update(expected.tolist())
            expected_more.subtract(ordered.tolist())
            continue
        for row, _, new, tries in one.batch.changes:
            if new is not None and new != schedule.index_after(one.epoch, one.step, one.rank, row, tries):
                what = f"row {row} has the substitute {new}, which is not number {tries} after it in the order"
                report.found("swapped", f"{one.where}: {what}")
    for kind, sign, what in (("missing", 1, "never came"), ("doubled", -1, "came once too often")):
        if found := sorted(key for key, more in expected_more.items() if sign * more > 0):
            report.found(kind, f"epoch {deliveries[0].epoch}: samples {ranges(found)} {what}, because of swapped rows")


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


def _report_missing(
    deliveries: list[Delivery], missing: Keys, tail: range, parts: Sequence[AuditPart], report: AuditReport
) -> None:
    """Report missing positions; in seed mode also their steps and ranks, and the first samples."""
    newest = _newest(deliveries).part.header
    number, headers = deliveries[0].epoch, {}
    if newest.mode == Mode.SEED:
        there = {one.step: one.part.header for one in deliveries}
        headers = {step: there.get(step, newest) for step in np.unique(missing // _stride(newest)).tolist()}
    of_rank: dict[int, list[int]] = {}
    for step, header in headers.items():
        for rank in range(header.world_size):
            its = _positions(step * _stride(header), header, rank=rank)  # in ascending order
            if len(its) and np.ptp(np.searchsorted(missing, (its[0], its[-1] + 1))):
                of_rank.setdefault(rank, []).append(step)
    whose = ", ".join(f"steps {ranges(steps)} of rank {rank}" for rank, steps in of_rank.items())
    if of_rank and newest.order is None:
        rank, (step, *_) = next(iter(of_rank.items()))
        schedule = schedule_of(headers[step])
        samples = schedule.batch(number, step, rank)[: schedule.num_valid(step, rank)].tolist()
        named = f"samples {', '.join(map(str, samples[:8]))}" if samples else "padding only"
        whose += f"; step {step} holds {named}"
    have = {(part.header.rank, part.header.world_size) for part in parts}
    worlds = {header.world_size for header in (newest, *headers.values())}
    if absent := sorted({rank for world in worlds for rank in range(world) if (rank, world) not in have}):
        whose += f"; there is no file of rank {ranges(absent)}: is it missing?"
    if len(missing):
        report.found("missing", f"epoch {number}: positions {ranges(missing)} never came{': ' if of_rank else ''}{whose}")
    if tail:
        report.found("missing", f"epoch {number}: nothing came from position {tail.start} to {tail.stop - 1}: it was left early")


def _once(positions: Sequence[Keys], deliveries: Sequence[Delivery], report: AuditReport) -> Keys:
    """Return all positions, sorted and without duplicates, and report those that were delivered twice."""
    every = np.concatenate(positions)
    whose = np.repeat(np.arange(len(positions)), [len(its) for its in positions])
    order = np.argsort(every, kind="stable")
    every, whose = every[order], whose[order]
    again = np.flatnonzero(every[1:] == every[:-1]) + 1
    for which in np.unique(whose[again]).tolist():
        its = again[whose[again] == which]
        before = deliveries[int(whose[its[0] - 1])]
        report.found(
            "doubled", f"{deliveries[which].where}: positions {ranges(every[its].tolist())} were delivered before: {before.where}"
        )
    return np.delete(every, again)


def _gaps(delivered: Keys, below: int) -> Keys:
    """Return the positions below `below` that a sorted array lacks."""
    lengths = np.diff(np.concatenate([[-1], delivered[delivered < below], [below]])) - 1
    return np.arange(lengths.sum()) + np.repeat(np.arange(len(lengths)), lengths)  # number of positions present before each gap


def _remaining(
    gaps: Keys, start_at: int, deliveries: list[Delivery], newest: Delivery, parts: Sequence[AuditPart], report: AuditReport
) -> Keys:
    """Return the positions still to come: in the newest start, those after the last step of each rank that has a file."""
    header, start = newest.part.header, newest.part.start
    last = {part.header.rank: -1 for part in parts if part.header.world_size == header.world_size}
    for one in deliveries:
        if one.part.start == start:
            last[one.rank] = max(last[one.rank], _at(one))
    front, stride = max(last.values()), _stride(header)
    behind = sorted(rank for rank, its_last in last.items() if its_last < front - BEHIND_MAX * stride)
    if behind and header.mode == Mode.SEED:  # a rank of a pipeline may fetch any number of rounds together
        report.unjudged.append(
            f"epoch {newest.epoch}, where the run ended: the record of rank {ranges(behind)} ends "
            f"{(front - min(last.values())) // stride} steps before the others'. It was stopped earlier, or its file was cut"
        )
    later = gaps[gaps >= start_at]
    steps = np.unique(later - (later - start_at) % stride)
    found = [
        _positions(step, header, rank=rank)
        for step in steps[steps > min(last.values())].tolist()
        for rank, its_last in last.items()
        if step > its_last
    ]
    return np.intersect1d(np.concatenate([gaps[:0], *found]), gaps)


def _end_of_epoch(header: Header, start_at: int, reached: int, later: Sequence[Header]) -> int | None:
    """Return the end of an epoch that is read from position `start_at` on; None if it is endless.

    Args:
        header: header of the newest start.
        start_at: where the newest start begins.
        reached: how far it was read.
        later: headers of later starts. A start that continues with larger steps may leave out what smaller ones would have read.
    """
    end = _end(header)
    if end is not None and header.mode == Mode.SEED and header.uneven == "pad":
        return end + -(end % _stride(header)) % header.world_size
    if end is None or header.uneven != "drop":
        return end
    if header.mode == Mode.PIPELINE and any(end - reached < _stride(each) for each in later):
        return reached
    return start_at + (end - start_at) // _stride(header) * _stride(header)


def _at(one: Delivery) -> int:
    """Return the position where the step of a delivery begins; in a pipeline the step's number is the position."""
    return one.step * (_stride(one.part.header) if one.part.header.mode == Mode.SEED else 1)


def _positions(step: int, header: Header, num_rounds: int = 1, rank: int | None = None) -> Keys:
    return stream_positions(
        step,
        header.rank if rank is None else rank,
        n=_end(header),
        uneven=header.uneven,
        world_size=header.world_size,
        batch_size=header.batch_size,
        num_rounds=num_rounds,
    )


def _end(header: Header) -> int | None:
    return None if (header.stream or {}).get("is_endless") else header.n


def _stride(header: Header) -> int:
    return (header.batch_size or 1) * header.world_size
