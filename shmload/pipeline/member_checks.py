"""Check that the plan of a pipeline can be a member of a source that combines several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmload.pipeline.plan import Plan


def check_member(number: int, plan: Plan, options: Mapping[str, Any], name: str) -> None:
    """Check a member of a Join, a Zip, a Chain or an Interleave that is the first stage of a pipeline.

    Args:
        number: of the member.
        plan: of the member.
        options: that its Conveyer was given.
        name: of the source.

    Raises:
        ValueError: it is not a pipeline of single items at known positions.
    """
    if options:
        raise ValueError(
            f"member {number} of the {name} has options ({', '.join(options)}), and the Conveyer that the {name} begins reads "
            "for it: give them to that"
        )
    if plan.is_streamed:
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
