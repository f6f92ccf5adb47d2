"""Join: several pipelines as one, in proportion to weights.

Who is drawn at each step is worked out from the weights alone (schedule/drawn.py), so all ranks draw alike and every prefix holds
of each member what it should, within one. By itself a Join calls its members, each with workers of its own. As the first stage of a
Conveyer it is a source of single items, and one crew does for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from shmload.errors import StateMismatch
from shmload.pipeline.conveyer import Conveyer
from shmload.pipeline.draws import Draws, JoinSource
from shmload.pipeline.plan import Plan, compose
from shmload.pipeline.stages import SEED
from shmload.schedule.mix_order import Stop, check_stop
from shmload.schedule.permutation import MAX_N
from shmload.schedule.shares import check_weights

__all__ = ["Join"]

STATE_VERSION = 1


class Join:
    """Pipelines joined by weights: `Join([(imagenet, 0.7), (lsun, 0.25), (cifar, 0.05)])`.

    Args:
        members: (pipeline, weight) pairs; a pipeline is a Conveyer or a Join. Weights are positive and finite and need not add up
            to 1; the members' lengths as weights give exactly one epoch of each.
        stop: where the members do not repeat, when the Join ends. "first": with the first that is used up; "all": when each has
            been read whole, those that end sooner beginning their next epoch; "repeat": never.
        seed: as the first stage of a Conveyer: of what is drawn at random for each item.
    Raises:
        TypeError, ValueError: for what cannot be joined.
    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980.
    Example:
        >>> from shmload.pipeline import Conveyer, Join, Range
        >>> joined = Join([(Conveyer([Range(3, repeating=False)]), 3), (Conveyer([Range(1, repeating=False)]), 1)])
        >>> len(joined), sorted(joined)
        (4, [0, 0, 1, 2])
    """

    def __init__(self, members: Sequence[tuple[Any, float]], *, stop: Stop = "first", seed: int = SEED) -> None:
        check_stop(stop)
        if not members:
            raise ValueError("a Join needs at least one (pipeline, weight); got none")
        for number, member in enumerate(members):
            if not (isinstance(member, tuple | list) and len(member) == 2 and isinstance(member[0], Conveyer | Join)):
                raise TypeError(
                    f"a Join needs pairs of a Conveyer or Join and its weight; member {number} is {member!r}"
                )
        self.members = [pipeline for pipeline, _ in members]
        self.weights = [weight for _, weight in members]
        check_weights(self.weights, len(members), "a Join")
        for number, (pipeline, weight) in enumerate(members):
            if not weight > 0:
                raise ValueError(f"a Join needs weights above 0; member {number} has {weight!r}: leave it out")
            if not pipeline.has_equal_ranks:
                raise ValueError(
                    f'member {number} gives some ranks more than others (uneven="exact"), and then ranks draw differently: '
                    'use "pad" or "drop"'
                )
        if len({id(pipeline) for pipeline in self.members}) < len(members):
            raise ValueError("the same pipeline is in a Join twice: make one for each, or add up the weights")
        self.stop, self.seed = stop, seed
        self._draws = Draws([_size(pipeline) for pipeline in self.members], self.weights, stop)
        self._epoch = 0
        self._counters = [0] * len(members)  # of each member, this epoch
        self.last_member: int | None = None

    # ------------------------------------------------------------ items

    def __call__(self) -> Any:
        """What the member whose turn it is gives next; `last_member` is its number.

        Raises:
            StopIteration: the Join is at its end.
            what the member raises; that was then its turn.
        """
        if self.is_ended:
            raise StopIteration
        member = self._draws.members(sum(self._counters))
        pipeline = self.members[member]
        if pipeline.is_ended:
            pipeline.begin_next_epoch()
        self._counters[member] += 1
        self.last_member = member
        return pipeline()

    def __iter__(self) -> Self:
        if self.is_ended:
            self.begin_next_epoch()
        return self

    def __next__(self) -> Any:
        return self()

    def __len__(self) -> int:
        """Draws until the end; of a Join without one, an epoch of each member."""
        return sum(map(len, self.members)) if self.is_endless else self._draws.n

    @property
    def is_endless(self) -> bool:
        """Whether it never ends."""
        return self._draws.is_endless

    @property
    def is_ended(self) -> bool:
        """Whether it has nothing more to give until its next epoch begins."""
        return not self.is_endless and sum(self._counters) >= self._draws.n

    @property
    def has_equal_ranks(self) -> bool:
        """Whether every rank is given as much as any other."""
        return True

    def begin_next_epoch(self) -> None:
        """Goes to the start of the next epoch, and so do the members, but for those without an end."""
        self._epoch += 1
        self._counters = [0] * len(self.members)
        for pipeline in self.members:
            if not pipeline.is_endless:
                pipeline.begin_next_epoch()

    def as_source(self) -> JoinSource:
        """As the first stage of a Conveyer: the members' items, read by one crew.

        Raises:
            ValueError: a member gives batches, or a rank's part.
        """
        return JoinSource(
            [_plan_of(number, each) for number, each in enumerate(self.members)], self.weights, self.stop, self.seed
        )

    # ------------------------------------------------------------ position

    def state(self) -> dict[str, Any]:
        """Where it stands: JSON-able, 64 bytes a member at the most beside 1 KiB, the same on all ranks after equal steps."""
        return {"version": STATE_VERSION, "mode": "join", "members": self._entries()}

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
        before = self._entries()
        try:
            self._enter(state.get("members"), "")
        except StateMismatch:
            self._enter(before, "")
            raise

    set_state = load_state
    state_dict, load_state_dict = state, load_state  # torch's words, for torch.distributed.checkpoint

    def _entries(self) -> list[Any]:
        members: list[Any] = []
        for count, pipeline in zip(self._counters, self.members, strict=True):
            members.append([count, pipeline._entries() if isinstance(pipeline, Join) else pipeline.entry()])
        return [self._mark, self._epoch, *members]

    def _enter(self, entries: Any, where: str) -> None:
        if not isinstance(entries, list) or entries[:1] != [self._mark] or len(entries) != len(self.members) + 2:
            raise StateMismatch(
                f"the state belongs to another Join{where}: its members, weights or stop rule differ. Build it as it was at saving"
            )
        epoch, *members = entries[1:]
        counts: list[Any] = [entry[0] if isinstance(entry, list) and len(entry) == 2 else None for entry in members]
        if not all(type(number) is int and number >= 0 for number in [epoch, *counts]):
            raise StateMismatch(
                f"this is no state of a Join: an epoch and counts are whole numbers; got {[epoch, *counts]}"
            )
        self._draws.go_on_at(sum(counts), counts)
        for number, (pipeline, (_, entry)) in enumerate(zip(self.members, members, strict=True)):
            inner = f"{where}, member {number}"
            if isinstance(pipeline, Join):
                pipeline._enter(entry, inner)
            else:
                pipeline.enter(entry, inner)
        self._epoch, self._counters = epoch, counts

    @property
    def _mark(self) -> str:
        return self._draws.mark

    # ------------------------------------------------------------ ends

    def close(self) -> None:
        """Closes the members."""
        for pipeline in self.members:
            pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _size(pipeline: Any) -> int:
    return MAX_N if pipeline.is_endless else len(pipeline)


def _plan_of(number: int, member: Any) -> Plan:
    if isinstance(member, Join):
        return compose([member])
    plan: Plan = member.plan
    if plan.collate is not None or plan.partition.n_ranks > 1:
        raise ValueError(
            f"member {number} of the Join has a {'Collate' if plan.collate is not None else 'Partition'} of its own, and the "
            "Conveyer that the Join begins needs single items of all ranks: put that stage behind the Join"
        )
    return plan
