"""Mix: several datasets as one, read in proportion to weights.

As a dataset it is its members end to end. The proportions are in the order in which a ShmLoader in seed mode reads it
(`schedule/mix.py`).

Weights as whole numbers: what each member of a mixture should have of the first n draws, without rounding.

Weights are numbers as people write them: a float means the decimal it prints as, so 0.1, 0.2 and 0.7 are 1 : 2 : 7. Shares are
whole numbers of 1/total. If one total up to 2^60 makes all shares of all pieces exact, that is it (sizes as weights always are);
else total is 2^60, the units go by largest remainder, and 2^40 draws stray by less than a millionth of one.

Which member stands at each position of a mixture, worked out in blocks from the nearest place whose counters are known.

Draws depend on the draws before (src/mix.h), so a far place is reached by drawing on from a known one, 15 to 75 ns a draw.
Known are the epoch's start, what a state says, the ends of blocks, and wherever every member has exactly its share.

The order of a mixture: draws of members, and what sample each draw stands for.

    position       0   1   2   3   4   5   6  ...        who is drawn: mix.py, from the weights alone
    member         a   b   a   c   a   b   a
    its draw       0   0   1   0   2   1   3             draw k of a member: round k // size, place k % size
    its sample     the round's own permutation of the member's samples, keyed by (seed, epoch, member, round)

An index is that of the members laid end to end. A member that has run out and starts over gives it with the round:
index + round * samples of all. So per-sample randomness, which is keyed by the index, is new when a sample comes again.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from numbers import Rational, Real
from typing import Any, Literal, NamedTuple, Protocol, SupportsIndex, get_args

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from shmload._core.mix import Draws, Rounds
from shmload.errors import StateMismatch
from shmload.schedule.schedule import MAX_N, MIX, EpochCache, KeyedOrder, digest, own_int
from shmload.world import ForkLock, ability_of

MAX_TOTAL = 1 << 60


@dataclass(frozen=True)
class Shares:
    """Piecewise constant shares of members, over positions from 0 on.

    Args:
        total: the unit's denominator.
        starts: first position of each piece, rising from 0.
        pieces: each member's share in each piece, in units of 1/total; each piece adds up to total.
        vanishing: members whose weight is above 0, but by which they have no unit.
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
        """The shares for checked weights, one sequence of them for each piece."""
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
        """Of each member, whether it is ever drawn."""
        return [any(shares) for shares in zip(*self.pieces, strict=True)]

    def cumulative(self, member: int, position: int) -> int:
        """What the member should have of the first `position` draws, in units of 1/total."""
        done = 0
        for start, end, piece in zip(self.starts, (*self.starts[1:], position), self.pieces, strict=True):
            done += piece[member] * max(min(end, position) - start, 0)
        return done

    def reaches(self, member: int, target: int) -> int | None:
        """The first position at which `cumulative` is at least `target`; None: it never is."""
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
        """The last position up to `position` where every member has exactly its share, and the counters there.

        That is every so many draws, if shares are small numbers: 4 for weights of 3 and 1. None: the piece has no such place.
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
    """Returns if they are the weights of so many members.

    Raises:
        ValueError: they are not.
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
    """The number that a weight stands for."""
    if isinstance(weight, Rational):
        return Fraction(int(weight.numerator), int(weight.denominator))  # numpy's would overflow
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


BLOCK = 8192  # draws worked out at a time: 0.15 ms for ten members
MAX_DRAWN = 16  # kept, of 16 KiB each: workers are ordered ahead, a state is asked for behind them
MAX_KNOWN = 1024  # places whose counters are kept


@dataclass(frozen=True)
class Block:
    """Draws of positions from `start` on."""

    start: int
    members: NDArray[np.uint16]
    counters: NDArray[np.int64]  # draws of each member before `start`

    @property
    def stop(self) -> int:
        return self.start + len(self.members)


class Drawn:
    """The draws of one mixture. The same in every epoch: seeds only change which sample a draw of a member stands for.

    Args:
        n: positions of an epoch, at most 2^62.
    Thread/process safety: none; its owner has a lock.
    """

    def __init__(self, shares: Shares, n: int) -> None:
        self._shares, self._n = shares, n
        self._draws = Draws(np.array(shares.starts, np.uint64), np.array(shares.pieces, np.uint64))
        self._counters: dict[int, NDArray[np.int64]] = {0: np.zeros(shares.num_members, np.int64)}
        self._known = [0]  # the positions of these, sorted
        self._blocks: dict[int, Block] = {}  # by number, the least recently made first

    def block_at(self, position: int) -> Block:
        """A block that holds the draw at `position`, which is below n; it ends at a multiple of BLOCK, or at n."""
        number = position // BLOCK
        block = self._blocks.get(number)
        if block is None or position < block.start:
            start, counters = self._nearest(position)
            block, _ = self._make(start, counters, min((number + 1) * BLOCK, self._n))
            self._blocks.pop(number, None)
            self._blocks[number] = block
            if len(self._blocks) > MAX_DRAWN:
                del self._blocks[next(iter(self._blocks))]
        return block

    def counters_at(self, position: int) -> NDArray[np.int64]:
        """Draws of each member before `position`, which is at most n."""
        if position in self._counters:
            return self._counters[position]
        block = self.block_at(position - 1)
        taken = np.bincount(block.members[: position - block.start], minlength=self._shares.num_members)
        return block.counters + taken

    def check_at(self, position: int, counters: Sequence[Any]) -> None:
        """Returns if these may be what `counters_at` gives for that position.

        Raises:
            StateMismatch: they cannot be.
        """
        shares = self._shares
        is_whole = len(counters) == shares.num_members and all(type(count) is int for count in counters)
        if not (is_whole and sum(counters) == position <= self._n) or any(
            abs(count * shares.total - shares.cumulative(member, position)) >= shares.total for member, count in enumerate(counters)
        ):
            raise StateMismatch(
                f"counters must be the draws of {shares.num_members} members before position {position}, each within one of its "
                f"share; got {list(counters)!r:.200}. Load what the loader or pipeline gave as its state"
            )

    def learn(self, position: int, counters: Sequence[int]) -> None:
        """Takes over counters that `check_at` has checked for that position."""
        self._keep(position, np.array(counters, np.int64))

    def _nearest(self, position: int) -> tuple[int, NDArray[np.int64]]:
        """Where the block of `position` begins: at the last known place in it, or at its multiple of BLOCK."""
        aligned, known = position // BLOCK * BLOCK, self._known[bisect_right(self._known, position) - 1]
        if known < aligned and (even := self._shares.even_before(aligned)) is not None and even[0] > known:
            known = even[0]
            self._keep(known, np.array(even[1], np.int64))
        counters = self._counters[known]
        while known < aligned:
            stop = min(known // BLOCK * BLOCK + BLOCK, aligned)
            _, counters = self._make(known, counters, stop)
            known = stop
        return known, counters

    def _make(self, start: int, counters: NDArray[np.int64], stop: int) -> tuple[Block, NDArray[np.int64]]:
        """The draws of [start, stop), and the counters at their end."""
        members, moved = np.empty(stop - start, np.uint16), counters.copy()
        self._draws.run(start, moved, members)
        self._keep(stop, moved)
        return Block(start, members, counters), moved

    def _keep(self, position: int, counters: NDArray[np.int64]) -> None:
        if position not in self._counters:
            insort(self._known, position)
        self._counters[position] = counters
        if len(self._known) > MAX_KNOWN:  # the older half is thinned, again and again: far back places are far apart
            for forgotten in self._known[1 : MAX_KNOWN // 2 : 2]:
                del self._counters[forgotten]
            self._known = sorted(self._counters)


Stop = Literal["first", "all", "repeat"]
MAX_BLOCKS = 8  # of indices kept, 64 KiB each


class _Block(NamedTuple):
    """The indices at positions [start, stop) of an epoch."""

    seed: int
    epoch: int
    start: int
    stop: int
    indices: NDArray[np.int64]


class MixOrder(KeyedOrder):
    """Draws samples of members in proportion to shares: every prefix of an epoch holds of each what it should, within one.

    Args:
        sizes: samples of each member.
        weights: by position from which on they hold, 0 among them; one weight for each member.
        stop: when an epoch ends. "first": before any sample would come twice, with the first member that is used up; "all": when
            every member was seen whole, those that run out beginning again; "repeat": never.
        shuffle: False takes each member's samples in their own order.
    Raises:
        ValueError: sizes and weights do not go together.
    Cost: 36 ns a position for 10 members, 115 for 200, in batches of 64. A place that is far from any known one costs 15 to 75 ns
        for each position between. Held: 8 bytes a member for each of up to 1,024 known places, some blocks of 8,192 positions,
        and a table of up to 128 KiB for each member and each of two epochs.
    Thread/process safety: may be used by any number of threads; a copy or a pickle begins without what was worked out.
    Example:
        >>> order = MixOrder([300, 100], {0: [3, 1]}, stop="first", shuffle=False)
        >>> order.n, order.take(0, 8, seed=7, epoch=0).tolist()
        (400, [0, 1, 300, 2, 3, 4, 301, 5])
    """

    n = 0

    def __init__(self, sizes: Sequence[int], weights: Mapping[int, Sequence[Any]], *, stop: Stop, shuffle: bool) -> None:
        self.sizes, self.stop, self.shuffle = tuple(sizes), stop, shuffle
        self.weights = {start: tuple(weights[start]) for start in sorted(weights)}
        self.shares = Shares.of(list(self.weights.values()), starts=list(self.weights))
        for member, (size, *of_member) in enumerate(zip(self.sizes, *self.weights.values(), strict=True)):
            if size == 0 and any(of_member):
                raise ValueError(f"member {member} of the mixture has a weight, but no samples: leave it out, or give it weight 0")
        self.n = length(self.sizes, self.shares, stop)
        self._offsets = [0, *accumulate(self.sizes)]
        self._num_laps = max((MAX_N - 1) // max(self._offsets[-1], 1), 1)
        self._drawn = Drawn(self.shares, self.n)
        self._rounds: EpochCache[list[Rounds | None]] = EpochCache()
        self._blocks: dict[tuple[int, int, int], _Block] = {}  # the least recently made first
        self._newest = _Block(-1, -1, 0, 0, np.empty(0, np.int64))
        self._lock = ForkLock()

    @property
    def is_endless(self) -> bool:
        return self.stop == "repeat"

    @property
    def identity(self) -> str:
        """Sizes, weights and rules; of many members, a digest of them."""
        weights = {start: [float(weight) for weight in given] for start, given in self.weights.items()}
        made_of = f"sizes={list(self.sizes)}, weights={weights}"
        if len(made_of) > 200:
            made_of = f"members={len(self.sizes)}, digest={digest(np.frombuffer(made_of.encode(), np.uint8))}"
        return f"mix({made_of}, stop={self.stop!r}, shuffle={self.shuffle})"

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        newest = self._newest
        if newest.seed == seed and newest.epoch == epoch and newest.start <= start and stop <= newest.stop:
            return newest.indices[start - newest.start : stop - newest.start].copy()
        out = np.empty(stop - start, np.int64)
        with self._lock:
            position = start
            while position < stop:
                block = self._block(position, seed, epoch)
                end = min(stop, block.stop)
                out[position - start : end - start] = block.indices[position - block.start : end - block.start]
                position = end
        return out

    def counters_at(self, position: int, *, seed: int, epoch: int) -> list[int]:
        """Draws of each member before that position. They are the same for every seed and epoch."""
        with self._lock:
            return [int(count) for count in self._drawn.counters_at(position)]

    def go_on_at(self, position: int, counters: Sequence[int], *, epoch: int) -> None:
        """Takes counters over.

        Raises:
            StateMismatch: they cannot be those of this mixture at that position.
        """
        self._drawn.check_at(position, counters)
        with self._lock:
            self._drawn.learn(position, counters)

    def _block(self, position: int, seed: int, epoch: int) -> _Block:
        """A block of indices that holds the position."""
        key = (position // BLOCK, seed, epoch)
        known = self._blocks.get(key)
        if known is None or position < known.start:
            self._blocks.pop(key, None)
            known = self._blocks[key] = self._make(position, seed, epoch)
            if len(self._blocks) > MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        self._newest = known
        return known

    def _make(self, position: int, seed: int, epoch: int) -> _Block:
        """Draws of one member in a block are consecutive draws of it: they are made together, then put to their places."""
        block = self._drawn.block_at(position)
        rounds = self._rounds.get(seed, epoch, self._new_rounds)
        together = np.empty(len(block.members), np.int64)
        counts = np.bincount(block.members)
        done = 0
        for member in np.flatnonzero(counts).tolist():
            part = together[done : done + int(counts[member])]
            of_member = rounds[member]
            assert of_member is not None
            of_member.fill(
                int(block.counters[member]), part, offset=self._offsets[member], lap=self._offsets[-1], num_laps=self._num_laps
            )
            done += len(part)
        out = np.empty_like(together)
        out[np.argsort(block.members, kind="stable")] = together
        return _Block(seed, epoch, block.start, block.stop, out)

    def _new_rounds(self, seed: int, epoch: int) -> list[Rounds | None]:
        return [
            Rounds(size, shuffle=self.shuffle, seed=seed, epoch=epoch, stream=MIX | member << 32, num_streams=1 << 32)
            if is_drawn
            else None
            for member, (size, is_drawn) in enumerate(zip(self.sizes, self.shares.is_drawn, strict=True))
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(MixOrder, stop=self.stop, shuffle=self.shuffle), (self.sizes, self.weights)


def check_members(members: Sequence[Any], stop: str, mixture: str, kind: str, kinds: str, is_one: Callable[[Any], bool]) -> None:
    """Returns if they are (dataset or pipeline, weight) pairs, and `stop` a rule for the end of an epoch.

    Raises:
        ValueError, TypeError: they are not.
    """
    if stop not in get_args(Stop):
        raise ValueError(f'stop is "first", "all" or "repeat"; got {stop!r}')
    if not members:
        raise ValueError(f"a {mixture} needs at least one ({kind}, weight); got none")
    for number, member in enumerate(members):
        if not (isinstance(member, tuple | list) and len(member) == 2 and is_one(member[0])):
            raise TypeError(f"a {mixture} needs pairs of a {kinds} and its weight; member {number} is {member!r}")
    check_weights([weight for _, weight in members], len(members), f"a {mixture}")


def length(sizes: Sequence[int], shares: Shares, stop: Stop) -> int:
    """Positions of an epoch, in closed form.

    A member's draws x stay within one of what it should have, L, and both ends are where L is on one side of its size: L <= size
    gives x < size + 1, so no sample comes twice; L >= size gives x > size - 1, so none is missing.
    """
    if stop == "repeat":
        return MAX_N
    drawn = [member for member, is_drawn in enumerate(shares.is_drawn) if is_drawn]
    if stop == "first":
        beyond = [shares.reaches(member, sizes[member] * shares.total + 1) for member in drawn]
        return min(min(at for at in beyond if at is not None) - 1, MAX_N)
    ends = [shares.reaches(member, sizes[member] * shares.total) for member in drawn]
    late = [member for member, end in zip(drawn, ends, strict=True) if end is None or end > MAX_N]
    late += shares.vanishing
    if late:
        raise ValueError(
            f'stop="all" waits until every member has been read whole, which member {min(late)} never will with the weights that '
            'hold to the end: give it a larger one there, or use stop="first" or "repeat"'
        )
    return max(end for end in ends if end is not None)


class SizedSamples(Protocol):
    """Samples by number, of which it is known how many there are: a list, shmload's formats, torch's map-style datasets."""

    def __getitem__(self, index: int, /) -> Any: ...
    def __len__(self) -> int: ...


class Mix(ConcatDataset[Any]):
    """Datasets mixed by weights: `ShmLoader(Mix([(web, 0.7), (books, 0.3)]), batch_size=64, shuffle=True, seed=7)`.

    After any number of samples each member has had its share of them within one sample, counted over all ranks. Each member is
    shuffled by itself, anew in each epoch and each time it begins again. A state holds one counter for each member and resumes on
    any world size.

    Args:
        members: (dataset, weight) pairs; map-style datasets. Weights are finite and at least 0, and need not add up to 1; a float
            means the decimal it prints as. The datasets' lengths as weights read each exactly once in an epoch. A member may be
            a Mix: its members take its place, with their shares of its weight.
        stop: when an epoch ends. "first": when the first member's share is used up: nothing is repeated. "all": when every member
            has been read whole; those that run out begin again. "repeat": never; the loader has no len(). A sample that comes
            again in an epoch has the index `index + round * len(mix)`, so that what `sample_rng` draws for it is new.
        curriculum: step of the epoch -> the weights from then on, one for each member.
    Raises:
        ValueError, TypeError: for what cannot be mixed.
    Cost: about 35 ns a draw with 10 members, 115 with 200; a jump to a place whose counters are not known draws what lies between.
    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980.
    Example:
        >>> from shmload import Mix, ShmLoader
        >>> loader = ShmLoader(Mix([(["a"] * 3, 3), (["b"], 1)]), batch_size=4, seed=0)
        >>> next(iter(loader))
        ['a', 'a', 'b', 'a']
    """

    is_concatenation = True  # so that workers find what its members can do

    def __init__(
        self,
        members: Sequence[tuple[SizedSamples, float]],
        *,
        stop: Stop = "first",
        curriculum: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        check_members(members, stop, "Mix", "dataset", "map-style dataset", lambda dataset: hasattr(dataset, "__getitem__"))
        for number, (dataset, _) in enumerate(members):
            if not hasattr(dataset, "__len__"):
                raise TypeError(f"member {number} of the Mix, a {type(dataset).__name__}, has no length: give it __len__")
        pieces = {0: [weight for _, weight in members]}
        for given, weights in (curriculum or {}).items():
            step = own_int(given)
            if not isinstance(step, int) or step < 1:
                raise ValueError(f"a curriculum says from which step on weights hold, 1 or later; got {step!r}")
            check_weights(weights, len(members), f"step {step} of the curriculum")
            pieces[step] = list(weights)
        datasets, self._pieces = _taken_apart([dataset for dataset, _ in members], pieces)
        super().__init__(datasets)
        self.stop = stop
        self._sizes: list[int] = []  # that the orders are made for
        self._orders: dict[tuple[bool, int], MixOrder] = {}
        self.keyed_order(shuffle=False, global_batch=1)  # raises what does not go together

    @property
    def weights(self) -> list[Any]:
        """Each member's weight at an epoch's start, as given; Fractions where a Mix was in the Mix."""
        return list(self._pieces[0])

    def member_of(self, indices: Any) -> Any:
        """Which member samples are of, by its place in `datasets`: as for a loss per member.

        Args:
            indices: one index, or an array of them as `loader.last_indices` gives.
        Returns:
            an int, or an int64 array.
        """
        given = np.asarray(indices)
        members: NDArray[np.int64] = np.searchsorted(self.cumulative_sizes, given % len(self), side="right")
        return members if given.ndim else int(members)

    def place_of(self, index: int) -> tuple[int, int]:
        """Where a sample comes from.

        Args:
            index: from `-len(self)` on; those behind the last go on, as a loader's do where a member begins again.
        Returns:
            (member, index in it).
        Raises:
            IndexError: the index is below `-len(self)`.
        """
        if index < -len(self):
            raise IndexError(f"an index of this Mix is at least {-len(self)}; got {index}")
        index %= len(self)
        member = bisect_right(self.cumulative_sizes, index)
        return member, index - (self.cumulative_sizes[member - 1] if member else 0)

    def __getitem__(self, index: SupportsIndex) -> Any:
        member, place = self.place_of(operator.index(index))
        return self.datasets[member][place]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """Reads several samples, if a member can; None where none does."""
        return self._read_several if any(ability_of(each, "__getitems__") for each in self.datasets) else None

    def _read_several(self, indices: Sequence[int]) -> list[Any]:
        rows_of: dict[int, list[tuple[int, int]]] = {}
        for row, index in enumerate(indices):
            member, place = self.place_of(index)
            rows_of.setdefault(member, []).append((row, place))
        samples: list[Any] = [None] * len(indices)
        for member, rows in rows_of.items():
            dataset, places = self.datasets[member], [place for _, place in rows]
            read = ability_of(dataset, "__getitems__")
            several = read(places) if read else [dataset[place] for place in places]
            if len(several) != len(places):
                raise ValueError(f"__getitems__ of member {member} must return {len(places)} samples, it returned {len(several)}")
            for (row, _), sample in zip(rows, several, strict=True):
                samples[row] = sample
        return samples

    def keyed_order(self, *, shuffle: bool, global_batch: int) -> KeyedOrder:
        """The order in which a loader in seed mode reads it."""
        sizes = [len(dataset) for dataset in self.datasets]  # type: ignore[arg-type]  # they have lengths
        if sizes != self._sizes:  # a member has grown
            self._sizes, self._orders = sizes, {}
            self.cumulative_sizes = self.cumsum(self.datasets)  # type: ignore[no-untyped-call]  # torch's own
        key = (shuffle, global_batch if len(self._pieces) > 1 else 1)
        if key not in self._orders:
            weights = {step * global_batch: weights for step, weights in self._pieces.items()}
            self._orders[key] = MixOrder(sizes, weights, stop=self.stop, shuffle=shuffle)
        return self._orders[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}  # workers need none


def _taken_apart(datasets: list[Any], pieces: dict[int, list[Any]]) -> tuple[list[Any], dict[int, list[Any]]]:
    """The members with those of mixtures among them in their place."""
    if not any(isinstance(dataset, Mix) for dataset in datasets):
        return datasets, pieces
    members: list[Any] = []
    shares: list[tuple[int, Fraction]] = []  # of each member: which it came from, and its part of that one's weight
    for number, dataset in enumerate(datasets):
        if not isinstance(dataset, Mix):
            members.append(dataset)
            shares.append((number, Fraction(1)))
            continue
        if len(dataset._pieces) > 1:
            raise ValueError(f"member {number} is a Mix with a curriculum, which has no steps of its own: give it to the outer Mix")
        total = sum(map(exact_weight, dataset.weights))
        members += dataset.datasets
        shares += [(number, exact_weight(weight) / total) for weight in dataset.weights]
    return members, {step: [exact_weight(weights[number]) * share for number, share in shares] for step, weights in pieces.items()}
