"""Every interleaving of ranks that read one ring, and the planted mistakes that must be found in them."""

from __future__ import annotations

import pytest

from tests.proof.model import explore
from tests.proof.sharing import BUGS, Model

# followers, slots, batches before the bump and after it, kills: states
RIGHT = {(1, 1, 1, 1, 1): 576, (1, 2, 2, 2, 1): 22_969, (2, 2, 1, 0, 1): 9647, (2, 2, 1, 1, 0): 23_379}


@pytest.mark.slow(reason="explores every interleaving in Python")
@pytest.mark.parametrize(("size", "states"), RIGHT.items(), ids=str)
def test_no_interleaving_of_ranks_reads_a_slot_that_is_used_again_and_all_come_to_an_end(
    size: tuple[int, int, int, int, int], states: int
) -> None:
    assert explore(Model(*size)) == ("holds", states)  # fewer would mean that something is not explored any more


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_mistake_of_a_rank_is_found(bug: str) -> None:
    num_slots = 1 if "abandoned" in bug else 2  # else a later ticket passes those before it
    verdict, _ = explore(Model(1, num_slots, 2, 1, 1, bug))
    assert verdict.startswith(("violation", "stuck"))
