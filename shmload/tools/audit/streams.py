"""Judging pipelines: streams of items, every position of which must have come once over all ranks, and every item once an epoch.

A record's step is its first position, so which positions its rows had follows from the rank, and starts on any number of ranks lie
on one scale. Keys say which item a position stands for: item + epoch * n, and of a Join that times its members plus the member's
number. A Join's members go on where they stand, so each epoch of a member is whole before its next begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload.audit.header import Header
from shmload.schedule.schedule import stream_positions
from shmload.tools.audit.passes import is_numeric_keys, ordered_keys
from shmload.tools.audit.timeline import Delivery, EpochReport, Part, Report, ranges

Keys = NDArray[np.int64]


class Judged(NamedTuple):
    """An epoch whose positions are judged."""

    keys: Keys  # of all that counts
    members: Any  # what they are made of
    is_whole: bool  # no position up to the last is left out


def judge_stream(
    epoch: EpochReport,
    deliveries: list[Delivery],
    parts: Sequence[Part],
    *,
    is_last: bool,
    report: Report,
) -> Judged:
    """Judges the positions of one epoch; a pipeline that repeats has one.

    Args:
        deliveries: those that count, of all ranks.
        parts: all files there are.
    """
    num_found = report.num_found.total()
    newest = max(deliveries, key=lambda one: (one.part.start, one.step))
    header = newest.part.header
    rows = [_rows(one, report) for one in deliveries]
    ranks = {(part.header.rank, part.header.world_size) for part in parts}
    had = _once([positions for positions, _ in rows], deliveries, report)
    first = min(one.step for one in deliveries if one.part.start == newest.part.start)
    reached = int(had[-1]) + 1 if len(had) else 0
    whole = _whole(header, first, reached, [part.header for part in parts if part.start > newest.part.start])
    front = reached if whole is None or is_last else whole
    gaps = _gaps(had, front)
    remaining = _remaining(gaps, first, deliveries, newest, ranks) if is_last else set()
    if missing := [at for at in gaps if at not in remaining]:
        absent = [rank for rank in range(header.world_size) if (rank, header.world_size) not in ranks]
        why = f"; there is no file of rank {ranges(absent)}: is it missing?" if absent else ""
        report.found("missing", f"epoch {epoch.epoch}: positions {ranges(missing)} never came{why}")
    if is_last and (remaining or whole is None or front < whole):
        epoch.state = "unfinished"
        epoch.remaining = f"what is behind position {min(remaining, default=front) - 1}"
    if report.num_found.total() > num_found:
        epoch.state = "defect"
    keys = np.concatenate([np.empty(0, np.int64), *(keys for _, keys in rows)])
    return Judged(keys, (header.stream or {})["members"], not gaps and header.uneven != "drop")


def judge_items(epochs: Sequence[Judged], told: Sequence[EpochReport], report: Report) -> None:
    """Each item once in each epoch of its member, but for what is still to come of the last."""
    if not epochs:
        return
    num_found = report.num_found.total()
    is_whole = all(epoch.is_whole for epoch in epochs)
    for path, _, n, keys in _by_member(np.concatenate([epoch.keys for epoch in epochs]), epochs[0].members):
        member = "".join(f" of member {number}" for number in reversed(path))
        once, counts = np.unique(keys, return_counts=True)
        doubled = once[counts > 1]
        for epoch in np.unique(doubled // n).tolist():
            items = (doubled[doubled // n == epoch] % n).tolist()
            report.found("doubled", f"items {ranges(items)} of epoch {epoch}{member} came more than once")
        of_epochs, num_items = np.unique(once // n, return_counts=True)
        for epoch, num in zip(of_epochs[:-1].tolist(), num_items[:-1].tolist(), strict=True) if is_whole else ():
            if num < n:
                its = once[once // n == epoch] - epoch * n
                gap = int(np.flatnonzero(np.append(its, -1) != np.arange(num + 1))[0])
                report.found("missing", f"{n - num} items of epoch {epoch}{member} never came, such as item {gap}")
    if report.num_found.total() > num_found:
        for one in told:
            one.state = "defect"


def _once(positions: Sequence[Keys], deliveries: Sequence[Delivery], report: Report) -> Keys:
    """All positions, sorted; what was delivered twice is reported."""
    every = np.concatenate(positions)
    whose = np.repeat(np.arange(len(positions)), [len(its) for its in positions])
    order = np.argsort(every, kind="stable")
    every, whose = every[order], whose[order]
    again = np.flatnonzero(every[1:] == every[:-1]) + 1
    for which in np.unique(whose[again]).tolist():
        its = again[whose[again] == which]
        before = deliveries[int(whose[its[0] - 1])]
        report.found(
            "doubled",
            f"{deliveries[which].where}: positions {ranges(every[its].tolist())} were delivered before: {before.where}",
        )
    return np.delete(every, again)


def _gaps(had: Keys, front: int) -> list[int]:
    """What is not in a sorted row of positions, up to the front."""
    edges = np.concatenate([[-1], had[had < front], [front]])
    return [at for i in np.flatnonzero(np.diff(edges) > 1) for at in range(int(edges[i]) + 1, int(edges[i + 1]))]


def item_numbers(keys: Any, members: Any) -> Keys:
    """What tells the items of some keys apart, whatever their epochs."""
    numbers, before = np.empty(len(keys), np.int64), 0
    for _, rows, n, its in _by_member(np.asarray(keys, np.int64), members):
        numbers[rows] = before + its % n
        before += n
    return numbers


def _by_member(
    keys: Keys, members: Any, rows: Keys | None = None, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], Keys, int, Keys]]:
    """Of each member, at every depth: its number in each Join, which of the keys are its, how many items it has, its own keys."""
    rows = np.arange(len(keys)) if rows is None else rows
    if isinstance(members, int):
        yield path, rows, members, keys
        return
    for number, member in enumerate(members):
        is_its = keys % len(members) == number
        yield from _by_member(keys[is_its] // len(members), member, rows[is_its], (*path, number))


def _rows(one: Delivery, report: Report) -> tuple[Keys, Keys]:
    """(positions, keys) of what counts: no padding, and nothing that came again after a resume."""
    header = one.part.header
    assert one.batch is not None
    keys = ordered_keys(one.batch)
    positions = _positions(one.step, header, 0 if keys is None else len(keys))
    if keys is None or not is_numeric_keys(keys) or len(keys) != len(positions):
        num_rows = 0 if keys is None else len(keys)
        report.found("swapped", f"{one.where}: {num_rows} rows were ordered, the schedule has {len(positions)}")
        return np.empty(0, np.int64), np.empty(0, np.int64)
    counts = np.ones(len(positions), np.bool_)
    for bound in (_end(header), one.until):
        if bound is not None:
            counts &= positions < bound
    return positions[counts], np.asarray(keys, np.int64)[counts]


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
    return None if (header.stream or {})["is_endless"] else header.n


def _stride(header: Header) -> int:
    return (header.batch_size or 1) * header.world_size


def _whole(header: Header, first: int, reached: int, later: Sequence[Header]) -> int | None:
    """Where an epoch ends that is read from a step on; None: nowhere.

    Args:
        reached: how far it was read.
        later: of starts that came behind. One that goes on with larger steps may leave out what smaller ones would have read.
    """
    end = _end(header)
    if end is None or header.uneven != "drop":
        return end
    if any(end - reached < _stride(each) for each in later):
        return reached
    return first + (end - first) // _stride(header) * _stride(header)


def _remaining(
    gaps: list[int], first: int, deliveries: list[Delivery], newest: Delivery, ranks: set[tuple[int, int]]
) -> set[int]:
    """Positions still to come: of the newest start, what lies behind the last step of a rank that has a file."""
    header, start = newest.part.header, newest.part.start
    last = dict.fromkeys(range(header.world_size), -1)
    for one in deliveries:
        if one.part.start == start:
            last[one.rank] = max(last[one.rank], one.step)
    found: set[int] = set()
    for step in sorted({first + (at - first) // _stride(header) * _stride(header) for at in gaps if at >= first}):
        for rank, its_last in last.items():
            if step > its_last and (rank, header.world_size) in ranks:
                found.update(_positions(step, header, rank=rank).tolist())
    return found.intersection(gaps)
