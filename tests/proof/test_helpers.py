"""Explores every interleaving of helpers and the trainer that admits them, and the planted bugs that must be found."""

from __future__ import annotations

import pytest

from tests.proof.helpers import BUGS, Model
from tests.proof.model import explore

# chunks, kills: number of states
RIGHT = {(1, 1): 43, (2, 2): 288, (3, 2): 945, (2, 3): 483}


@pytest.mark.parametrize(("size", "states"), RIGHT.items(), ids=str)
def test_no_interleaving_of_helpers_loses_or_steals_a_chunk(size: tuple[int, int], states: int) -> None:
    assert explore(Model(*size)) == ("holds", states)  # fewer would mean that some states are not explored any longer


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_with_a_helper_is_found(bug: str) -> None:
    verdict, _ = explore(Model(2, 2, bug))
    assert verdict.startswith(("violation", "stuck"))
