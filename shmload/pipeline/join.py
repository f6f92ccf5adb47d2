"""Join: several pipelines as one, in proportion to weights.

Who is drawn at each step is worked out from the weights alone (schedule/shares.py), so all ranks draw alike and every prefix holds
of each member what it should, within one. By itself a Join calls its members, each with workers of its own. As the first stage of a
Conveyer it is a source of single items, and one worker pool does for all.

A Join's turns: position -> member, by shmload's mixture of weights.

A Join as the first stage of a Conveyer: its members' items as one source of keys.

    key = the member's own key * number of members + the member's number

A member goes on where it stands when an epoch of the Join ends, so what has been drawn of it is always the beginning of its own row
of epochs: each of them comes whole before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shmload.engine.turns import Turns
from shmload.errors import SampleError, StateMismatch
from shmload.pipeline.conveyer import Conveyer
from shmload.pipeline.methods import Fluent
from shmload.pipeline.sources import SEED, Chained, Interleaved, Keys, Mapped, Zipped, set_whole
from shmload.pipeline.stages import Plan, PoolOptions, RowProgram, compose
from shmload.pipeline.streams import StreamRow
from shmload.schedule.checks import MAX_UINT64
from shmload.schedule.digest import digest
from shmload.schedule.mix import check_members
from shmload.schedule.mix_draws import Drawn
from shmload.schedule.mix_order import Stop, length
from shmload.schedule.permutation import MAX_N
from shmload.schedule.shares import Shares, exact_weight
from shmload.schedule.state_checksum import check_checksum, with_checksum


class Draws:
    """Which member each draw of an epoch is of; the same in every epoch.

    Args:
        sizes: draws that each member has in an epoch of its own; MAX_N: it has no end.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[Any], stop: Stop) -> None:
        self._made_of = (sizes, weights, stop)
        self.shares = Shares.of([list(weights)])
        is_never_whole = stop == "all" and max(sizes) >= MAX_N
        self.n = length(sizes, self.shares, "repeat" if is_never_whole else stop)
        self.is_endless = self.n >= MAX_N
        self.drawn = Drawn(self.shares, self.n)
        made_of = f"{list(sizes)}, {[str(exact_weight(weight)) for weight in weights]}, {stop}"
        self.mark = digest(np.frombuffer(made_of.encode(), np.uint8))

    def member_at(self, position: int) -> int:
        """Whose the draw at a position is."""
        block = self.drawn.block_at(position)
        return int(block.members[position - block.start])

    def blocks(self, start: int, stop: int) -> Iterator[tuple[NDArray[np.uint16], NDArray[np.int64]]]:
        """The draws of [start, stop), part by part: whose they are, and what each member had been drawn before."""
        while start < stop:
            block = self.drawn.block_at(start)
            end = min(stop, block.stop)
            yield block.members[start - block.start : end - block.start], self.drawn.counters_at(start)
            start = end

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, self._made_of  # a copy begins without what was worked out


STATE_VERSION = 1


class Join(Fluent):
    """Pipelines joined by weights: `Join([(imagenet, 0.7), (lsun, 0.25), (cifar, 0.05)])`.

    Args:
        members: (pipeline, weight) pairs; a pipeline is a Conveyer, a source, a pipeline as methods make it, or a Join. Weights are
            positive and finite and need not add up to 1; the members' lengths as weights give exactly one epoch of each.
        stop: when an epoch of the Join ends. "first": before a member that does not repeat would begin its next epoch; "all": when
            each has been read whole, those that end sooner beginning their next epoch; "repeat": never. In the Join's next epoch
            its members go on where they stand.
        seed: as the first stage of a Conveyer: of what is drawn at random for each item.

    Attributes:
        is_endless: it never ends.
        has_equal_ranks: every rank is given as much as any other.

    Raises:
        TypeError, ValueError: for what cannot be joined.
    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980.
    Example:
        >>> from shmload.pipeline import Items, Join
        >>> joined = Join([(Items([0, 1, 2]), 3), (Items([5]).map(lambda x: x - 5), 1)])
        >>> len(joined), sorted(joined)
        (4, [0, 0, 1, 2])
    """

    def __init__(self, members: Sequence[tuple[Any, float]], *, stop: Stop = "first", seed: int = SEED) -> None:
        check_members(
            members, stop, "Join", "pipeline", "Conveyer, pipeline or Join", lambda one: isinstance(one, Conveyer | Fluent)
        )
        members = [(one if isinstance(one, Conveyer | Join) else Conveyer(one), weight) for one, weight in members]
        self.members = [pipeline for pipeline, _ in members]
        self.weights = [weight for _, weight in members]
        for number, (pipeline, weight) in enumerate(members):
            if not weight > 0:
                raise ValueError(f"a Join needs weights above 0; member {number} has {weight!r}: leave it out")
            if isinstance(pipeline, Conveyer) and not pipeline.plan.is_in_order:
                raise ValueError(f"member {number} comes as it is done (in_order=False), and a Join's items have an order")
            if isinstance(pipeline, Conveyer) and (pipeline.plan.tail or isinstance(pipeline.plan.source, StreamRow)):
                raise ValueError(
                    f"member {number} has a Stream or a Scan, whose state has no place in a Join's: put a Scan behind the Join, "
                    "and make Items of a Stream that is not too long"
                )
            if isinstance(pipeline, Conveyer) and pipeline.plan.is_expanding and not pipeline.is_endless:
                raise ValueError(
                    f"member {number} has a stage that makes more or fewer items, and how many it gives is not known before "
                    "they are read: put that stage behind the Join, or give the member's source repeating=True"
                )
            if _size(pipeline) == 0:
                raise ValueError(f"member {number} of the Join gives nothing: not even one batch of all ranks is full")
            if not pipeline.has_equal_ranks:
                raise ValueError(
                    f'member {number} gives some ranks more than others (uneven="exact"), and then ranks draw differently: '
                    'use "pad" or "drop"'
                )
        if len({id(pipeline) for pipeline in self.members}) < len(members):
            raise ValueError("the same pipeline is in a Join twice: make one for each, or add up the weights")
        self.stop, self.seed = stop, seed
        set_whole(self, "Join(seed)", "seed", 0, MAX_UINT64)
        self._draws = Draws([_size(pipeline) for pipeline in self.members], self.weights, stop)
        self.is_endless, self.has_equal_ranks = self._draws.is_endless, True
        self._epoch = 0
        self._counters = [0] * len(members)  # of each member, this epoch
        self.last_member: int | None = None
        self._turns = Turns()

    # ------------------------------------------------------------ items

    def __call__(self) -> Any:
        """What the member whose turn it is gives next; `last_member` is its number.

        Raises:
            StopIteration: the Join is at its end.
            what the member raises; that was then its turn.
        """
        with self._turns:
            return self._next()

    def _next(self) -> Any:
        if self.is_ended:
            raise StopIteration
        self.last_member = member = self._draws.member_at(sum(self._counters))
        try:
            item = self._drawn_of(self.members[member])
        except Exception:
            self._counters[member] += 1
            raise
        self._counters[member] += 1
        return item

    @staticmethod
    def _drawn_of(pipeline: Any) -> Any:
        if pipeline.is_ended:
            pipeline.begin_next_epoch()
        try:
            return pipeline()
        except StopIteration:  # what was left of its epoch has been skipped (on_error)
            pipeline.begin_next_epoch()
        try:
            return pipeline()
        except StopIteration:
            raise SampleError("a member of a Join has skipped a whole epoch (on_error): look at its data") from None

    def __iter__(self) -> Self:
        if self.is_ended:
            self.begin_next_epoch()
        return self

    __next__ = __call__

    def __len__(self) -> int:
        """Draws until the end; of a Join without one, an epoch of each member."""
        return sum(map(len, self.members)) if self.is_endless else self._draws.n

    @property
    def is_ended(self) -> bool:
        """Whether it has nothing more to give until its next epoch begins."""
        return not self.is_endless and sum(self._counters) >= self._draws.n

    def begin_next_epoch(self) -> None:
        """Goes to the start of the next epoch; the members go on where they stand."""
        self._epoch += 1
        self._counters = [0] * len(self.members)

    def as_source(self) -> JoinSource:
        """As the first stage of a Conveyer: the members' items, read by one worker pool.

        Raises:
            ValueError: a member gives batches, or a rank's part.
        """
        return JoinSource([_plan_of(number, each) for number, each in enumerate(self.members)], self.weights, self.stop, self.seed)

    # ------------------------------------------------------------ position

    def state(self) -> dict[str, Any]:
        """Where it stands: JSON-able, 64 bytes a member at the most beside 1 KiB, the same on all ranks after equal steps."""
        return with_checksum({"version": STATE_VERSION, "mode": "join", "members": self.entry()})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken, by any rank, on any number of ranks and workers; also while it runs.

        Raises:
            StateMismatch: it belongs to other pipelines; says which member differs. Nothing is changed then.
        """
        if not isinstance(state, Mapping) or state.get("mode") != "join":
            raise StateMismatch(f"a Join's state is a dict as state() returns it, of mode 'join'; got {state!r:.200}")
        if state.get("version") != STATE_VERSION:
            raise StateMismatch(
                f"this state has format version {state.get('version')!r}, this shmload reads {STATE_VERSION}: install the one "
                "that saved it"
            )
        check_checksum(state)
        self.entering(state.get("members"), "")()

    set_state = load_state
    state_dict, load_state_dict = state, load_state  # torch's words, for torch.distributed.checkpoint

    def entry(self) -> list[Any]:
        """The state in a few words, for that of a Join it is in: its mark, its epoch, and of each member draws and entry."""
        members = [[count, pipeline.entry()] for count, pipeline in zip(self._counters, self.members, strict=True)]
        return [self._draws.mark, self._epoch, *members]

    def entering(self, entry: Any, where: str) -> Callable[[], None]:
        """What takes it and its members to where `entry` was taken.

        Raises:
            StateMismatch: it belongs to another Join.
        """
        if not isinstance(entry, list) or entry[:1] != [self._draws.mark] or len(entry) != len(self.members) + 2:
            raise StateMismatch(
                f"the state belongs to another Join{where}: its members, weights or stop rule differ. Build it as it was at saving"
            )
        epoch, *members = entry[1:]
        pairs: list[Any] = [each if isinstance(each, list) and len(each) == 2 else (None, None) for each in members]
        counts: list[Any] = [count for count, _ in pairs]
        if not all(type(number) is int and number >= 0 for number in [epoch, *counts]):
            raise StateMismatch(
                f"this is no state of a Join{where}: an epoch and counts are whole numbers; got {[epoch, *counts]!r:.200}"
            )
        self._draws.drawn.check_at(sum(counts), counts)
        entered = [
            pipeline.entering(its, f"{where}, member {number}")
            for number, (pipeline, (_, its)) in enumerate(zip(self.members, pairs, strict=True))
        ]

        def enter() -> None:
            self._draws.drawn.learn(sum(counts), counts)
            self._epoch, self._counters = epoch, counts
            for go in entered:
                go()

        return enter

    # ------------------------------------------------------------ ends

    def close(self) -> None:
        """Closes the members."""
        for pipeline in self.members:
            pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Rows(Fluent):
    """Several pipelines as one source of single items, each read at the places that it is asked for."""

    def __init__(self, *members: Any) -> None:
        name = type(self).__name__
        if not members:
            raise ValueError(f"a {name} needs at least one member; got none")
        self.members = members

    def _made(self, rows: list[Keys]) -> Keys:
        """What it makes of the members' rows."""
        raise NotImplementedError

    def as_source(self) -> Keys:
        """As the first stage of a Conveyer: its members' rows, behind their functions, with the workers that they ask for.

        Raises:
            TypeError, ValueError: a member is no pipeline of single items.
        """
        name, plans = type(self).__name__, []
        for number, member in enumerate(self.members):
            if not isinstance(member, Conveyer | Fluent | list | tuple):
                raise TypeError(
                    f"member {number} of the {name} is a Conveyer, a source or a list of stages; got a {type(member).__name__}"
                )
            stages: Any = member.stages if isinstance(member, Fluent) else member
            plans.append(_plan_of(number, member if isinstance(member, Conveyer) else compose(stages), name))
        rows: list[Keys] = [
            Mapped(plan.source, [replace(stage, name=f"{stage.name} of member {number}") for stage in plan.item_stages])
            for number, plan in enumerate(plans)
        ]
        source = self._made(rows)
        source.pools = [plan.pool for plan in plans]
        return source


class Zip(_Rows):
    """Tuples of its members' items, epoch by epoch, each to the end of the shortest; a source.

    Args:
        members: Conveyers, sources or lists of stages, of single items. Members that repeat go on where they stand.
    Raises:
        TypeError, ValueError: a member is no such thing.
    Example:
        >>> from shmload.pipeline import Conveyer, Items, Range, Zip
        >>> with Conveyer([Zip(Items("abc"), Range(10))]) as pairs:
        ...     list(pairs)
        [('a', 0), ('b', 1), ('c', 2)]
    """

    def _made(self, rows: list[Keys]) -> Keys:
        return Zipped(rows)


class Chain(_Rows):
    """The epochs of its members, one behind the other, as one; a source.

    Args:
        members: as of Zip; only the last may repeat.
    Raises:
        TypeError, ValueError: a member is no such thing.
    """

    def _made(self, rows: list[Keys]) -> Keys:
        return Chained(rows)


class Interleave(_Rows):
    """Items of each member in turn, to the end of the longest; a source. By weights: Join.

    Args:
        members: as of Zip; all of them repeat, or none.
        block_length: items of each member at a time.
    Raises:
        TypeError, ValueError: a member is no such thing.
    """

    def __init__(self, *members: Any, block_length: int = 1) -> None:
        super().__init__(*members)
        self.block_length = block_length
        set_whole(self, "Interleave(block_length)", "block_length", 1, MAX_N)

    def _made(self, rows: list[Keys]) -> Keys:
        return Interleaved(rows, self.block_length)


def _size(pipeline: Any) -> int:
    return MAX_N if pipeline.is_endless else len(pipeline)


def _plan_of(number: int, member: Any, name: str = "Join") -> Plan:
    if isinstance(member, Join):
        return compose([member])
    plan: Plan = member if isinstance(member, Plan) else member.plan
    if options := getattr(member, "options", None):
        raise ValueError(
            f"member {number} of the {name} has options ({', '.join(options)}), and the Conveyer that the {name} begins reads "
            "for it: give them to that"
        )
    if isinstance(plan.source, StreamRow):
        raise ValueError(
            f"member {number} of the {name} is a Stream, and the {name} needs to know where each item stands: make Items of it, if "
            "it is not too long"
        )
    if plan.is_expanding:
        raise ValueError(
            f"member {number} of the {name} has a stage that makes more or fewer items, and the {name} needs to know where each "
            f"item stands: put that stage behind the {name}"
        )
    if plan.collate is not None or plan.partition.n_ranks > 1:
        raise ValueError(
            f"member {number} of the {name} has a {'Collate' if plan.collate is not None else 'Partition'} of its own, and the "
            f"Conveyer that the {name} begins needs single items of all ranks: put that stage behind the {name}"
        )
    return plan


READ_AHEAD = 1024  # keys that are worked out at a time: a batch has few of each of many members


class JoinSource(Keys):
    """The items of several pipelines as one source.

    Args:
        plans: of the members.
    Raises:
        ValueError: the members are so large that keys do not fit.
    """

    def __init__(self, plans: Sequence[Plan], weights: Sequence[Any], stop: Stop, seed: int) -> None:
        self._sources: list[Keys] = [plan.source for plan in plans]
        self._programs = [
            RowProgram(plan.source, [replace(stage, name=f"{stage.name} of member {number}") for stage in plan.item_stages])
            for number, plan in enumerate(plans)
        ]
        self._draws = Draws([MAX_N if source.repeating else source.n for source in self._sources], weights, stop)
        self._newest = (0, np.empty(0, np.int64))  # (position, keys from there on)
        self.pools: list[PoolOptions] = [plan.pool for plan in plans]
        self.seed = seed
        self.repeating = self._draws.is_endless
        self.n = sum(source.n for source in self._sources) if self.repeating else self._draws.n
        self.members = [source.members for source in self._sources]
        # one for each member, at every depth
        self.num_counters = len(self._sources) + sum(source.num_counters for source in self._sources)
        members = ", ".join(source.identity for source in self._sources)
        if len(members) > 200:
            members = f"{len(self._sources)} members, {digest(np.frombuffer(members.encode(), np.uint8))}"
        self.identity = f"Join({members}; {self._draws.mark})"
        if (largest := _num_keys(self.members)) > MAX_N:
            raise ValueError(
                f"an epoch of the Join's members has keys up to {largest}, which counts a member's items times the number of "
                f"members, and at most 2^62 can be told apart: join fewer items"
            )

    def keys_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """The keys at positions [start, stop); beyond n, of the epochs that follow."""
        first, keys = self._newest
        if not first <= start <= stop <= first + len(keys):
            end = MAX_N if self.repeating else (start // self.n + 1) * self.n
            keys = self._take(start, max(stop, min(start + READ_AHEAD, end)))
            self._newest = first, keys = start, keys
        return keys[start - first : stop - first].copy()

    def _take(self, start: int, stop: int) -> NDArray[np.int64]:
        parts = []
        while start < stop:
            epoch, place = self._place(start)
            end = stop if self.repeating else min(stop, (epoch + 1) * self.n)
            before = self._before(epoch)
            parts += [
                self._keys(members, counters + before) for members, counters in self._draws.blocks(place, place + end - start)
            ]
            start = end
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _keys(self, members: NDArray[np.uint16], counters: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = np.empty(len(members), np.int64)
        for member in np.unique(members).tolist():
            its = members == member
            first = int(counters[member])
            keys[its] = self._sources[member].keys_at(first, first + int(its.sum())) * len(self._sources) + member
        return keys

    def _place(self, position: int) -> tuple[int, int]:
        return (0, position) if self.repeating else divmod(position, self.n)

    def _before(self, epoch: int) -> NDArray[np.int64]:
        """Draws of each member in the epochs before."""
        return self._draws.drawn.counters_at(self.n if epoch else 0) * epoch

    def item(self, key: int) -> Any:
        """What a key stands for: the member's item, behind the member's functions."""
        key, member = divmod(key, len(self._sources))
        return self._programs[member][key]

    def name(self, key: int) -> str:
        """What a key stands for, for people."""
        key, member = divmod(key, len(self._sources))
        return f"{self._sources[member].name(key)} of member {member}"

    # ------------------------------------------------------------ position

    def counters_at(self, position: int) -> list[int]:
        """Draws of each member before a position, in its epoch; then those of members that are Joins, in theirs."""
        epoch, place = self._place(position)
        counters = self._draws.drawn.counters_at(place)
        had = self._before(epoch) + counters
        return [
            *counters.tolist(),
            *(c for s, count in zip(self._sources, had.tolist(), strict=True) for c in s.counters_at(count)),
        ]

    def go_on_at(self, position: int, counters: Sequence[int]) -> None:
        """Takes over what `counters_at` gave for that position.

        Raises:
            StateMismatch: it cannot have. Nothing is taken over then.
        """
        if len(counters) != self.num_counters:
            raise StateMismatch(
                f"the state of this Join has {self.num_counters} counters, one for each member; got {len(counters)}. Load what "
                "state() returned"
            )
        for drawn, place, its in list(self._checked(position, counters)):
            drawn.learn(place, its)

    def _checked(self, position: int, counters: Sequence[int]) -> Iterator[tuple[Drawn, int, Sequence[int]]]:
        """Which counters are whose, at which place, at every depth."""
        epoch, place = self._place(position)
        done = len(self._sources)
        self._draws.drawn.check_at(place, counters[:done])
        yield self._draws.drawn, place, counters[:done]
        before = self._before(epoch).tolist()
        for source, whole, count in zip(self._sources, before, counters[:done], strict=True):
            its, done = counters[done : done + source.num_counters], done + source.num_counters
            if isinstance(source, JoinSource):
                yield from source._checked(whole + count, its)


def _num_keys(members: Any) -> int:
    """Keys of an epoch lie below it."""
    return members if isinstance(members, int) else len(members) * max(map(_num_keys, members))
