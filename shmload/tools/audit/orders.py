"""Judging epochs: whether what was delivered in one is what its order says, each position or sample once.

*Epochs* of the keyed schedule (seed mode): where the samples of a step come from is a formula of (epoch, step, rank, world size).
Each delivery is held against it, and what is left to judge is positions: every step's ranks together must cover the step's
positions once. Steps may be of different world sizes, as after a resume on other hardware, since the global batch is the same.

*Passes*, whose order a sampler says (torch mode, and seed mode with a sampler): there is no formula, so a pass is judged by its
own records: each step once, in turn, without gaps. Where it is torch's own sampler that delivers every sample once (sequential,
random without replacement, DistributedSampler over all ranks), the indices are judged, too.

*Streams* of items (pipelines): every position must have come once over all ranks, and every item once an epoch. A record's step is
its first position, so which positions its rows had follows from the rank, and starts on any number of ranks lie on one scale.
Keys say which item a position stands for: item + epoch * n, and of a Join that times its members plus the member's number. A
Join's members go on where they stand, so each epoch of a member is whole before its next begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload.audit.file import DISTRIBUTED, Batch, Header
from shmload.schedule.schedule import Schedule, stream_positions
from shmload.tools.audit.timeline import AuditPart, AuditReport, Delivery, EpochReport, ranges

Keys = NDArray[np.int64]


def ordered_keys(batch: Batch) -> list[Any] | np.ndarray[Any, Any] | None:
    """The keys as they were ordered: before samples were skipped or substituted."""
    if batch.keys is None or not batch.changes:
        return batch.keys
    keys = list(batch.keys)
    for row, key, substitute, _ in batch.changes:
        if substitute is None:
            keys.insert(row, key)
        elif row < len(keys):
            keys[row] = key
    return keys


def is_numeric_keys(keys: Any) -> bool:
    """Whether all keys of a batch are whole numbers."""
    return isinstance(keys, np.ndarray) or (keys is not None and all(type(key) in (int, np.int64) for key in keys))


def _doubled(deliveries: list[Delivery], what: str, report: AuditReport) -> None:
    """Reports places that were delivered several times; `what` names the place of one."""
    at: dict[tuple[int, int], list[Delivery]] = {}
    for one in deliveries:
        at.setdefault((one.step, one.rank), []).append(one)
    for (step, rank), several in at.items():
        if len(several) > 1:
            where = "; ".join(one.where for one in several)
            report.found("doubled", f"{what.format(step=step, rank=rank)} delivered {len(several)} times: {where}")


# ------------------------------------------------------------ epochs of the keyed schedule

BEHIND_MAX = 16  # steps that ranks of a run that ended may be apart: they step together, what is handed over ahead counts


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
    report: AuditReport,
) -> None:
    """Judges one epoch.

    Args:
        deliveries: those that count, of all ranks.
        has_ended: whether any rank's record says that the epoch came to its end.
        ranks: (rank, world size) of every file there is.
    """
    known = [one for one in deliveries if _exists(one, report)]
    if not known:
        return
    _check_indices(known, report)
    header = _newest(known).part.header
    schedule = schedule_of(header)
    missing = _uncovered(epoch.epoch, known, report)
    tail = range(max(one.step for one in known) + 1, schedule.num_steps)  # nobody has come there
    if is_last and not has_ended and (missing or tail):
        remaining = _remaining_steps(missing, known, ranks, report)
        missing = sorted(set(missing) - set(remaining))
        first = min([step for step, _ in remaining], default=tail.start)
        if remaining or tail:
            epoch.state = "unfinished"
            epoch.remaining = f"positions {schedule.position(first)} to {schedule.position(schedule.num_steps) - 1}"
        if gone := [rank for step, rank in remaining if step == first]:
            epoch.remaining += f", of step {first} only those of rank {ranges(sorted(gone))}"
        tail = range(0)
    _report_missing(epoch.epoch, missing, tail, header, ranks, report)
    if header.order is not None and epoch.state == "proven":
        epoch.state = "consistent"


def _newest(deliveries: Sequence[Delivery]) -> Delivery:
    """The delivery of the highest step of the newest start."""
    return max(deliveries, key=lambda one: (one.part.start, one.step))


def _exists(one: Delivery, report: AuditReport) -> bool:
    schedule = schedule_of(one.part.header)
    if one.step < schedule.num_steps_of(one.rank):
        return True
    report.found("doubled", f"{one.where}: the epoch has only {schedule.num_steps_of(one.rank)} steps for this rank")
    return False


def _check_indices(deliveries: list[Delivery], report: AuditReport) -> None:
    """Each delivery's samples must be the schedule's."""
    expected_more: Counter[Any] = Counter()
    for one in deliveries:
        is_plain = one.part.header.order is None
        schedule = schedule_of(one.part.header)
        expected = schedule.batch(one.epoch, one.step, one.rank)
        ordered = ordered_keys(one.batch)
        if ordered is None or len(ordered) != len(expected):
            count = 0 if ordered is None else len(ordered)
            report.found("swapped", f"{one.where}: {count} rows were ordered, the schedule has {len(expected)}")
        elif is_plain and not np.array_equal(expected, ordered):
            report.found("swapped", f"{one.where}: {_other_samples(one, expected, list(ordered))}")
            expected_more.update(expected.tolist())
            expected_more.subtract(int(k) if isinstance(k, int | np.integer) else k for k in ordered)
        elif is_plain:
            for row, _, new, tries in one.batch.changes:
                if new is not None and new != schedule.index_after(one.epoch, one.step, one.rank, row, tries):
                    what = f"row {row} has the substitute {new}, which is not number {tries} behind it in the order"
                    report.found("swapped", f"{one.where}: {what}")
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


def _uncovered(number: int, deliveries: list[Delivery], report: AuditReport) -> list[tuple[int, int]]:
    """(step, rank) of what nobody delivered up to the last step that anybody was; what was delivered twice is reported."""
    newest = _newest(deliveries).part.header
    by_step: dict[int, list[Delivery]] = {}
    for one in deliveries:
        by_step.setdefault(one.step, []).append(one)
    missing = []
    for step in range(max(by_step) + 1):
        here = by_step.get(step, [])
        worlds = {one.part.header.world_size for one in here}
        if len(worlds) > 1:
            where = "; ".join(one.where for one in here)
            several = f"delivered to worlds of {ranges(sorted(worlds))} ranks: {where}"
            report.found("doubled", f"epoch {number}, step {step}: {several}")
            continue
        _doubled(here, f"epoch {number}, step {{step}}, rank {{rank}}:", report)
        schedule = schedule_of(_newest(here).part.header if here else newest)
        present = {one.rank for one in here}
        if len(present) < schedule.world_size:
            absent = set(range(schedule.world_size)) - present
            missing += [(step, rank) for rank in sorted(absent) if schedule.num_steps_of(rank) > step]
    return missing


def _remaining_steps(
    missing: list[tuple[int, int]], deliveries: list[Delivery], ranks: set[tuple[int, int]], report: AuditReport
) -> list[tuple[int, int]]:
    """What is not missing but still to come where the run ended: what lies behind the last step of a rank that has a file."""
    world = _newest(deliveries).part.header.world_size
    mine = [one for one in deliveries if one.part.header.world_size == world]
    last = dict.fromkeys(range(world), -1)
    for one in mine:
        last[one.rank] = max(last[one.rank], one.step)
    front, first = max(last.values()), min(one.step for one in mine)
    present = [rank for rank in last if (rank, world) in ranks]
    if behind := [rank for rank in present if last[rank] < front - BEHIND_MAX]:
        report.unjudged.append(
            f"epoch {deliveries[0].epoch}, where the run ended: the record of rank {ranges(behind)} ends "
            f"{front - min(last[rank] for rank in behind)} steps before the others'. It was stopped earlier, or its file was cut"
        )
    return [(step, rank) for step, rank in missing if rank in present and step > last[rank] and step >= first]


def _report_missing(
    number: int, missing: list[tuple[int, int]], tail: range, header: Header, ranks: set[tuple[int, int]], report: AuditReport
) -> None:
    """One finding per rank, with the first samples by name."""
    schedule = schedule_of(header)
    for rank in sorted({rank for _, rank in missing} | set(range(header.world_size if tail else 0))):
        steps = [step for step, its in missing if its == rank]
        if rank >= header.world_size:
            where = f"rank {rank}, of another world size, epoch {number}"
            report.found("missing", f"{where}: steps {ranges(steps)} are not recorded")
            continue
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


# ------------------------------------------------------------ passes


def judge_pass(
    epoch: EpochReport, deliveries: list[Delivery], ended: set[int], ranks: set[int], *, is_last: bool, report: AuditReport
) -> None:
    """Judges one pass.

    Args:
        deliveries: those that count, of all ranks.
        ended: ranks whose record says that the pass came to its end.
        ranks: ranks of which there is any file.
    """
    header = deliveries[0].part.header
    worlds = {one.part.header.world_size for one in deliveries}
    if len(worlds) > 1:
        epoch.state = "consistent"
        which = f"pass {epoch.epoch} has ranks of worlds of {' and '.join(map(str, sorted(worlds)))}"
        report.unjudged.append(f"{which}: no order says whose is what")
        return
    num_found = report.num_found.total()
    by_rank = {rank: [one for one in deliveries if one.rank == rank] for rank in range(header.world_size)}
    unfinished = {}  # rank -> its last step
    for rank, mine in by_rank.items():
        place = f"rank {rank}, pass {epoch.epoch}"
        if not mine and rank not in ranks:
            report.found("missing", f"{place}: nothing is recorded; is its file missing?")
            continue
        steps = {one.step for one in mine}
        last = max(steps, default=-1)
        if gaps := [step for step in range(last) if step not in steps]:
            report.found("missing", f"{place}: steps {ranges(gaps)} are not recorded")
        _doubled(mine, f"{place}: step {{step}} was", report)
        if rank not in ended:
            unfinished[rank] = last
    if unfinished and is_last and not ended:
        epoch.state = "unfinished"
        lasts = ", ".join(f"{last} of rank {rank}" for rank, last in unfinished.items())
        epoch.remaining = f"what comes behind step {lasts}"
    elif unfinished:
        for rank, last in unfinished.items():
            what = f"nothing behind step {last}, where it was left or its record ends"
            report.found("missing", f"rank {rank}, pass {epoch.epoch}: {what}")
    elif report.num_found.total() == num_found:
        _judge_coverage(epoch, header, by_rank, report)


def _judge_coverage(epoch: EpochReport, header: Header, by_rank: dict[int, list[Delivery]], report: AuditReport) -> None:
    n, drop, world = header.n, header.batch_size or 1 if header.uneven == "drop" else 0, header.world_size
    keys = {rank: [ordered_keys(one.batch) for one in mine] for rank, mine in by_rank.items()}
    is_numeric = all(is_numeric_keys(each) for mine in keys.values() for each in mine)
    if header.order not in (None, DISTRIBUTED) or n is None or not is_numeric:
        epoch.state = "consistent"
    elif header.order is None:
        for rank, mine in keys.items():
            _compare(f"rank {rank}, pass {epoch.epoch}", mine, n, 0, drop, report)
    else:
        together = [each for mine in keys.values() for each in mine]
        left_out = drop and world * drop + n % world
        _compare(f"pass {epoch.epoch}, all ranks together", together, n, -n % world, left_out, report)


def _compare(where: str, batches: list[Any], n: int, extra_max: int, missing_max: int, report: AuditReport) -> None:
    """Every index of [0, n) once, but for so many repeated, and missing, as the sampler's rule allows."""
    keys = np.concatenate([np.zeros(0, np.int64), *(np.asarray(each, np.int64) for each in batches)])
    unknown = keys[(keys < 0) | (keys >= n)]
    if len(unknown):
        report.found("swapped", f"{where}: indices {ranges(sorted(set(unknown.tolist())))} are outside of [0, {n})")
    counts = np.bincount(keys[(keys >= 0) & (keys < n)], minlength=n)
    doubled, missing = np.flatnonzero(counts > 1), np.flatnonzero(counts == 0)
    if int((counts[doubled] - 1).sum()) > extra_max:
        report.found("doubled", f"{where}: samples {ranges(doubled.tolist())} came more than once")
    if len(missing) > missing_max:
        report.found("missing", f"{where}: samples {ranges(missing.tolist())} never came")


# ------------------------------------------------------------ streams


class Judged(NamedTuple):
    """An epoch whose positions are judged."""

    keys: Keys  # of all that counts
    members: Any  # what they are made of
    is_whole: bool  # no position up to the last is left out


def judge_stream(
    epoch: EpochReport, deliveries: list[Delivery], parts: Sequence[AuditPart], *, is_last: bool, report: AuditReport
) -> Judged:
    """Judges the positions of one epoch; a pipeline that repeats has one.

    Args:
        deliveries: those that count, of all ranks.
        parts: all files there are.
    """
    newest = _newest(deliveries)
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
    keys = np.concatenate([np.empty(0, np.int64), *(keys for _, keys in rows)])
    return Judged(keys, (header.stream or {})["members"], not gaps and header.uneven != "drop")


def judge_items(epochs: Sequence[Judged], report: AuditReport) -> None:
    """Each item once in each epoch of its member, but for what is still to come of the last."""
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


def _once(positions: Sequence[Keys], deliveries: Sequence[Delivery], report: AuditReport) -> Keys:
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
            "doubled", f"{deliveries[which].where}: positions {ranges(every[its].tolist())} were delivered before: {before.where}"
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


def _rows(one: Delivery, report: AuditReport) -> tuple[Keys, Keys]:
    """(positions, keys) of what counts: no padding, and nothing that came again after a resume."""
    header = one.part.header
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


def _remaining(gaps: list[int], first: int, deliveries: list[Delivery], newest: Delivery, ranks: set[tuple[int, int]]) -> set[int]:
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
