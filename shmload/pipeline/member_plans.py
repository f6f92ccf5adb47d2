"""Plans of the members of a source that combines several pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmload.pipeline.compose import compose
from shmload.pipeline.conveyer import Conveyer
from shmload.pipeline.plan import Plan


def plans_of(members: Sequence[Any], name: str) -> list[Plan]:
    """Return the plans of the members of a Join, a Zip, a Chain or an Interleave that is the first stage of a pipeline.

    Args:
        members: Conveyers, sources, or lists of stages.
        name: name of the source.

    Raises:
        ValueError: a member is not a pipeline of single items at known positions.
    """
    plans = []
    for number, member in enumerate(members):
        is_made = isinstance(member, Conveyer)
        # compiled again, because the caches of a plan are numbered within its pipeline
        plans.append(compose(getattr(member, "stages", member), *([member.block_size] if is_made else [])))
        _check(number, plans[-1], member.options if is_made else {}, name)
    return plans


def _check(number: int, plan: Plan, options: Mapping[str, Any], name: str) -> None:
    if options:
        raise ValueError(
            f"member {number} of the {name} has options ({', '.join(options)}), and the Conveyer that the {name} begins reads "
            "for it: give them to that"
        )
    if plan.is_streamed:
        raise ValueError(
            f"member {number} of the {name} is a Stream, and the {name} needs the position of each item: make Items of it, if "
            "it is not too long"
        )
    if plan.is_expanding:
        raise ValueError(
            f"member {number} of the {name} has a stage that makes more or fewer items, and the {name} needs the position of "
            f"each item: put that stage after the {name}"
        )
    if plan.collate is not None or plan.partition.n_ranks > 1:
        raise ValueError(
            f"member {number} of the {name} has a {'Collate' if plan.collate is not None else 'Partition'} of its own, and the "
            f"Conveyer that the {name} begins needs single items of all ranks: put that stage after the {name}"
        )
