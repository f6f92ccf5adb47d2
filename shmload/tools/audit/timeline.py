"""Put the deliveries of one loader in order, and mark those that a resume rolled back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shmload._core.permutation import MAX_N
from shmload.audit.audit_file import Batch, Event
from shmload.tools.audit.batch_keys import is_numeric_keys
from shmload.tools.audit.deliveries import AuditPart, Delivery, End, Restart


@dataclass
class AuditTimeline:
    """The deliveries of one loader, in order. Making one sorts the parts and reads all their records."""

    parts: list[AuditPart]
    batches: list[Delivery] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    out_of_order: list[tuple[Delivery, int | None]] = field(default_factory=list)
    """Batches out of order, each with the step that it came after, or None if it came before its epoch began."""
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
        num_steps: dict[int, Any] = {}  # by epoch, where they are known
        for record in part.log.records:
            if isinstance(record, Batch):
                has_begun = True
                one = Delivery(part, record.epoch, record.step, batch=record, life=self._lives[part.header.rank])
                if part.header.in_order and one.step < newest.get(one.epoch, one.step + 1):
                    self.out_of_order.append((one, newest.get(one.epoch)))  # a skipped step is missing, or comes later
                newest[one.epoch] = one.step
                self.batches.append(one)
                self._active.setdefault(one.epoch, []).append(one)
                if part.header.in_order and one.step + 1 == num_steps.get(one.epoch):
                    self._ended(End(part, one.epoch, one.step + 1))
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
                newest[epoch], num_steps[epoch] = step, record.details.get("num_steps")
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
