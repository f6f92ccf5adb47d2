"""Which samples a rank reads at a step of an epoch: a pure function with nothing to save.

    position   0 .......... global_batch .......... 2 * global_batch ...... n
    step       |     0      |           1           |       2 (rest)       |
    rank       | 0 | 1 | 2  |  0  |   1   |   2     | 0 | 1 | 2 |

An epoch is one permutation of [0, n). Its positions are cut into global batches, and each of those into one contiguous
slice per rank. So the sequence of global batches depends on batch_size * world_size only: the same samples come in the
same order for 1, 2 or 8 ranks and any number of workers, and a resume on other hardware is a division.

Rejected: strided ranks (DistributedSampler's order), whose global batches change when the number of ranks does; ranks
that shuffle a part of their own, which lose or repeat samples when ranks come and go.

Orders of an epoch's samples that are computed where they are looked at: what the schedule asks of one besides its own shuffle.

An order maps positions to indices, as a pure function of (seed, epoch, position). So it needs no state, is sharded over ranks
like any other, and a resume on other hardware is a division. A mixture cannot be a formula: it has counters, one per member.

Which positions of a stream of items a rank is given at a step.

    batches of 3, 2 ranks    position  0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 ...
                             rank      0 0 0 1 1 1 | 0 0 0 1  1  1 |
    items, 2 ranks           position  0 1 2 3 4 5   6 7 ...          fetched several at a time: here 3 rounds
                             rank      0 1 0 1 0 1 | 0 1 ...

A step goes by its first position, so any number of ranks goes on from any of them, with exactly the rest.

Orders that say themselves which samples each batch of an epoch holds: what seed mode takes as `batch_sampler=`.

The batches of an epoch are one sequence for all ranks, a pure function of (seed, epoch, number): see schedule.py for who
reads which. There may be another number of them in each epoch.

Which batch a rank reads at a step, where an order makes the batches itself.

    sequence   0 | 1 | 2 | 3 | 4 | 5 | 6 | 7      the epoch's batches, of any sizes, the same for all ranks
    step 0       0   1   2                        batch step + rank
    step 3                   3   4   5
    step 6                               6   7

A step goes by the number of batches that all ranks have read before it, which is also the position in a state. So a run on
another number of ranks goes on at any step, with exactly the batches that are left, and needs no division.

A seeded random order of [0, n) that is computed where it is looked at, and the keys of per-sample randomness.

An order of 10^12 samples is not stored: each position is mapped by itself, so seeking costs nothing, memory does not
grow with n, and any process can compute any part. Up to n = 65,536 a shuffled table (128 KiB) is better and faster;
above it a Feistel network with cycle walking does the work, in `src/permutation.h`, which names its sources.

Rejected: `numpy.random.Generator.permutation` (8 n bytes and the whole shuffle before the first batch); a linear
congruence (a * i + b) mod n (fast, but neighbours stay neighbours); sorting by a hash of each index (memory, and ties).

Refusals shared by the schedule's parts: what is wrong, what was needed, what was given, what to do.

Which stream of keys each use of randomness takes, so that no two of one (seed, epoch, n) see the same numbers.

What an order that has no formula works out for a whole epoch, kept for the two epochs in use at a time.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from typing import Any, Generic, Literal, SupportsIndex, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload._core.permutation import MAX_N as MAX_N
from shmload._core.permutation import KeyedPermutation
from shmload._core.permutation import sample_key as sample_key
from shmload._core.permutation import sample_key_pair as sample_key_pair

MAX_UINT64 = (1 << 64) - 1
_WRITTEN = {MAX_N: "2^62", MAX_UINT64: "2^64 - 1"}  # bounds as people write them


def digest(values: NDArray[Any]) -> str:
    """16 hex digits that say which values an order was made of, for its identity."""
    return blake2b(values.tobytes(), digest_size=8).hexdigest()


def whole_number(name: str, value: SupportsIndex, *, at_least: int = 1, at_most: int = MAX_N, remedy: str) -> int:
    """`value` as a Python int within its bounds.

    Raises:
        TypeError: it is no integer (a float or a string is not one, a numpy integer is).
        ValueError: it lies outside [at_least, at_most].
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}; {remedy}") from None
    if not at_least <= number <= at_most:
        raise ValueError(f"{name} must be in [{at_least}, {_WRITTEN.get(at_most, at_most)}], got {number}; {remedy}")
    return number


def own_int(value: Any) -> Any:
    """numpy's integers as Python's, which states and JSON can hold; anything else as it is."""
    return value.item() if isinstance(value, np.integer) else value


# of permutations; 0 is the plain shuffle
MIX = 1 << 61  # and from here on each round of each member of a mixture: member << 32 | round
SAMPLES = 1 << 62  # the samples before they are sorted by length
GROUPS = SAMPLES + 1  # groups of batches
SHORT_GROUP = SAMPLES + 2  # which of them is the short one
BLOCKS = SAMPLES + 3  # a BlockShuffle's blocks
NODES = SAMPLES + 4  # a NodeShuffle's shards, before they are cut into shares
WINDOWS = 1 << 63  # and from here on the samples of each of its windows

# of words, which are numbered apart
DRAWS = 0  # a weighted index per position
RACES = 1  # an exponential variable per index
BATCHES_IN_GROUPS = 2


T = TypeVar("T")


class EpochCache(Generic[T]):
    """The newest two epochs' values: workers are sent the next epoch's orders before the trainer has ended this one.

    Thread/process safety: two threads may both make a value, which is the same; a copy or a pickle begins empty.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], T] = {}

    def get(self, seed: int, epoch: int, make: Callable[[int, int], T]) -> T:
        """The value of an epoch, made where it is not kept."""
        key = (seed, epoch)
        value = self._values.get(key)
        if value is None:
            value = make(seed, epoch)
            self._values = dict([*self._values.items(), (key, value)][-2:])
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochCache, ()


class Permutation:
    """A bijection of [0, n) chosen by (seed, epoch, stream): equal keys give equal orders on every machine.

    Position p holds index `permutation[p]`; `inverse` finds the position of an index. Nothing is computed in advance,
    except for n <= 65,536, where the first look shuffles a table.

    Args:
        n: number of indices, 1 to 2^62.
        seed: 0 to 2^64 - 1; seeds and epochs are mixed by a block cipher, so neighbouring ones are unrelated.
        epoch: 0 to 2^64 - 1.
        stream: separates orders under one (seed, epoch): of two datasets, of the shards and the rows within.
    Raises:
        TypeError, ValueError: an argument is no integer, or outside its bounds.
    Cost: 2 to 4 ns per index for any n above 65,536, 0.2 ns below; GIL released. benchmarks/permutation.py measures it.
    Thread/process safety: immutable; may be used by any number of threads, and pickled.
    Source: Luby and Rackoff 1988; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002; Durstenfeld 1964
        for the table; keys by Philox, Salmon et al. 2011.
    Example:
        >>> order = Permutation(10, seed=7)
        >>> sorted(order.take(0, 10).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> order.inverse([order[3], order[4]]).tolist()
        [3, 4]
    """

    __slots__ = ("_keyed", "epoch", "n", "seed", "stream")

    def __init__(self, n: SupportsIndex, *, seed: SupportsIndex, epoch: SupportsIndex = 0, stream: SupportsIndex = 0) -> None:
        self.n = whole_number("Permutation: n", n, remedy="an empty order has no permutation")
        self.seed = _uint64("seed", seed)
        self.epoch = _uint64("epoch", epoch)
        self.stream = _uint64("stream", stream)
        self._keyed = KeyedPermutation(self.n, seed=self.seed, epoch=self.epoch, stream=self.stream)

    def take(self, positions: Any, stop: int | None = None, /) -> NDArray[np.int64]:
        """The indices at the given positions, or at those of a range.

        Args:
            positions: integers in [0, n), an array of any shape; with `stop` the first of a range.
            stop: the end of that range.
        Returns:
            a new int64 array of the positions' shape.
        Raises:
            IndexError: a position is outside [0, n).
            TypeError: the positions are not integers.
        """
        if stop is not None:
            out = np.empty(max(stop - positions, 0), np.int64)
            self.fill(positions, out)
            return out
        return _each(positions, "positions", self._keyed.take)

    def fill(self, start: int, out: NDArray[np.int64]) -> None:
        """Write the indices at positions [start, start + len(out)) into an array that is there.

        Args:
            start: the first position, 0 or more.
            out: int64, one dimension, contiguous.
        Raises:
            IndexError: the positions reach outside [0, n).
            TypeError: `out` is another kind of array.
        """
        if start < 0:
            raise IndexError(f"Permutation: positions are counted from 0 to n={self.n}, got start={start}")
        try:
            self._keyed.fill(start, out)
        except ValueError as error:
            raise TypeError(f"Permutation.fill: out must be a contiguous int64 array of one dimension: {error}") from error

    def inverse(self, indices: ArrayLike, /) -> NDArray[np.int64]:
        """The positions at which the given indices stand; `inverse(take(positions))` is `positions`.

        Args:
            indices: integers in [0, n), an array of any shape.
        Returns:
            a new int64 array of the indices' shape.
        Raises:
            IndexError: an index is outside [0, n).
            TypeError: the indices are not integers.
        """
        return _each(indices, "indices", self._keyed.inverse)

    def __getitem__(self, position: SupportsIndex) -> int:
        return int(self.take([operator.index(position)])[0])

    def __len__(self) -> int:
        return self.n

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Permutation):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"Permutation({self.n}, seed={self.seed}, epoch={self.epoch}, stream={self.stream})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Permutation, seed=self.seed, epoch=self.epoch, stream=self.stream), (self.n,)

    def _identity(self) -> tuple[int, int, int, int]:
        return self.n, self.seed, self.epoch, self.stream


def _uint64(name: str, value: SupportsIndex) -> int:
    remedy = f"{name} % 2**64 is in range"
    return whole_number(f"Permutation: {name}", value, at_least=0, at_most=MAX_UINT64, remedy=remedy)


def _each(given: ArrayLike, what: str, run: Callable[[NDArray[np.int64], NDArray[np.int64]], None]) -> NDArray[np.int64]:
    """What `run` makes of each integer of an array, in its shape."""
    array = np.asarray(given)
    out = np.empty(array.shape, np.int64)
    if array.size:
        if not np.can_cast(array.dtype, np.int64, "safe"):
            raise TypeError(f"Permutation: {what} must be integers that fit int64, got dtype {array.dtype}")
        run(np.ascontiguousarray(array, np.int64).reshape(-1), out.reshape(-1))
    return out


READ_AHEAD = 8192  # indices that __iter__ computes at a time


class KeyedOrder(ABC):
    """Which index stands at each position of an epoch: the base of orders, for one of your own.

    In seed mode it is given as `sampler=` and sharded over ranks. Anywhere else it is an ordinary sampler: each `iter` draws a
    seed from torch's global generator, as torch's RandomSampler does.

    Attributes:
        num_needed: samples that the dataset has to have, as an index may be one less; a loader refuses a shorter one. None: any.
    """

    num_needed: int | None = None

    @property
    @abstractmethod
    def n(self) -> int:
        """Positions of an epoch, which need not be the dataset's samples."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Which order this is, with what it was made of; a state saved under another is refused."""

    @abstractmethod
    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """The indices at positions [start, stop).

        Args:
            start, stop: `0 <= start <= stop <= n`; not checked.
            seed, epoch: which epoch of which run; 0 to 2^64 - 1.
        Returns:
            a new int64 array, shape `(stop - start,)`.
        """

    @property
    def is_endless(self) -> bool:
        """Whether an epoch has no end: then a loader has no len()."""
        return False

    def counters_at(self, position: int, *, seed: int, epoch: int) -> list[int] | None:
        """What a resume at that position needs besides it; None: nothing.

        Args:
            position: from 0 to n.
            seed, epoch: as of `take`.
        """
        return None

    def go_on_at(self, position: int, counters: Sequence[int], *, epoch: int) -> None:  # noqa: B027  # most have none
        """Tells what `counters_at` gave for that position, so that it need not be worked out anew.

        Args:
            position, counters, epoch: of the state that is resumed.
        """

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"<{self.identity}>"

    def __iter__(self) -> Iterator[int]:
        import torch

        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        for start in range(0, self.n, READ_AHEAD):
            yield from self.take(start, min(start + READ_AHEAD, self.n), seed=seed, epoch=0).tolist()


def stream_positions(
    step: int, rank: int, *, n: int | None, uneven: str, world_size: int, batch_size: int | None, num_rounds: int = 1
) -> NDArray[np.int64]:
    """The positions of a rank's rows; at n and beyond stands padding.

    Args:
        n: where the stream ends; None: nowhere.
        uneven: of the last step: "pad", "drop" or "exact".
        batch_size: of one rank; None: items come singly, `num_rounds` of them together.
    """
    left = MAX_N if n is None else n - step
    if batch_size is None:
        first = world_size * np.arange(num_rounds)
        needed = {"pad": 1, "drop": world_size, "exact": rank + 1}[uneven]
        return step + rank + first[first + needed <= left]
    return np.arange(*_rows_of(step, rank, left, uneven, world_size, batch_size))


def _rows_of(first: int, rank: int, left: int, uneven: str, world_size: int, batch_size: int) -> tuple[int, int]:
    """Positions of a rank's rows, from start to stop, in the step that begins at `first`; so many are left from there on."""
    each, longer = batch_size, 0
    if left < batch_size * world_size:
        if uneven == "drop":
            return first, first
        each, longer = (-(-left // world_size), 0) if uneven == "pad" else divmod(left, world_size)
    start = first + rank * each + min(rank, longer)
    return start, start + each + (rank < longer)


def stream_end(n: int | None, rank: int, *, uneven: str, stride: int) -> int:
    """Steps from here on do not exist for that rank; `stride` is the number of items in one, over all ranks."""
    if n is None:
        return int(MAX_N)
    if uneven == "drop":
        return max(n - stride + 1, 0)
    return max(n - rank, 0) if uneven == "exact" else n


SCHEDULE_VERSION = 1
"""Version of every order made here. A change that alters one index adds a version and keeps the old one repeatable."""

Uneven = Literal["pad", "drop", "exact"]


class AnySchedule:
    """What a loader asks of its schedule besides the batches; the answers of one whose epochs are alike.

    Attributes:
        grows: an epoch's samples are settled only shortly before it begins: nothing is ordered ahead of the next one's end.
    """

    grows = False

    @property
    def stride(self) -> int:
        """From one step to the next."""
        return 1

    @property
    def stream(self) -> dict[str, Any] | None:
        """What positions and keys mean where they number the items of a stream, as a pipeline's do; else None."""
        return None

    def behind(self, step: int) -> int:
        """The step that follows one."""
        return step + self.stride

    def number(self, step: int) -> int:
        """How many steps came before it, for a record of them."""
        return -(-step // self.stride)

    def begins(self, epoch: int) -> None:
        """Says that a pass over an epoch begins; those before it are over."""

    def ended(self) -> None:
        """Says that no pass runs any more."""

    def children(self, epoch: int) -> dict[str, Any] | None:
        """What a state in that epoch says besides its position."""
        return None

    def go_on_from(self, children: Mapping[str, Any], epoch: int) -> None:
        """Takes over what `children` gave, before a resume in that epoch."""


@dataclass(frozen=True)
class Schedule(AnySchedule):
    """Pure map (epoch, step, rank) -> sample indices, with O(1) memory and time to seek.

    What `uneven` says of the rest, the positions after the last whole global batch:

    - "pad": every rank gets ceil(rest / world_size) rows; what is missing is taken from the epoch's start (round and
      round if n is smaller than that). With one rank nothing is missing, and the last batch is short as torch's.
    - "drop": no rank gets any.
    - "exact": contiguous slices whose sizes differ by at most one, the first ranks having the longer ones.

    With "exact" and rest < world_size the last ranks have no rows: their last step does not exist (`num_steps_of`), and its batch
    is empty.

    Args:
        n: number of samples, 0 to 2^62.
        batch_size: samples of one rank's step.
        seed: 0 to 2^64 - 1.
        shuffle: False takes the samples in their own order.
        drop_last: the same as uneven="drop".
        world_size: number of ranks.
        order: what to take the samples in instead, with its own n and shuffle=False.
        version: version of the order, for repeating an old run.
    Raises:
        TypeError, ValueError: an argument is of another type, or outside its bounds.
    Example:
        >>> schedule = Schedule(10, batch_size=2, seed=0, shuffle=False, world_size=2)
        >>> [schedule.batch(0, step, rank=1).tolist() for step in range(schedule.num_steps)]
        [[2, 3], [6, 7], [9]]
    """

    n: int
    _: KW_ONLY
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool = False
    uneven: Uneven = "pad"
    world_size: int = 1
    order: KeyedOrder | None = None
    version: int = SCHEDULE_VERSION

    def __post_init__(self) -> None:
        def check(name: str, at_least: int, at_most: int, remedy: str) -> None:
            value = whole_number(f"Schedule: {name}", getattr(self, name), at_least=at_least, at_most=at_most, remedy=remedy)
            object.__setattr__(self, name, value)

        check("n", 0, MAX_N, "give the number of samples, len(dataset)")
        check("batch_size", 1, 1 << 31, "a batch has at least one sample")
        check("seed", 0, MAX_UINT64, "seed % 2**64 is in range")
        check("world_size", 1, 1 << 31, "without torch.distributed world_size is 1")
        for name in ("shuffle", "drop_last"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Schedule: {name} must be True or False, got {getattr(self, name)!r}")
        if self.uneven not in get_args(Uneven):
            raise ValueError(
                f"Schedule: uneven must be one of {', '.join(map(repr, get_args(Uneven)))}, got {self.uneven!r}; "
                '"pad" suits training, "exact" evaluation'
            )
        if self.order is not None and (self.shuffle or self.order.n != self.n):
            raise ValueError(
                f"Schedule: with order={self.order.identity} n must be {self.order.n} and shuffle False, got n={self.n}, "
                f"shuffle={self.shuffle}; the order says both"
            )
        if self.version != SCHEDULE_VERSION:
            raise ValueError(
                f"Schedule: version must be {SCHEDULE_VERSION}, the only one this shmload knows, got {self.version!r}; "
                "a newer one needs a newer shmload"
            )

    @cached_property
    def global_batch(self) -> int:
        """Samples of one step over all ranks."""
        return self.batch_size * self.world_size

    @cached_property
    def rest_rule(self) -> Uneven:
        """What happens to the rest: `uneven`, or "drop" if `drop_last` says so."""
        return "drop" if self.drop_last else self.uneven

    @cached_property
    def num_steps(self) -> int:
        """Steps of an epoch: the largest number that any rank has."""
        whole, rest = divmod(self.n, self.global_batch)
        return whole + (rest > 0 and self.rest_rule != "drop")

    def num_steps_of(self, rank: int) -> int:
        """Steps in which `rank` has rows: `num_steps`, or one less where "exact" leaves it none.

        Args:
            rank: from 0 to `world_size - 1`.
        """
        steps = self.num_steps
        return steps - (rank > 0 and steps > 0 and self.num_rows(steps - 1, rank) == 0)

    def end_of(self, epoch: int, rank: int) -> int:
        """Steps from here on do not exist for that rank, in any epoch."""
        return self.num_steps_of(rank)

    def num_rows(self, step: int, rank: int) -> int:
        """Rows of the batch of a `step` and a `rank`, padding included.

        Raises:
            IndexError: there is no such step or rank.
        """
        start, stop = self._span(step, rank)
        return stop - start

    def num_valid(self, step: int, rank: int) -> int:
        """Rows of the batch of a `step` and a `rank` that are not padding; they come first.

        Raises:
            IndexError: there is no such step or rank.
        """
        start, stop = self._span(step, rank)
        return max(min(stop, self.n) - start, 0)

    def position(self, step: int) -> int:
        """Samples of the epoch that all ranks have consumed before `step`; at `num_steps`, by the epoch's end.

        Raises:
            IndexError: there is no such step.
        """
        if not 0 <= step <= self.num_steps:
            raise IndexError(f"Schedule: step must be in [0, {self.num_steps}], got {step}")
        return min(step * self.global_batch, self.n)

    def step_at(self, position: int) -> int:
        """The step that starts at `position`: the inverse of `position`.

        Raises:
            ValueError: no step starts there.
        """
        step = -(-position // self.global_batch)
        if not 0 <= step <= self.num_steps or self.position(step) != position:
            raise ValueError(
                f"Schedule: no step starts at position {position}; steps start at the multiples of global_batch="
                f"{self.global_batch} and end at {self.position(self.num_steps)}: resume with the same global batch"
            )
        return step

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        """The sample indices of a rank's step.

        Args:
            epoch: 0 to 2^64 - 1.
            step: from 0 to `num_steps - 1`.
            rank: from 0 to `world_size - 1`.
        Returns:
            a new int64 array, shape `(num_rows(step, rank),)`: empty where "exact" leaves the rank no rows.
        Raises:
            IndexError: there is no such step or rank.
        """
        start, stop = self._span(step, rank)
        out = np.empty(stop - start, np.int64)
        done = 0
        while done < len(out):  # once, unless padding wraps round the epoch
            position = (start + done) % self.n
            part = out[done : done + self.n - position]
            self._take(epoch, position, part)
            done += len(part)
        return out

    def batches(self, epoch: int, step: int, rank: int, most: int) -> NDArray[np.int64]:
        """The sample indices of several of a rank's steps, at less cost than one by one; none beyond the last whole step.

        Args:
            epoch, rank: as of `batch`.
            step: the first of them.
            most: how many are wanted; less than one is one.
        Returns:
            a new int64 array, shape `(steps, batch_size)`; `steps` is 0 where `step` has not `batch_size` rows in every rank.
        Raises:
            IndexError: there is no such rank.
        """
        count = max(min(max(most, 1), self.n // self.global_batch - step), 0)
        out = np.empty((count, self.batch_size), np.int64)
        if self.world_size == 1 and count:  # the steps lie end to end
            self._take(epoch, self._span(step, rank)[0], out.reshape(-1))
        else:
            for number, row in enumerate(out, step):
                self._take(epoch, self._span(number, rank)[0], row)
        return out

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        """The index so many places behind that of a row, in the epoch's order and round its end.

        Args:
            epoch, step, rank: as of `batch`.
            row: of the batch.
            distance: how many places; 1 is the next.
        """
        position = (self._span(step, rank)[0] + row + distance) % self.n
        out = np.empty(1, np.int64)
        self._take(epoch, position, out)
        return int(out[0])

    def counters(self, epoch: int, step: int) -> list[int] | None:
        """What a resume at a `step` of an `epoch` needs besides its position: a mixture's draws so far; None of other orders."""
        if self.order is None:
            return None
        return self.order.counters_at(self.position(step), seed=self.seed, epoch=epoch)

    def _take(self, epoch: int, position: int, out: NDArray[np.int64]) -> None:
        """The indices from that position of the epoch's order on."""
        if self.order is not None:
            out[:] = self.order.take(position, position + len(out), seed=self.seed, epoch=epoch)
        elif self.shuffle:
            _permutation(self.n, self.seed, epoch).fill(position, out)
        else:
            out[:] = np.arange(position, position + len(out))

    def _span(self, step: int, rank: int) -> tuple[int, int]:
        """Positions of a rank's step, from start to stop; padding stands at n and beyond."""
        if not (0 <= step < self.num_steps and 0 <= rank < self.world_size):
            raise IndexError(
                f"Schedule: step must be in [0, {self.num_steps}) and rank in [0, {self.world_size}), got step={step}, rank={rank}"
            )
        first = step * self.global_batch
        return _rows_of(first, rank, self.n - first, self.rest_rule, self.world_size, self.batch_size)


@lru_cache(maxsize=16)
def _permutation(n: int, seed: int, epoch: int) -> Permutation:
    """Epochs in use: a small n's table (up to 128 KiB) is shuffled once per epoch, not per batch."""
    return Permutation(n, seed=seed, epoch=epoch)


class KeyedBatches(ABC):
    """Which samples each batch of an epoch holds: the base of orders by batches, for one of your own.

    In seed mode it is given as `batch_sampler=`, and its batches are dealt to the ranks. Anywhere else it is an ordinary batch
    sampler: each `iter` draws a seed from torch's global generator, as torch's RandomSampler does.

    Attributes:
        num_needed: as of KeyedOrder.
    """

    num_needed: int | None = None
    _newest_seed = 0  # of `iter`: only its epoch has a length outside seed mode

    @property
    @abstractmethod
    def n(self) -> int:
        """Samples of an epoch."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Which batches these are, with what they were made of; a state saved under others is refused."""

    @abstractmethod
    def num_batches(self, *, seed: int, epoch: int) -> int:
        """Batches of an epoch, over all ranks.

        Args:
            seed, epoch: which epoch of which run; 0 to 2^64 - 1.
        """

    @abstractmethod
    def batch(self, number: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """The indices of one of an epoch's batches.

        Args:
            number: `0 <= number < num_batches`.
            seed, epoch: as of `num_batches`.
        Returns:
            a new int64 array.
        """

    def schedule(self, *, seed: int, uneven: Uneven, world_size: int) -> "BatchSchedule":
        """Which of its batches each rank reads."""
        return BatchSchedule(self, seed=seed, uneven=uneven, world_size=world_size)

    def __len__(self) -> int:
        """Batches of the newest `iter`; before the first, those of another epoch, which may have a few more or less."""
        return self.num_batches(seed=self._newest_seed, epoch=0)

    def __repr__(self) -> str:
        return f"<{self.identity}>"

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        seed = self._newest_seed = int(torch.empty((), dtype=torch.int64).random_().item())
        for number in range(self.num_batches(seed=seed, epoch=0)):
            yield self.batch(number, seed=seed, epoch=0).tolist()


@dataclass(frozen=True)
class BatchSchedule(AnySchedule):
    """Pure map (epoch, step, rank) -> sample indices over a sequence of batches; its arguments are checked by the loader.

    What `uneven` says of a last step with fewer batches than ranks:

    - "pad": the ranks without one get the epoch's first batches, round and round, none of whose rows counts as valid.
    - "drop": no rank gets any.
    - "exact": the ranks without one have no such step.

    Example:
        >>> from shmload.schedule.samplers import LengthBuckets
        >>> batches = LengthBuckets([3, 1, 4, 1, 5], batch_size=1)
        >>> schedule = BatchSchedule(batches, seed=7, world_size=2)
        >>> [schedule.num_valid(0, step, rank=1) for step in range(0, schedule.end_of(0, rank=1), schedule.stride)]
        [1, 1, 0]
    """

    order: KeyedBatches
    _: KW_ONLY
    seed: int
    uneven: Uneven = "pad"
    world_size: int = 1
    version: int = SCHEDULE_VERSION

    @property
    def n(self) -> int:
        """Samples of an epoch."""
        return self.order.n

    @property
    def stride(self) -> int:
        """From one step to the next."""
        return self.world_size

    @property
    def global_batch(self) -> int:
        """Not known: batches differ, and ranks read whole ones."""
        return 0

    @property
    def shuffle(self) -> bool:
        """The order says how."""
        return False

    @property
    def rows_per_rank(self) -> int | None:
        """Of a rank's step; None where batches differ."""
        return None

    @property
    def rest_rule(self) -> Uneven:
        """What happens to a last step with fewer batches than ranks."""
        return self.uneven

    def end_of(self, epoch: int, rank: int) -> int:
        """Steps from here on do not exist in that epoch, for that rank."""
        num_batches = self.order.num_batches(seed=self.seed, epoch=epoch)
        return stream_end(num_batches, rank, uneven=self.uneven, stride=self.world_size)

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        """The sample indices of a rank's step, as a new array."""
        number = (step + rank) % self.order.num_batches(seed=self.seed, epoch=epoch)
        return self.order.batch(number, seed=self.seed, epoch=epoch)

    def batches(self, epoch: int, step: int, rank: int, most: int) -> NDArray[np.int64]:
        """As of Schedule; none where they are worked out one by one."""
        return np.empty((0, 0), np.int64)

    def num_valid(self, epoch: int, step: int, rank: int) -> int:
        """Rows of the batch that are not padding: all or none."""
        is_padding = step + rank >= self.order.num_batches(seed=self.seed, epoch=epoch)
        return 0 if is_padding else len(self.batch(epoch, step, rank))

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        """The index so many places behind that of a row, in the epoch's batches laid end to end, and round their end."""
        place = row + distance
        while place >= len(batch := self.batch(epoch, step, rank)):
            place -= len(batch)
            step += 1
        return int(batch[place])

    def position(self, step: int) -> int:
        """Batches of the epoch that all ranks have consumed before `step`: the step itself."""
        return step

    def step_at(self, position: int) -> int:
        """The step that starts at `position`; there is one everywhere."""
        return position

    def counters(self, epoch: int, step: int) -> None:
        """A resume needs nothing besides its position."""
