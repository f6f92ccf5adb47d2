"""Explores every interleaving of ranks that share one ring, and the planted bugs that must be found."""

from __future__ import annotations

import pytest

from tests.proof.model import explore
from tests.proof.sharing import BUGS, Model

# followers, slots, batches before and after the bump, kills: number of states
RIGHT = {(1, 1, 1, 1, 1): 576, (1, 2, 2, 2, 1): 22_969, (2, 2, 1, 0, 1): 9647, (2, 2, 1, 1, 0): 23_379}


@pytest.mark.slow(reason="explores every interleaving in Python")
@pytest.mark.parametrize(("size", "states"), RIGHT.items(), ids=str)
def test_no_interleaving_of_ranks_reads_a_reused_slot_and_all_terminate(size: tuple[int, int, int, int, int], states: int) -> None:
    assert explore(Model(*size)) == ("holds", states)  # fewer would mean that some states are not explored any longer


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_of_a_rank_is_found(bug: str) -> None:
    num_slots = 1 if "abandoned" in bug else 2  # otherwise a later ticket passes the earlier ones
    verdict, _ = explore(Model(1, num_slots, 2, 1, 1, bug))
    assert verdict.startswith(("violation", "stuck"))
