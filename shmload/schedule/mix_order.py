"""The order of a mixture: whose each draw is (`src/mix.pyx`), and which of the member's samples that means.

    position ──▶ member, and its k-th draw ──▶ round k // size, place k % size ──▶ the member's own permutation of that round

Whose a draw is depends on the position alone; which sample, on (seed, epoch, member, round) too. Draws have no closed form, so they
are worked out in runs of positions, each from the counters at its start; a jump ahead works out what lies between.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from shmload._core.mix import Apportionment
from shmload.errors import StateMismatch
from shmload.schedule.checks import digest
from shmload.schedule.keyed import KeyedOrder
from shmload.schedule.permutation import MAX_N, Permutation
from shmload.schedule.streams import MIX

__all__ = ["MixOrder", "Stop", "check_stop", "check_weights"]

Stop = Literal["first", "all", "repeat"]
RUN = 8192  # positions worked out at a time
RUNS_KEPT = 8
_FINEST = 1 << 52  # shares are whole numbers of this part, where the weights are no small whole numbers themselves


class _Run(NamedTuple):
    """Draws of consecutive positions: the first position, the counters before it, and whose each draw is."""

    start: int
    counters: NDArray[np.int64]
    members: NDArray[np.uint16]


class MixOrder(KeyedOrder):
    """The order of a mixture of members, as indices into them end to end.

    Args:
        sizes: samples of each member.
        weights: by position from which on they hold, 0 among them; one weight for each member.
        stop: when an epoch ends. "first": when the first member's share is used up, so nothing is repeated; "all": when every
            member has been read whole, those that run out beginning again; "repeat": never.
        shuffle: False reads each member in its own order.
    Raises:
        ValueError: sizes and weights do not go together.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Mapping[int, Sequence[float]], *, stop: Stop, shuffle: bool
    ) -> None:
        self._sizes = [int(size) for size in sizes]
        self._offsets = np.concatenate([[0], np.cumsum(self._sizes)]).astype(np.int64)
        self._weights = dict(sorted(weights.items()))
        self._shuffle = shuffle
        self._stop = stop
        shares = _whole_shares(list(self._weights.values()))
        self._draws = Apportionment(np.array(list(self._weights), np.int64), shares, int(shares[0].sum()))
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._mapped: OrderedDict[tuple[int, int, int], NDArray[np.int64]] = OrderedDict()
        self._newest: tuple[Any, int, NDArray[np.int64]] = (None, 0, np.empty(0, np.int64))
        self._known = {0: np.zeros(len(self._sizes), np.int64)}  # counters by position
        self._n = self._length(shares)

    def _length(self, shares: NDArray[np.int64]) -> int:
        whole = self._draws.denominator
        members = [m for m in range(len(self._sizes)) if shares[:, m].any()]
        for member in members:
            if self._sizes[member] == 0:
                raise ValueError(
                    f"member {member} of the mixture has a weight, but no samples: leave it out, or give it weight 0"
                )
        if self._stop == "repeat":
            return MAX_N
        if self._stop == "first":  # as long as no share is larger than its member
            ends = [self._draws.first_at(m, self._sizes[m] * whole + 1) for m in members]
            return min([MAX_N, *(end - 1 for end in ends if end is not None)])
        ends = [self._draws.first_at(m, self._sizes[m] * whole) for m in members]
        if any(end is None or end > MAX_N for end in ends):
            never = next(m for m, end in zip(members, ends, strict=True) if end is None or end > MAX_N)
            raise ValueError(
                f'stop="all" waits until every member has been read whole, which member {never} never will with the weights that '
                'hold to the end: give it a larger one there, or use stop="first" or "repeat"'
            )
        return max(end for end in ends if end is not None)

    @property
    def n(self) -> int:
        """Positions of an epoch."""
        return self._n

    @property
    def is_endless(self) -> bool:
        """Whether an epoch has no end."""
        return self._stop == "repeat"

    @property
    def identity(self) -> str:
        """Sizes, weights and rules; of many members, a digest of them."""
        weights = {start: [float(weight) for weight in given] for start, given in self._weights.items()}
        made_of = f"sizes={self._sizes}, weights={weights}"
        if len(made_of) > 200:
            made_of = f"members={len(self._sizes)}, digest={digest(np.frombuffer(made_of.encode(), np.uint8))}"
        return f"mix({made_of}, stop={self._stop!r}, shuffle={self._shuffle})"

    # ------------------------------------------------------------ draws

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """The indices at positions [start, stop), as a new array."""
        key, first, indices = self._newest
        if key == (seed, epoch) and first <= start and stop <= first + len(indices):
            return indices[start - first : stop - first].copy()
        parts = []
        while start < stop:
            run = self._run(start)
            indices = self._indices(run, seed, epoch)
            self._newest = ((seed, epoch), run.start, indices)
            end = min(stop, run.start + len(run.members))
            parts.append(indices[start - run.start : end - run.start])
            start = end
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def counters_at(self, position: int, *, seed: int, epoch: int) -> list[int]:
        """How often each member has been drawn before that position."""
        counters: list[int] = self._counters(position).tolist()
        return counters

    def go_on_at(self, position: int, counters: Sequence[int], *, epoch: int) -> None:
        """Takes the counters of a state.

        Raises:
            StateMismatch: they are not those of this mixture at that position.
        """
        given = np.array(counters, np.int64)
        try:
            self._draws.draw(position, given.copy(), np.empty(1, np.uint16))
        except ValueError as error:
            raise StateMismatch(f"the state's counters are not of this mixture: {error}") from error
        self._known[position] = given

    def _counters(self, position: int) -> NDArray[np.int64]:
        for run in reversed(self._runs.values()):
            if run.start <= position <= run.start + len(run.members):
                drawn = run.members[: position - run.start]
                return run.counters + np.bincount(drawn, minlength=len(self._sizes))
        start = max(known for known in self._known if known <= position)
        counters = self._known[start].copy()
        skipped = np.empty(RUN, np.uint16)
        while start < position:  # a jump: what lies between has to be drawn
            count = min(RUN, position - start)
            self._draws.draw(start, counters, skipped[:count])
            start += count
        return counters

    def _run(self, position: int) -> _Run:
        for run in reversed(self._runs.values()):
            if run.start <= position < run.start + len(run.members):
                return run
        counters = self._counters(position)
        members = np.empty(min(RUN - position % RUN, self._n - position), np.uint16)
        run = _Run(position, counters.copy(), members)
        self._draws.draw(position, counters, members)
        self._runs[position] = run
        self._known[position] = run.counters
        if len(self._runs) > RUNS_KEPT:
            _, oldest = self._runs.popitem(last=False)
            if oldest.start:
                del self._known[oldest.start]
        return run

    def _indices(self, run: _Run, seed: int, epoch: int) -> NDArray[np.int64]:
        """Which samples a run's draws are. Kept, since batches are cut from it one by one."""
        key = (run.start, seed, epoch)
        indices = self._mapped.get(key)
        if indices is None:
            indices = self._mapped[key] = self._map(run, seed, epoch)
            if len(self._mapped) > RUNS_KEPT:
                self._mapped.popitem(last=False)
        return indices

    def _map(self, run: _Run, seed: int, epoch: int) -> NDArray[np.int64]:
        by_member = np.argsort(run.members, kind="stable")
        drawn = np.bincount(run.members, minlength=len(self._sizes))
        values = np.empty(len(run.members), np.int64)
        at = 0
        for member in np.flatnonzero(drawn).tolist():
            count, size = int(drawn[member]), self._sizes[member]
            out = values[at : at + count]
            self._fill(member, size, int(run.counters[member]), out, seed, epoch)
            out += self._offsets[member]
            at += count
        indices = np.empty_like(values)
        indices[by_member] = values
        return indices

    def _fill(self, member: int, size: int, drawn: int, out: NDArray[np.int64], seed: int, epoch: int) -> None:
        """The member's samples from its `drawn`-th draw on, round after round."""
        done = 0
        while done < len(out):
            number, place = divmod(drawn + done, size)
            count = min(len(out) - done, size - place)
            if self._shuffle:
                _permutation(size, seed, epoch, MIX | member << 32 | number % (1 << 32)).fill(
                    place, out[done : done + count]
                )
            else:
                out[done : done + count] = np.arange(place, place + count)
            done += count


@lru_cache(maxsize=256)
def _permutation(n: int, seed: int, epoch: int, stream: int) -> Permutation:
    return Permutation(n, seed=seed, epoch=epoch, stream=stream)


def check_weights(weights: Sequence[float], num_members: int, where: str) -> None:
    """Returns if they are the weights of so many members.

    Raises:
        ValueError: they are not.
    """
    if len(weights) != num_members:
        raise ValueError(f"{where} needs {num_members} weights, one for each member; got {len(weights)}")
    for weight in weights:
        if not (isinstance(weight, int | float | np.number) and np.isfinite(weight) and weight >= 0):
            raise ValueError(f"{where} needs finite weights of 0 or more; got {weight!r}")
    if not any(weights):
        raise ValueError(f"{where} needs a weight above 0; all {num_members} are 0")


def check_stop(stop: str) -> None:
    """Returns if it is a rule for the end of an epoch.

    Raises:
        ValueError: it is not.
    """
    if stop not in get_args(Stop):
        raise ValueError(f'stop is "first", "all" or "repeat"; got {stop!r}')


def _whole_shares(pieces: list[Sequence[float]]) -> NDArray[np.int64]:
    """Whole numbers in proportion to the weights, of one sum for all pieces: exact ones, unless the sum would be too large.

    A float stands for the decimal number that it is written as: 0.6, 0.3 and 0.1 are 6, 3 and 1.
    """
    exact = [
        [Fraction(int(weight) if isinstance(weight, int | np.integer) else repr(float(weight))) for weight in piece]
        for piece in pieces
    ]
    whole = []
    for piece in exact:
        unit = Fraction(math.gcd(*(w.numerator for w in piece)), math.lcm(*(w.denominator for w in piece)))
        whole.append([int(weight / unit) for weight in piece])
    total = math.lcm(*(sum(piece) for piece in whole))
    if total <= _FINEST:
        return np.array([[weight * (total // sum(piece)) for weight in piece] for piece in whole], np.int64)
    return np.array([_apportioned(piece) for piece in exact], np.int64)


def _apportioned(weights: list[Fraction]) -> list[int]:
    """Parts of _FINEST by largest remainder; a weight above 0 gets at least one."""
    total = sum(weights)
    exact = [weight * _FINEST / total for weight in weights]
    parts = [max(int(part), weight > 0) for part, weight in zip(exact, weights, strict=True)]
    missing = _FINEST - sum(parts)
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: max(missing, 0)]:
        parts[i] += 1
    if missing < 0:  # the smallest were rounded up: the largest can spare it
        parts[max(range(len(parts)), key=parts.__getitem__)] += missing
    return parts
