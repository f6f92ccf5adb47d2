"""JoinEngine: call the members of a Join in turn. Each member has its own engine and workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmload.errors import SampleError, StateMismatch
from shmload.pipeline.draws import Draws
from shmload.schedule.state_checksum import check_checksum, with_checksum

STATE_VERSION = 1


class JoinEngine:
    """The engine of a Join: draws from its members in turn.

    Args:
        members: the pipelines.
        draws: decides which member is next.

    Attributes:
        last_member: number of the member drawn last, or None.
    """

    def __init__(self, members: Sequence[Any], draws: Draws) -> None:
        self._members, self._draws = members, draws
        self._epoch = 0
        self._counters = [0] * len(members)  # draws of each member in this epoch
        self.last_member: int | None = None

    def pull(self) -> Any:
        """Return the next item or batch of the member whose turn it is. A call that raises also counts as its turn."""
        if self.is_ended:
            raise StopIteration
        self.last_member = member = self._draws.member_at(sum(self._counters))
        try:
            item = self._drawn_of(self._members[member])
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
            raise SampleError("a member of a Join has skipped a whole epoch (on_error): check its data") from None

    @property
    def num_steps(self) -> int:
        """Return the number of draws until the end; for an endless Join, until each member has delivered one epoch."""
        return sum(map(len, self._members)) if self._draws.is_endless else self._draws.n

    @property
    def is_ended(self) -> bool:
        """Return whether nothing is left until the next epoch begins."""
        return not self._draws.is_endless and sum(self._counters) >= self._draws.n

    def begin_pass(self) -> None:
        """Prepare an iteration: begin the next epoch if this one has been consumed."""
        if self.is_ended:
            self.begin_next_epoch()

    def begin_next_epoch(self) -> None:
        """Go to the start of the next epoch; the members continue where they are."""
        self._epoch += 1
        self._counters = [0] * len(self._members)

    # ------------------------------------------------------------ position

    def state(self) -> dict[str, Any]:
        """Return the state, the same on all ranks after equal steps."""
        return with_checksum({"version": STATE_VERSION, "mode": "join", "members": self.entry()})

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        Raises:
            StateMismatch: it belongs to other pipelines; the message names the member that differs. Nothing is changed then.
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

    def entry(self) -> list[Any]:
        """Return a compact state, for the state of an outer Join: mark, epoch, and draws and entry of each member."""
        members = [[count, pipeline.engine.entry()] for count, pipeline in zip(self._counters, self._members, strict=True)]
        return [self._draws.mark, self._epoch, *members]

    def entering(self, entry: Any, where: str) -> Callable[[], None]:
        """Return a function that moves the Join and its members to where `entry` was taken.

        Raises:
            StateMismatch: it belongs to another Join.
        """
        if not isinstance(entry, list) or entry[:1] != [self._draws.mark] or len(entry) != len(self._members) + 2:
            raise StateMismatch(
                f"the state belongs to another Join{where}: its members, weights or stop rule differ. Build it as it was at saving"
            )
        epoch, *members = entry[1:]
        pairs: list[Any] = [each if isinstance(each, list) and len(each) == 2 else (None, None) for each in members]
        counts: list[Any] = [count for count, _ in pairs]
        if not all(type(number) is int and number >= 0 for number in [epoch, *counts]):
            raise StateMismatch(
                f"this is not a state of a Join{where}: an epoch and counts are whole numbers; got {[epoch, *counts]!r:.200}"
            )
        self._draws.drawn.check_at(sum(counts), counts)
        entered = [
            pipeline.engine.entering(its, f"{where}, member {number}")
            for number, (pipeline, (_, its)) in enumerate(zip(self._members, pairs, strict=True))
        ]

        def enter() -> None:
            self._draws.drawn.learn(sum(counts), counts)
            self._epoch, self._counters = epoch, counts
            for go in entered:
                go()

        return enter

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Close the members."""
        for pipeline in self._members:
            pipeline.close()
