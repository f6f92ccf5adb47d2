"""Measures mixtures against exact fractions, with independent code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from shmload._core.mix import Draws
from shmload.schedule.shares import Shares


def draws_of(shares: Shares, count: int, *, position: int = 0, counters: Any = None, **options: Any) -> list[int]:
    """Returns the members drawn at `count` positions from `position` on."""
    draws = Draws(np.array(shares.starts, np.uint64), np.array(shares.pieces, np.uint64), **options)
    moved = np.zeros(shares.num_members, np.int64) if counters is None else np.array(counters, np.int64)
    members = np.empty(count, np.uint16)
    draws.run(position, moved, members)
    return members.tolist()


def bound_of(num_members: int) -> Fraction:
    """Returns Tijdeman's bound."""
    return 1 - Fraction(1, 2 * num_members - 2)


class IdealCounts:
    """The ideal number of draws of each member within the first n, in whole multiples of 1/unit, computed from the weights."""

    def __init__(self, pieces: Sequence[Sequence[Any]], starts: Sequence[int] = (0,)) -> None:
        exact = [[Fraction(str(weight)) for weight in piece] for piece in pieces]
        shares = [[weight / sum(piece) for weight in piece] for piece in exact]
        self.unit = math.lcm(*(share.denominator for piece in shares for share in piece))
        self._pieces = [[int(share * self.unit) for share in piece] for piece in shares]
        self._starts = list(starts)
        self.num_members = len(exact[0])

    def of(self, member: int, n: int) -> int:
        if len(self._pieces) == 1:
            return self._pieces[0][member] * n
        done = 0
        for number, start in enumerate(self._starts):
            end = self._starts[number + 1] if number + 1 < len(self._starts) else n
            done += self._pieces[number][member] * max(min(end, n) - start, 0)
        return done

    def worst(self, members: Sequence[int]) -> Fraction:
        """Returns the largest deviation of any member from its ideal number, over all prefixes.

        A member is furthest ahead right after a draw of it, and has its largest deficit right before a draw or at the end, so only these
        are checked.
        """
        counts, worst = [0] * self.num_members, 0
        for n, member in enumerate(members):
            behind = self.of(member, n) - counts[member] * self.unit
            counts[member] += 1
            ahead = counts[member] * self.unit - self.of(member, n + 1)
            worst = max(worst, behind, ahead)
        at_end = [abs(count * self.unit - self.of(member, len(members))) for member, count in enumerate(counts)]
        return Fraction(max(worst, *at_end), self.unit)
