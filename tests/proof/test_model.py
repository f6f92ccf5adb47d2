"""Explores every interleaving of the protocol's model for small rings, and the planted bugs that must be found."""

from __future__ import annotations

import pytest

from tests.proof.model import BUGS, Model, explore

# workers, slots, chunks, batches, kills, bumps: number of states
RIGHT = {
    (1, 1, 1, 2, 1, 1): 809,
    (2, 2, 1, 2, 1, 0): 1955,
    (2, 1, 2, 2, 1, 1): 24_975,
    (2, 2, 1, 2, 1, 1): 53_347,
    (2, 2, 1, 3, 1, 1): 298_692,
}
LARGEST_FOR_BUGS = (2, 1, 2, 2, 1, 1)


@pytest.mark.slow(reason="explores every interleaving in Python, up to 300 thousand states")
@pytest.mark.parametrize(
    ("size", "states"), list(RIGHT.items()), ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else ""
)
def test_no_interleaving_breaks_the_protocol_and_all_can_terminate(size: tuple[int, ...], states: int) -> None:
    verdict, num_states = explore(Model(*size))
    assert verdict == "holds"
    assert num_states == states  # fewer would mean that some states are not explored any longer


@pytest.mark.parametrize("bug", BUGS)
def test_planted_protocol_bug_is_found(bug: str) -> None:
    verdicts = [explore(Model(*size, bug))[0] for size in ((1, 1, 1, 2, 1, 1), LARGEST_FOR_BUGS)]
    assert any(verdict.startswith(("violation", "stuck")) for verdict in verdicts)
