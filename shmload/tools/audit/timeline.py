"""The exactly-once judgment: a loader's deliveries in order (`AuditTimeline`), and what `verify` found in them (`AuditReport`).

Epochs are judged in one of two ways.

*Positions* (seed mode, pipelines): every position of an epoch, or of a stream of items, must have come once over all ranks. A
record's step and rank determine the positions of its rows, so runs on any number of ranks share one scale. In seed mode each
position's sample is known, too, and each delivery is compared with the schedule. In a pipeline the keys name the item at a
position: item + epoch * n, and in a Join that times the number of members plus the member's number. Every item must come once an
epoch. Members of a Join continue where they stopped, so each epoch of a member is complete before its next begins.

*Passes*, whose order comes from a sampler (torch mode, and seed mode with a sampler): there is no formula, so a pass is judged by
its own records: each step once, in order, without gaps. For torch's own samplers that deliver every sample once (sequential,
random without replacement, DistributedSampler over all ranks), the indices are judged, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.permutation import MAX_N
from shmload.audit.audit_file import DISTRIBUTED, AuditLog, Batch, Event, Header, Mode
from shmload.schedule.schedule import Schedule
from shmload.schedule.stream_positions import stream_positions

LISTED_MAX = 100  # findings of one kind that are listed
PROVEN, DEFECTS, UNJUDGED, UNFINISHED = 0, 1, 3, 4  # the status of a report and of the command; 2 means bad usage


@dataclass(frozen=True)
class AuditFinding:
    """One defect. Kinds: damaged, missing, doubled, swapped, replay (a batch delivered again differs), content."""

    kind: str
    text: str


@dataclass
class EpochReport:
    """One epoch of one loader (in torch mode: one pass).

    `state` is "proven" (exactly once), "unfinished" (exactly once so far; `remaining` describes the rest), "consistent" (no error
    was found, but the expected samples are unknown) or "defect".
    """

    epoch: int
    state: str = "proven"
    num_batches: int = 0
    num_samples: int = 0  # rows that are not padding
    num_padding: int = 0
    num_skipped: int = 0
    num_substituted: int = 0
    num_superseded: int = 0  # batches that a resume rolled back
    remaining: str = ""
    num_expected: int | None = None  # samples of the whole epoch over all ranks; None if it is endless, or if that is unknown

    @property
    def so_far(self) -> str:
        """Return the progress of an unfinished epoch as text."""
        whole = "" if self.num_expected is None else f" of {self.num_expected:,}"
        return f"epoch {self.epoch} so far: {self.num_samples:,}{whole} samples, each once"


@dataclass
class AuditedLoader:
    """One loader over all its ranks and starts."""

    title: str
    epochs: list[EpochReport] = field(default_factory=list)
    num_ranks: int = 0
    num_files: int = 0


@dataclass
class AuditReport:
    """The result of an audit: loaders, findings and a verdict."""

    loaders: list[AuditedLoader] = field(default_factory=list)
    findings: list[AuditFinding] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # reasons why exactly-once delivery cannot be judged
    accounted: list[str] = field(default_factory=list)  # samples skipped or substituted, as on_error demands
    notes: list[str] = field(default_factory=list)
    num_found: Counter[str] = field(default_factory=Counter)
    num_reread: int = 0

    def found(self, kind: str, text: str) -> None:
        """Add a finding; beyond LISTED_MAX of a kind it is only counted."""
        self.num_found[kind] += 1
        if self.num_found[kind] <= LISTED_MAX:
            self.findings.append(AuditFinding(kind, text))

    @property
    def status(self) -> int:
        """Return PROVEN, DEFECTS, UNJUDGED or UNFINISHED."""
        if self.num_found:
            return DEFECTS
        if self.unjudged or not self.loaders:
            return UNJUDGED
        return UNFINISHED if self._unfinished else PROVEN

    @property
    def verdict(self) -> str:
        """Return the status as text."""
        if self.status == UNFINISHED:
            return "; ".join(self._unfinished)
        return {PROVEN: "proven: every sample exactly once", DEFECTS: "defects", UNJUDGED: "cannot be judged"}[self.status]

    @property
    def _unfinished(self) -> list[str]:
        titles = {id(loader): f"{loader.title}: " if len(self.loaders) > 1 else "" for loader in self.loaders}
        epochs = [(titles[id(loader)], epoch) for loader in self.loaders for epoch in loader.epochs]
        return [f"{title}{epoch.so_far}" for title, epoch in epochs if epoch.state == "unfinished"]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {"status": self.status, "verdict": self.verdict, **asdict(self), "num_found": dict(self.num_found)}


Keys = NDArray[np.int64]


def ranges(numbers: list[int] | Keys, most: int = 8) -> str:
    """Return ascending numbers (at least one) as readable text: "3-5, 9"."""
    every = np.asarray(numbers)
    last = np.append(np.flatnonzero(np.diff(every) != 1), len(every) - 1)  # the end of each run
    runs = zip(every[np.insert(last[:-1] + 1, 0, 0)[:most]].tolist(), every[last[:most]].tolist(), strict=True)
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return shown if len(last) <= most else f"{shown} and {len(last) - most} more runs"


@dataclass(eq=False)
class AuditPart:
    """One file: the deliveries to one rank in one start."""

    log: AuditLog
    header: Header
    start: int = 0  # number of the start it belongs to


@dataclass(eq=False)
class End:
    """The point where an epoch ended for a rank, and whether that counts."""

    part: AuditPart
    epoch: int
    step: int
    is_superseded: bool = False
    until: int | None = None
    """In a pipeline: rows from this position on came again, after a resume within a group of batches that was fetched together."""

    @property
    def rank(self) -> int:
        """Return the rank that received it."""
        return self.part.header.rank


@dataclass(eq=False)
class Delivery(End):
    """A batch, and whether it counts."""

    batch: Batch = field(kw_only=True)
    life: int = 0
    """How many times its rank had restarted without a state."""

    @property
    def where(self) -> str:
        """Return the place of the batch in the audit file as text."""
        return f"rank {self.rank}, epoch {self.epoch}, step {self.step} ({self.part.log.name}, offset {self.batch.offset})"


class Restart(NamedTuple):
    """A start that loaded no state although there was an earlier one; the counts are what it replaced."""

    part: AuditPart
    num_batches: int
    num_samples: int


@dataclass
class AuditTimeline:
    """The deliveries in one loader's parts, which are sorted first."""

    parts: list[AuditPart]
    batches: list[Delivery] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    out_of_order: list[tuple[Delivery, int | None]] = field(default_factory=list)
    """Batches out of order, each with the step that it came after; None: it came before its epoch began."""
    lost: list[str] = field(default_factory=list)  # reports of batches that ranks could not record

    def __post_init__(self) -> None:
        self._active: dict[int, list[End]] = {}
        self._lives = Counter[int]()  # restarts so far, by rank
        self.parts = parts_in_order(self.parts)
        for part in self.parts:
            self._read(part)

    def _read(self, part: AuditPart) -> None:
        has_begun = has_state = False
        newest: dict[int, int] = {}  # step, by epoch begun: two iterators of one loader may alternate
        for record in part.log.records:
            if isinstance(record, Batch):
                has_begun = True
                one = Delivery(part, record.epoch, record.step, batch=record, life=self._lives[part.header.rank])
                if part.header.in_order and one.step < newest.get(one.epoch, one.step + 1):
                    self.out_of_order.append((one, newest.get(one.epoch)))  # a step left out is missing, or comes later
                newest[one.epoch] = one.step
                self.batches.append(one)
                self._active.setdefault(one.epoch, []).append(one)
                continue
            epoch, step = _place(record)
            if record.kind == "resume" and (record.details.get("by") != "set_epoch" or not has_begun):
                has_state = True
                self._supersede(part, epoch, step, record.details.get("beyond"))
                if step == 0:  # the state shows that the pass before is over for all ranks, whether or not they have seen its end
                    before = [one for one in self._active.get(epoch - 1, ()) if isinstance(one, Delivery)]
                    for its in {one.rank: one.part for one in before}.values():
                        self._ended(End(its, epoch - 1, MAX_N))
            elif record.kind == "pass":
                newest[epoch] = step
                if not (has_begun or has_state) and any(_is_before(one.part, part) for its in self._active.values() for one in its):
                    before = [one for one in self.batches if not one.is_superseded]
                    self._supersede(part, 0, 0)
                    replaced = [one.batch.valid for one in before if one.is_superseded]
                    if replaced:
                        self.restarts.append(Restart(part, len(replaced), sum(replaced)))
                    self._lives[part.header.rank] += 1
                has_begun = True
            elif record.kind == "end":
                self._ended(End(part, epoch, step))
            elif record.kind == "lost":
                self.lost.append(f"{part.log.name}: {record.details.get('batches')} batches could not be recorded")

    def _ended(self, end: End) -> None:
        self.ends.append(end)
        self._active.setdefault(end.epoch, []).append(end)

    def _supersede(self, part: AuditPart, epoch: int, step: int, beyond: Any = None) -> None:
        kept_beyond = {(epoch, each) for each in beyond} if isinstance(beyond, list) and is_numeric_keys(beyond) else ()
        for each in [e for e in self._active if e >= epoch]:
            kept = []
            for one in self._active[each]:
                is_earlier = one.part is part or _is_before(one.part, part)
                if is_earlier and (one.epoch, one.step) >= (epoch, step) and (one.epoch, one.step) not in kept_beyond:
                    one.is_superseded = True
                    continue
                if is_earlier and one.epoch == epoch:
                    one.until = step if one.until is None else min(one.until, step)
                kept.append(one)
            self._active[each] = kept


def _is_before(earlier: AuditPart, part: AuditPart) -> bool:
    if earlier is part:
        return False
    if earlier.header.rank == part.header.rank and earlier.header.world_size == part.header.world_size:
        return True
    ended_ns = max((r.time_ns for r in earlier.log.records if isinstance(r, Batch)), default=earlier.header.started_ns)
    return earlier.start < part.start and ended_ns <= part.header.started_ns


def _place(event: Event) -> tuple[int, int]:
    epoch, step = event.details.get("epoch"), event.details.get("step")
    return (epoch if isinstance(epoch, int) else 0), (step if isinstance(step, int) else 0)


def parts_in_order(parts: Iterable[AuditPart]) -> list[AuditPart]:
    """Return the parts by the time they began, after setting the number of each one's start."""
    ordered = sorted(parts, key=lambda part: (part.header.started_ns, part.log.name))
    start, ranks, world_size = 0, set[int](), 0
    for part in ordered:
        if part.header.world_size != world_size or part.header.rank in ranks:
            start, ranks, world_size = start + 1, set(), part.header.world_size
        ranks.add(part.header.rank)
        part.start = start
    return ordered


def ordered_keys(batch: Batch) -> list[Any] | np.ndarray[Any, Any] | None:
    """Return the keys as they were ordered, before samples were skipped or substituted."""
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
    """Return whether all keys of a batch are integers."""
    return isinstance(keys, np.ndarray) or (keys is not None and all(type(key) in (int, np.int64) for key in keys))


# ------------------------------------------------------------ positions

BEHIND_MAX = 16  # steps by which ranks may differ when a run ends: they step together, but batches handed over ahead count


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


def _newest(deliveries: Sequence[Delivery]) -> Delivery:
    """Return the delivery of the highest step of the newest start."""
    return max(deliveries, key=lambda one: (one.part.start, one.step))


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
                what = f"row {row} has the substitute {new}, which is not number {tries} behind it in the order"
                report.found("swapped", f"{one.where}: {what}")
    for kind, sign, what in (("missing", 1, "never came"), ("doubled", -1, "came once too often")):
        if found := sorted(key for key, more in expected_more.items() if sign * more > 0):
            report.found(kind, f"epoch {deliveries[0].epoch}: samples {ranges(found)} {what}, by what is swapped")


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


class Judged(NamedTuple):
    """An epoch whose positions have been judged."""

    keys: Keys  # of all deliveries that count
    is_whole: bool  # no position up to the last is missing


def judge_positions(
    epoch: EpochReport,
    deliveries: list[Delivery],
    parts: Sequence[AuditPart],
    *,
    is_last: bool,
    has_ended: bool,
    report: AuditReport,
) -> Judged:
    """Judge the positions of one epoch; a repeating pipeline has one epoch.

    Args:
        epoch: the report to fill.
        deliveries: those that count, of all ranks.
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
    had = _once([positions for positions, _ in rows], deliveries, report)
    first = min(_at(one) for one in deliveries if one.part.start == newest.part.start)
    reached = int(had[-1]) + 1 if len(had) else 0
    whole = _whole(header, first, reached, [part.header for part in parts if part.start > newest.part.start])
    front = reached if whole is None or is_open else whole
    near = min(front, reached + (first - reached) % _stride(header))  # the end of the step that was reached
    gaps = _gaps(had, near)
    remaining = _remaining(gaps, first, deliveries, newest, parts, report) if is_open else gaps[:0]
    _report_missing(deliveries, np.setdiff1d(gaps, remaining, assume_unique=True), range(near, front), parts, report)
    if is_open and (len(remaining) or whole is None or front < whole):
        epoch.state = "unfinished"
        epoch.remaining = f"positions after {np.append(remaining, front)[0] - 1}"
    if header.mode == Mode.SEED and header.order is not None:
        epoch.state = "consistent"
    keys = np.concatenate([np.empty(0, np.int64), *(keys for _, keys in rows)])
    return Judged(keys, not len(gaps) and header.uneven != "drop")


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


# ------------------------------------------------------------ passes


def judge_pass(
    epoch: EpochReport, deliveries: list[Delivery], ended: set[int], ranks: set[int], *, is_last: bool, report: AuditReport
) -> None:
    """Judge one pass.

    Args:
        epoch: the report to fill.
        deliveries: those that count, of all ranks.
        ended: ranks that have recorded the end of the pass.
        ranks: ranks with at least one file.
        is_last: whether no record belongs to a later pass.
        report: receives the findings.
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
        for step, num in Counter(one.step for one in mine).items():
            if num > 1:
                where = "; ".join(one.where for one in mine if one.step == step)
                report.found("doubled", f"{place}: step {step} was delivered {num} times: {where}")
        if rank not in ended:
            unfinished[rank] = last
    if header.order is None and epoch.num_samples == epoch.num_expected:
        unfinished = {}  # the trainer left the loop after the last batch, before the end was recorded
    if unfinished and is_last and not ended:
        epoch.state = "unfinished"
        lasts = ", ".join(f"{last} of rank {rank}" for rank, last in unfinished.items())
        epoch.remaining = f"the steps after {lasts}"
    elif unfinished:
        for rank, last in unfinished.items():
            what = f"nothing behind step {last}, where it was left or its record ends"
            report.found("missing", f"rank {rank}, pass {epoch.epoch}: {what}")
    if report.num_found.total() == num_found:
        _judge_coverage(epoch, header, by_rank, report, is_whole=not unfinished)


def _judge_coverage(
    epoch: EpochReport, header: Header, by_rank: dict[int, list[Delivery]], report: AuditReport, *, is_whole: bool
) -> None:
    n, drop, world = header.n, header.batch_size or 1 if header.uneven == "drop" else 0, header.world_size
    keys = {rank: [ordered_keys(one.batch) for one in mine] for rank, mine in by_rank.items()}
    is_numeric = all(is_numeric_keys(each) for mine in keys.values() for each in mine)
    if header.order not in (None, DISTRIBUTED) or n is None or not is_numeric:
        epoch.state = "consistent"
    elif header.order is None:
        for rank, mine in keys.items():
            _compare(f"rank {rank}, pass {epoch.epoch}", mine, n, 0, drop if is_whole else n, report)
    else:
        together = [each for mine in keys.values() for each in mine]
        left_out = (drop and world * drop + n % world) if is_whole else n
        _compare(f"pass {epoch.epoch}, all ranks together", together, n, -n % world, left_out, report)


def _compare(where: str, batches: list[Any], n: int, extra_max: int, missing_max: int, report: AuditReport) -> None:
    """Check that every index of [0, n) came once, apart from the repetitions and gaps that the sampler's rule allows."""
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


# ------------------------------------------------------------ items of pipelines, and the arithmetic of positions


def judge_items(epochs: Sequence[Judged], members: Any, report: AuditReport) -> None:
    """Check that each item came once in each epoch of its member, except those of the last epoch that are still to come."""
    is_whole = all(epoch.is_whole for epoch in epochs)
    for path, n, keys in _by_member(np.concatenate([epoch.keys for epoch in epochs]), members):
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
    """Return all positions, sorted and without duplicates, and report what was delivered twice."""
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


def _gaps(had: Keys, front: int) -> Keys:
    """Return the positions below `front` that a sorted array lacks."""
    lengths = np.diff(np.concatenate([[-1], had[had < front], [front]])) - 1
    return np.arange(lengths.sum()) + np.repeat(np.arange(len(lengths)), lengths)  # number of positions present before each gap


def _by_member(keys: Keys, members: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], int, Keys]]:
    """Yield for each member at every depth: its number in each Join, its number of items, and its own keys."""
    if isinstance(members, int):
        yield path, members, keys
        return
    for number, member in enumerate(members):
        yield from _by_member(keys[keys % len(members) == number] // len(members), member, (*path, number))


def _rows(one: Delivery, report: AuditReport) -> tuple[Keys, Keys]:
    """Return the (positions, keys) that count: without what came again after a resume, and in pipelines without padding."""
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


def _whole(header: Header, first: int, reached: int, later: Sequence[Header]) -> int | None:
    """Return the end of an epoch that is read from position `first` on; None if it is endless.

    Args:
        first: where the newest start begins.
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
    return first + (end - first) // _stride(header) * _stride(header)


def _remaining(
    gaps: Keys, first: int, deliveries: list[Delivery], newest: Delivery, parts: Sequence[AuditPart], report: AuditReport
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
    steps = np.unique(gaps[gaps >= first] - (gaps[gaps >= first] - first) % stride)
    found = [
        _positions(step, header, rank=rank)
        for step in steps[steps > min(last.values())].tolist()
        for rank, its_last in last.items()
        if step > its_last
    ]
    return np.intersect1d(np.concatenate([gaps[:0], *found]), gaps)
