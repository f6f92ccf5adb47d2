"""`Shares`: the exact share of each member of a mixture in its first n draws.

Weights are numbers as people write them: a float means the decimal it prints as, so 0.1, 0.2 and 0.7 are 1 : 2 : 7. Shares are
whole multiples of 1/total. If a total of at most 2^60 makes all shares exact, that total is used (dataset sizes as weights are
always exact). Otherwise the total is 2^60 and the units are assigned by largest remainder; then 2^40 draws deviate by less than a
millionth of a draw.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from numbers import Rational, Real
from typing import Any

MAX_TOTAL = 1 << 60


@dataclass(frozen=True)
class Shares:
    """Shares of members that are constant on each piece of the positions.

    Args:
        total: shares are counted in units of 1/total.
        starts: first position of each piece, ascending from 0.
        pieces: share of each member in each piece, in units of 1/total; each piece adds up to total.
        vanishing: members whose weight is positive but rounds to 0 units.
    Example:
        >>> shares = Shares.of([[0.1, 0.3], [1, 0]], starts=[0, 8])
        >>> shares.total, shares.pieces, shares.cumulative(1, 100)
        (4, ((1, 3), (4, 0)), 24)
    """

    total: int
    starts: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]
    vanishing: tuple[int, ...] = ()

    @classmethod
    def of(cls, weights: Sequence[Sequence[Any]], *, starts: Sequence[int] = (0,)) -> Shares:
        """Compute shares from weights that `check_weights` has accepted.

        Args:
            weights: the weights of all members, for each piece.
            starts: first position of each piece, ascending from 0.
        """
        exact = [_shares(piece) for piece in weights]
        total = math.lcm(*(share.denominator for piece in exact for share in piece))
        if total <= MAX_TOTAL:
            pieces = [tuple(int(share * total) for share in piece) for piece in exact]
        else:
            total = MAX_TOTAL
            pieces = [_by_largest_remainder(piece, total) for piece in exact]
        members = zip(zip(*exact, strict=True), zip(*pieces, strict=True), strict=True)
        vanishing = tuple(member for member, (wanted, got) in enumerate(members) if any(wanted) and not any(got))
        return cls(total, tuple(starts), tuple(pieces), vanishing)

    @property
    def num_members(self) -> int:
        return len(self.pieces[0])

    @property
    def is_drawn(self) -> list[bool]:
        """Return for each member whether it is ever drawn."""
        return [any(shares) for shares in zip(*self.pieces, strict=True)]

    def cumulative(self, member: int, position: int) -> int:
        """Return the member's exact share of the first `position` draws, in units of 1/total."""
        done = 0
        for start, end, piece in zip(self.starts, (*self.starts[1:], position), self.pieces, strict=True):
            done += piece[member] * max(min(end, position) - start, 0)
        return done

    def reaches(self, member: int, target: int) -> int | None:
        """Return the first position at which `cumulative` is at least `target`, or None if it never is."""
        done = 0
        for (start, end), piece in zip(pairwise((*self.starts, None)), self.pieces, strict=True):
            share = piece[member]
            assert start is not None
            if share and (end is None or done + share * (end - start) >= target):
                return start - -(target - done) // share
            if end is not None:
                done += share * (end - start)
        return None

    def even_before(self, position: int) -> tuple[int, list[int]] | None:
        """Return the last position up to `position` where every member has exactly its share, and the counters there.

        For small shares this happens periodically: every 4 draws for weights of 3 and 1. Return None if the piece has no such
        position.
        """
        piece = bisect_right(self.starts, position) - 1
        start, shares = self.starts[piece], self.pieces[piece]
        before = [self.cumulative(member, start) for member in range(self.num_members)]
        if any(done % self.total for done in before):
            return None
        period = self.total // math.gcd(self.total, *shares)
        even = position - (position - start) % period
        return even, [(done + share * (even - start)) // self.total for done, share in zip(before, shares, strict=True)]


def check_weights(weights: Sequence[Any], num_members: int, where: str) -> None:
    """Check the weights of `num_members` members.

    Raises:
        ValueError: their number or a value is wrong.
    """
    if len(weights) != num_members:
        raise ValueError(f"{where} needs {num_members} weights, one for each member; got {len(weights)}")
    for weight in weights:
        is_number = isinstance(weight, Rational) or (isinstance(weight, Real) and math.isfinite(weight))
        if not is_number or weight < 0:
            raise ValueError(f"{where} needs finite weights of 0 or more; got {weight!r}")
    if not any(weights):
        raise ValueError(f"{where} needs a weight above 0; all {num_members} are 0")


def exact_weight(weight: Any) -> Fraction:
    """Return the exact value of a weight; a float is the decimal that it prints as."""
    if isinstance(weight, Rational):
        return Fraction(int(weight.numerator), int(weight.denominator))  # numpy integers would overflow
    return Fraction(str(weight))


def _shares(weights: Sequence[Any]) -> list[Fraction]:
    exact = [exact_weight(weight) for weight in weights]
    whole = sum(exact)
    return [weight / whole for weight in exact]


def _by_largest_remainder(shares: Sequence[Fraction], total: int) -> tuple[int, ...]:
    units = [math.floor(share * total) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda member: (units[member] - shares[member] * total, member))
    for member in by_remainder[: total - sum(units)]:
        units[member] += 1
    return tuple(units)
