"""Explores every interleaving of the workers' requests to the trainer, and the planted bugs that must be found."""

from __future__ import annotations

import pytest

from tests.proof.asking import BUGS, Model
from tests.proof.model import explore

# workers, kills, bumps: number of states
RIGHT = {(1, 1, 1): 489, (2, 1, 0): 6809, (2, 1, 1): 31_892, (2, 2, 0): 12_700, (2, 0, 2): 20_907}


@pytest.mark.slow(reason="explores every interleaving in Python, up to 32 thousand states")
@pytest.mark.parametrize(("size", "states"), RIGHT.items(), ids=str)
def test_no_interleaving_of_requests_breaks_an_invariant_and_all_can_terminate(size: tuple[int, int, int], states: int) -> None:
    assert explore(Model(*size)) == ("holds", states)  # fewer would mean that some states are not explored any longer


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_in_a_request_is_found(bug: str) -> None:
    verdict, _ = explore(Model(2, 1, 0, bug))
    assert verdict.startswith(("violation", "stuck"))
