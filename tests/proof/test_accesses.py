"""Explores the slot protocol at the level of single shared accesses: every interleaving of small rings, and planted bugs to be
found.

accesses.c documents the model; its first comment has the figures of larger rings, which were run by hand.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("accesses.c")

Explore = Callable[[str], tuple[str, int, str]]

# Parameters and the number of states. Fewer states would mean that some are not explored any longer.
RIGHT = {
    "W=2 S=2 C=2 B=2 kills=1 bumps=1": 1_020_756,
    "W=2 S=3 C=1 B=2 kills=1 bumps=1": 251_826,
    "W=3 S=2 C=2 R=1 B=2 kills=1": 342_427,
    "W=2 S=1 C=2 B=3 kills=2 bumps=1 fail=1 odd=2 poison=1 early=1": 1_072_263,
    "W=2 S=2 C=2 B=2 kills=2 poison=1": 2_120_291,
    "W=2 S=2 C=2 B=2 kills=1 bumps=1 early=1": 1_825_321,
    "W=2 S=2 C=2 B=2 kills=1 bumps=1 fail=3": 1_413_964,
    "W=2 S=2 C=2 B=2 kills=1 fail=1 odd=2": 97_340,
    "W=2 S=2 C=1 B=4 kills=2 bumps=1 static=1": 322_835,
    "W=2 S=3 C=1 B=3 kills=1 bumps=1 static=1": 806_340,
    "W=2 S=1 C=2 R=1 B=2 kills=1 bumps=1 bells=1 timed=0": 1_374_950,
    "W=2 S=2 C=2 R=1 B=2 kills=1 bells=1 timed=0": 1_184_027,
    "W=2 S=2 C=1 R=1 B=2 kills=1 bells=1 timed=0 static=1": 116_636,
    "W=2 S=2 C=1 R=1 B=2 bumps=1 bells=1 timed=0 static=1": 611_900,
    "W=2 S=1 C=2 R=1 B=2 kills=1 bells=1 timed=1 lost=1": 383_734,
}

# Each bug with the smallest ring that shows it, and the resulting verdict.
PLANTED = {
    "worker_moves_state": ("W=2 S=1 C=2 B=2", "violation"),
    "ticket_then_claim": ("W=1 S=1 C=1 B=1 kills=1", "stuck"),
    "remaining_counter": ("W=1 S=1 C=1 B=1 kills=1", "stuck"),
    "words_without_order": ("W=2 S=1 C=1 B=2", "violation"),
    "free_at_bump": ("W=1 S=1 C=1 B=1 bumps=1", "violation"),
    "void_by_store": ("W=1 S=1 C=1 B=1 bumps=1", "violation"),
    "recover_live": ("W=1 S=1 C=1 B=1 kills=1", "violation"),
    "respawn_first": ("W=1 S=1 C=1 B=1 kills=1", "violation"),
    "recover_skips_draining": ("W=1 S=1 C=1 B=1 kills=1 bumps=1", "violation"),
    "recover_keeps_err": ("W=1 S=1 C=1 B=1 kills=1 fail=1", "violation"),
    "words_before_fields": ("W=1 S=1 C=1 B=2", "violation"),
    "no_copy_out": ("W=1 S=2 C=1 B=3", "stuck"),
    "bell_only_when_all_done": ("W=1 S=1 C=2 B=1 bumps=1 bells=1 timed=0", "stuck"),
    "error_first_come": ("W=2 S=1 C=2 B=1 fail=3", "violation"),
    "void_counts_as_done": ("W=1 S=1 C=2 B=1 odd=1", "violation"),
    "repack_by_mark_only": ("W=2 S=1 C=2 B=1 odd=1 kills=1", "stuck"),
    "blame_by_order": ("W=1 S=1 C=2 B=1 poison=1 kills=1", "violation"),
    "static_ignores_last_order": ("W=1 S=2 C=1 B=2 static=1 bells=1", "violation"),
    "static_shared_bell": ("W=2 S=1 C=1 B=2 static=1 bells=1 timed=0", "stuck"),
    "look_then_empty": ("W=1 S=1 C=1 B=1 bells=1 timed=0", "stuck"),
    "awaits_after_look": ("W=1 S=1 C=1 B=1 bells=1 timed=0", "stuck"),
    "awaits_nothing_if_unpublished": ("W=1 S=1 C=1 B=1 bumps=1 bells=1 timed=0", "stuck"),
    "sleep_on_next_only": ("W=1 S=1 C=1 B=1 bumps=1 bells=1 timed=0", "stuck"),
    "deaths_ring_nothing": ("W=1 S=1 C=1 B=1 kills=1 bells=1 timed=0", "stuck"),
}


@pytest.fixture(scope="module")
def explore(tmp_path_factory: pytest.TempPathFactory) -> Explore:
    """Returns a function that explores with given parameters and returns (verdict, number of states, output)."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    binary = tmp_path_factory.mktemp("accesses") / "accesses"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    done = subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(binary)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

    def explore(parameters: str) -> tuple[str, int, str]:
        done = subprocess.run([str(binary), *parameters.split()], capture_output=True, text=True, timeout=100)
        assert done.returncode in (0, 3, 4, 5), done.stderr
        verdict, states, _ = done.stdout.splitlines()[-1].split()
        return verdict, int(states.removeprefix("states=")), done.stdout

    return explore


@pytest.mark.slow(reason="explores every interleaving, up to two million states")
@pytest.mark.parametrize(("parameters", "states"), RIGHT.items())
def test_no_interleaving_of_accesses_breaks_the_protocol_and_all_terminate(explore: Explore, parameters: str, states: int) -> None:
    verdict, num_states, output = explore(parameters)
    assert verdict == "holds", output
    assert num_states == states


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found_and_the_same_ring_without_it_holds(explore: Explore, bug: str) -> None:
    parameters, expected = PLANTED[bug]
    verdict, _, output = explore(f"{parameters} bug={bug}")
    assert verdict == expected, output
    assert explore(parameters)[0] == "holds"


def test_every_bug_of_the_model_is_in_the_table() -> None:
    known = [line.split("(")[1].split(")")[0] for line in SOURCE.read_text().splitlines() if line.startswith("    X(")]
    assert ["none", *PLANTED] == known


def test_lost_post_stops_only_a_ring_without_timeouts(explore: Explore) -> None:
    ring = "W=1 S=1 C=1 B=1 bells=1 lost=1"
    assert explore(f"{ring} timed=0")[0] == "stuck"
    assert explore(f"{ring} timed=1")[0] == "holds"


def test_violation_is_reported_with_the_steps_that_lead_to_it(explore: Explore) -> None:
    *way, why, verdict = explore("W=1 S=1 C=1 B=1 bumps=1 bug=free_at_bump trace=1")[2].splitlines()
    assert any("claims" in step for step in way)
    assert "bump" in " ".join(way)
    assert why == "a free or leased slot has an open or a claimed word"
    assert verdict.startswith("violation ")
