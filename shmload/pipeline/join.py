"""Join: several pipelines as one, in proportion to weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from shmload.engine.turns import Turns
from shmload.errors import SampleError, StateMismatch
from shmload.pipeline.compose import compose
from shmload.pipeline.conveyer import Conveyer
from shmload.pipeline.draws import Draws
from shmload.pipeline.join_source import JoinSource
from shmload.pipeline.member_checks import check_member
from shmload.pipeline.methods import Fluent
from shmload.pipeline.rows import SEED
from shmload.schedule.checks import MAX_UINT64
from shmload.schedule.mix import check_members
from shmload.schedule.mix_order import Stop
from shmload.schedule.permutation import MAX_N
from shmload.schedule.state_checksum import check_checksum, with_checksum
from shmload.worker.stage_arguments import set_whole

STATE_VERSION = 1


class Join(Fluent):
    """Several pipelines, mixed by weights: `Join([(imagenet, 0.7), (lsun, 0.25), (cifar, 0.05)])`.

    Args:
        members: (pipeline, weight) pairs; a pipeline is a Conveyer, a source, a pipeline made by methods, or a Join. Weights are
            positive and finite and need not add up to 1. The members' lengths as weights result in exactly one epoch of each.
        stop: when an epoch of the Join ends. "first": before a member that does not repeat would begin its next epoch; "all": when
            each has been read completely, while shorter members begin their next epoch; "repeat": never. In the next epoch of the
            Join its members continue where they were.
        seed: of the items' random numbers, if the Join is the first stage of a Conveyer.

    Attributes:
        is_endless: whether it never ends.
        has_equal_ranks: whether every rank receives as much as any other.

    Raises:
        TypeError, ValueError: a member cannot be joined.
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
            if isinstance(pipeline, Conveyer) and (pipeline.plan.tail or pipeline.plan.is_streamed):
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
        """Return the next item or batch of the member whose turn it is; `last_member` is its number.

        Raises:
            StopIteration: the Join has ended.
            what the member raises, which counts as its turn.
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
        except StopIteration:  # the rest of its epoch was skipped (on_error)
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
        """Return the number of draws until the end; for an endless Join, one epoch of each member."""
        return sum(map(len, self.members)) if self.is_endless else self._draws.n

    @property
    def is_ended(self) -> bool:
        """True if nothing is left until the next epoch begins."""
        return not self.is_endless and sum(self._counters) >= self._draws.n

    def begin_next_epoch(self) -> None:
        """Go to the start of the next epoch; the members continue where they are."""
        self._epoch += 1
        self._counters = [0] * len(self.members)

    def as_source(self) -> JoinSource:
        """Return the members' items as one row, for the first stage of a pipeline with one worker pool.

        Raises:
            ValueError: a member delivers batches, or a rank's part.
        """
        plans = []
        for number, each in enumerate(self.members):
            plan, options = (each.plan, each.options) if isinstance(each, Conveyer) else (compose([each]), {})
            check_member(number, plan, options, "Join")
            plans.append(plan)
        return JoinSource(plans, self.weights, self.stop, self.seed)

    # ------------------------------------------------------------ position

    def state(self) -> dict[str, Any]:
        """Return the position: JSON-able, at most 1 KiB plus 64 bytes per member, the same on all ranks after equal steps."""
        return with_checksum({"version": STATE_VERSION, "mode": "join", "members": self.entry()})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, by any rank, on any number of ranks and workers; also while it runs.

        Raises:
            StateMismatch: it belongs to other pipelines; the message says which member differs. Nothing is changed then.
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
        """Return a compact state, for the state of an outer Join: mark, epoch, and draws and entry of each member."""
        members = [[count, pipeline.entry()] for count, pipeline in zip(self._counters, self.members, strict=True)]
        return [self._draws.mark, self._epoch, *members]

    def entering(self, entry: Any, where: str) -> Callable[[], None]:
        """Return a function that moves the Join and its members to where `entry` was taken.

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
        """Close the members."""
        for pipeline in self.members:
            pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _size(pipeline: Any) -> int:
    return MAX_N if pipeline.is_endless else len(pipeline)
