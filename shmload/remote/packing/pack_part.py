"""PackPart: one machine's share of a packing, and which shards belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shmload.remote.packing.shard_record import ShardRecord

MOST_PARTS, MOST_SHARDS = 999, 1_000_000  # of a packing, and of one part; numbers have at most nine digits


@dataclass(frozen=True)
class PackPart:
    """One machine's share of a packing: part `number` of `count`, counted from 1."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def first_number(self) -> int:
        """Return the number of its first shard. Numbers of other parts are lower, or higher by at least `MOST_SHARDS`."""
        return (self.number - 1) * MOST_SHARDS

    def span(self, total: int) -> tuple[int, int]:
        """Return the positions in an order of `total` samples at which this part and the next one begin."""
        return total * (self.number - 1) // self.count, total * self.number // self.count

    def has(self, record: ShardRecord) -> bool:
        """Return whether a shard belongs to this part."""
        return self.count == 1 or self.first_number <= record.number < self.first_number + MOST_SHARDS

    def whole(self, records: Sequence[ShardRecord], total: int | None) -> list[ShardRecord]:
        """Return the shards of this part from its beginning up to the first gap.

        Args:
            records: complete shards, sorted by position.
            total: number of samples of all parts; None if unknown.
        """
        found: list[ShardRecord] = []
        at, stop = (0, None) if total is None else self.span(total)
        for record in filter(self.has, records):
            is_next = (record.first, record.number) == (at, self.first_number + len(found))
            if not is_next or (stop is not None and record.stop > stop):
                break
            found.append(record)
            at = record.stop
        return found


def all_parts(records: Sequence[ShardRecord], count: int, total: int) -> tuple[list[ShardRecord], list[PackPart]]:
    """Return the shards of all parts, by their first positions, and the parts that are incomplete.

    Args:
        records: the shards of the generation, by their first positions.
        count: number of parts.
        total: number of samples of all parts.
    """
    kept: list[ShardRecord] = []
    missing = []
    for part in (PackPart(number, count) for number in range(1, count + 1)):
        found = part.whole(records, total)
        first, stop = part.span(total)
        if (found[-1].stop if found else first) != stop:
            missing.append(part)
        kept += found
    return kept, missing
