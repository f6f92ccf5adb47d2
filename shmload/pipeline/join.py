"""Join: several pipelines as one, in proportion to weights."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from shmload.pipeline.conveyer import Conveyer
from shmload.pipeline.draws import Draws
from shmload.pipeline.item_sequence import SEED
from shmload.pipeline.join_engine import JoinEngine
from shmload.pipeline.join_source import JoinSource
from shmload.pipeline.member_plans import plans_of
from shmload.pipeline.methods import Fluent
from shmload.pipeline.running_pipeline import RunningPipeline
from shmload.schedule.checks import MAX_UINT64
from shmload.schedule.mix import check_members
from shmload.schedule.mix_order import Stop
from shmload.schedule.permutation import MAX_N
from shmload.worker.stage_arguments import set_whole


class Join(RunningPipeline, Fluent):
    """Several pipelines, mixed by weights: `Join([(imagenet, 0.7), (lsun, 0.25), (cifar, 0.05)])`.

    Args:
        members: (pipeline, weight) pairs; a pipeline is a Conveyer, a source, a pipeline made by methods, or a Join. Weights are
            positive and finite and need not add up to 1. The members' lengths as weights result in exactly one epoch of each.
        stop: when an epoch of the Join ends. "first" ends it before a member that does not repeat would begin its next epoch; "all"
            ends it when each member has been read completely, while shorter members begin their next epoch; "repeat" never ends it.
            In the next epoch of the Join, its members continue where they were.
        seed: seed of the items' random numbers, if the Join is the first stage of a Conveyer.

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

    engine: JoinEngine

    def __init__(self, members: Sequence[tuple[Any, float]], *, stop: Stop = "first", seed: int = SEED) -> None:
        check_members(
            members, stop, "Join", "pipeline", "Conveyer, pipeline or Join", lambda one: isinstance(one, Conveyer | Fluent)
        )
        members = [(one if isinstance(one, Conveyer | Join) else Conveyer(one), weight) for one, weight in members]
        self.members = [pipeline for pipeline, _ in members]
        self.weights = [weight for _, weight in members]
        for number, (pipeline, weight) in enumerate(members):
            if not weight > 0:
                raise ValueError(f"Join needs weights above 0; member {number} has {weight!r}: leave it out")
            if isinstance(pipeline, Conveyer) and not pipeline.plan.is_in_order:
                raise ValueError(
                    f"member {number} gives items in the order in which they are done (in_order=False), and a Join's items have a "
                    "fixed order: leave in_order=False out"
                )
            if isinstance(pipeline, Conveyer) and (pipeline.plan.tail or pipeline.plan.is_streamed):
                raise ValueError(
                    f"member {number} has a Stream or a Scan, whose state has no place in a Join's: put a Scan after the Join, "
                    "and make Items of a Stream that is not too long"
                )
            if isinstance(pipeline, Conveyer) and pipeline.plan.is_expanding and not pipeline.is_endless:
                raise ValueError(
                    f"member {number} has a stage that makes more or fewer items, and how many it gives is not known before "
                    "they are read: put that stage after the Join, or give the member's source repeating=True"
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
        draws = Draws([_size(pipeline) for pipeline in self.members], self.weights, stop)
        self.is_endless, self.has_equal_ranks = draws.is_endless, True
        super().__init__(JoinEngine(self.members, draws))

    def __repr__(self) -> str:
        return f"Join({len(self.members)} members)"

    def __copy__(self) -> Join:
        """Return a Join at the same position, which has a position of its own from then on."""
        made = Join(
            [(copy(member), weight) for member, weight in zip(self.members, self.weights, strict=True)],
            stop=self.stop,
            seed=self.seed,
        )
        made.load_state(self.state())
        return made

    @property
    def last_member(self) -> int | None:
        """Return the number of the member that was drawn last; None before the first draw."""
        return self.engine.last_member

    def as_source(self) -> JoinSource:
        """Return the members' items as one sequence, for the first stage of a pipeline with one worker pool.

        Raises:
            ValueError: a member delivers batches, or only a rank's part.
        """
        return JoinSource(plans_of(self.members, "Join"), self.weights, self.stop, self.seed)


def _size(pipeline: Any) -> int:
    return MAX_N if pipeline.is_endless else len(pipeline)
