"""What the files of one loader say in order (`AuditTimeline`), and what `verify` found in them (`AuditReport`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from shmload.audit.file import AuditLog, Batch, Event, Header

LISTED_MAX = 100  # findings of one kind that are listed


@dataclass(frozen=True)
class AuditFinding:
    """One defect. Kinds: damaged, missing, doubled, swapped, replay (a batch delivered again is another), content."""

    kind: str
    text: str


@dataclass
class EpochReport:
    """One epoch of one loader (in torch mode: one pass).

    `state` is "proven" (exactly once), "unfinished" (so far exactly once; `remaining` is what is left), "consistent" (nothing wrong
    was found, and nothing says which samples it should hold) or "defect".
    """

    epoch: int
    state: str = "proven"
    num_batches: int = 0
    num_samples: int = 0  # rows that are no padding
    num_padding: int = 0
    num_skipped: int = 0
    num_substituted: int = 0
    num_superseded: int = 0  # batches that a resume rolled back
    remaining: str = ""


@dataclass
class AuditedLoader:
    """One loader over all its ranks and starts."""

    title: str
    epochs: list[EpochReport] = field(default_factory=list)
    num_ranks: int = 0
    num_files: int = 0


@dataclass
class AuditReport:
    """The verdict."""

    loaders: list[AuditedLoader] = field(default_factory=list)
    findings: list[AuditFinding] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # why exactly-once cannot be said
    accounted: list[str] = field(default_factory=list)  # samples skipped or substituted, as on_error says
    notes: list[str] = field(default_factory=list)
    num_found: Counter[str] = field(default_factory=Counter)
    num_reread: int = 0

    def found(self, kind: str, text: str) -> None:
        """Adds a finding; beyond LISTED_MAX of a kind it is only counted."""
        self.num_found[kind] += 1
        if self.num_found[kind] <= LISTED_MAX:
            self.findings.append(AuditFinding(kind, text))

    @property
    def status(self) -> int:
        """0: proven; 1: defects; 2: cannot be judged."""
        if self.num_found:
            return 1
        return 2 if self.unjudged or not self.loaders else 0

    @property
    def verdict(self) -> str:
        """The status in words."""
        return ("proven: every sample exactly once", "defects", "cannot be judged")[self.status]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"status": self.status, "verdict": self.verdict, **asdict(self), "num_found": dict(self.num_found)}


def ranges(numbers: list[int], most: int = 8) -> str:
    """Ascending numbers for people: "3-5, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:most])
    return shown if len(runs) <= most else f"{shown} and {len(runs) - most} more runs"


@dataclass(eq=False)
class AuditPart:
    """One file: what one rank was delivered in one start."""

    log: AuditLog
    header: Header
    start: int = 0  # number of the start it belongs to


@dataclass(eq=False)
class End:
    """Where an epoch came to its end for a rank, and whether that counts."""

    part: AuditPart
    epoch: int
    step: int
    is_superseded: bool = False
    until: int | None = None
    """Of a pipeline: rows from this position on came again after a resume within what had been fetched together."""

    @property
    def rank(self) -> int:
        """Who got it."""
        return self.part.header.rank


@dataclass(eq=False)
class Delivery(End):
    """A batch, and whether it counts."""

    batch: Batch = field(kw_only=True)

    @property
    def where(self) -> str:
        """For people."""
        return f"rank {self.rank}, epoch {self.epoch}, step {self.step} ({self.part.log.name}, offset {self.batch.offset})"


@dataclass
class AuditTimeline:
    """The deliveries of one loader's parts, which are put in order first."""

    parts: list[AuditPart]
    allow_restarts: bool = False
    batches: list[Delivery] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    restarts: list[AuditPart] = field(default_factory=list)  # began without a state although there was something before
    out_of_order: list[tuple[Delivery, int | None]] = field(default_factory=list)
    """Batches in the wrong turn, and behind which step they came; None: before their epoch began."""
    lost: list[str] = field(default_factory=list)  # what ranks could not record, and said so

    def __post_init__(self) -> None:
        self._active: dict[int, list[End]] = {}
        self.parts = parts_in_order(self.parts)
        for part in self.parts:
            self._read(part)

    def _read(self, part: AuditPart) -> None:
        has_begun = has_state = False
        newest: dict[int, int] = {}  # step, by epoch begun: two iterators of one loader may take turns
        for record in part.log.records:
            if isinstance(record, Batch):
                has_begun = True
                one = Delivery(part, record.epoch, record.step, batch=record)
                if part.header.in_order and one.step < newest.get(one.epoch, one.step + 1):
                    self.out_of_order.append((one, newest.get(one.epoch)))  # a step left out is missing, or comes later
                newest[one.epoch] = one.step
                self.batches.append(one)
                self._active.setdefault(one.epoch, []).append(one)
                continue
            epoch, step = _place(record)
            if record.kind == "resume" and (record.details.get("by") != "set_epoch" or not has_begun):
                has_state = True
                self._supersede(part, epoch, step)
            elif record.kind == "pass":
                newest[epoch] = step
                if not (has_begun or has_state) and any(_is_before(one.part, part) for its in self._active.values() for one in its):
                    if self.allow_restarts:
                        self._supersede(part, 0, 0)
                    else:
                        self.restarts.append(part)
                has_begun = True
            elif record.kind == "end":
                end = End(part, epoch, step)
                self.ends.append(end)
                self._active.setdefault(epoch, []).append(end)
            elif record.kind == "lost":
                self.lost.append(f"{part.log.name}: {record.details.get('batches')} batches could not be recorded")

    def _supersede(self, part: AuditPart, epoch: int, step: int) -> None:
        for each in [e for e in self._active if e >= epoch]:
            kept = []
            for one in self._active[each]:
                is_earlier = one.part is part or _is_before(one.part, part)
                if is_earlier and (one.epoch, one.step) >= (epoch, step):
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
    """The parts by the time they began, each with the number of its start."""
    ordered = sorted(parts, key=lambda part: (part.header.started_ns, part.log.name))
    start, ranks, world_size = 0, set[int](), 0
    for part in ordered:
        if part.header.world_size != world_size or part.header.rank in ranks:
            start, ranks, world_size = start + 1, set(), part.header.world_size
        ranks.add(part.header.rank)
        part.start = start
    return ordered
