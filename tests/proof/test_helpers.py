"""Every interleaving of helpers and the trainer that lets them in, and the planted mistakes that must be found in them."""

from __future__ import annotations

import pytest

from tests.proof.helpers import BUGS, Model
from tests.proof.model import explore

# chunks, kills: states
RIGHT = {(1, 1): 43, (2, 2): 288, (3, 2): 945, (2, 3): 483}


@pytest.mark.parametrize(("size", "states"), RIGHT.items(), ids=str)
def test_no_interleaving_of_helpers_loses_a_chunk_or_takes_one_from_a_live_helper(size: tuple[int, int], states: int) -> None:
    assert explore(Model(*size)) == ("holds", states)  # fewer would mean that something is not explored any more


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_mistake_with_a_helper_is_found(bug: str) -> None:
    verdict, _ = explore(Model(2, 2, bug))
    assert verdict.startswith(("violation", "stuck"))
