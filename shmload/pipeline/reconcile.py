"""Reconcile the states that the ranks of a job saved at different steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from shmload.errors import StateMismatch
from shmload.schedule.state_checksum import CHECK, check_checksum

log = logging.getLogger("shmload")
_OF_PLACE = ("epoch", "position", "counters", "children", CHECK)  # fields of a state that depend on the position


def reconcile(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state to load on every rank, given one state of each rank.

    It is the least advanced state, so nothing is lost. Items after it that other ranks have consumed are delivered again, and a
    warning names them. After equal steps all states are equal, so any of them can be used.

    Args:
        states: states of a Conveyer or a Join, in any order.
    Raises:
        StateMismatch: the states belong to different pipelines; the message says what differs.
    """
    if not states:
        raise StateMismatch("reconcile needs the state of each rank; got none")
    first = _identity(states[0])
    for number, state in enumerate(states):
        if _identity(state) != first:
            raise StateMismatch(
                f"states 0 and {number} are of different pipelines: {first} and {_identity(state)}. Give the states of the ranks "
                "of one job"
            )
    for state in states:
        check_checksum(state)
    by_progress = sorted(states, key=_progress)
    least, most = _progress(by_progress[0]), _progress(by_progress[-1])
    if least != most:
        log.warning(
            "ranks had saved between %s and %s: all continue at the first, so ranks that were ahead get the items between again",
            _described(least),
            _described(most),
        )
    return dict(by_progress[0])


def _identity(state: Any) -> Any:
    """Return the part of a state that must be equal on all ranks."""
    try:
        _progress(state)
        if state["mode"] == "join":
            return _marks(state["members"])
        return {name: value for name, value in state.items() if name not in _OF_PLACE}
    except (TypeError, ValueError, LookupError, AttributeError):
        raise StateMismatch(f"reconcile takes states of a Conveyer or a Join as state() returns them; got {state!r:.200}") from None


def _marks(entries: list[Any]) -> list[Any]:
    """Return the texts of a Join's or a member's entries, at every depth, which identify the pipeline."""
    return [_marks(entry) if isinstance(entry, list) else entry for entry in entries if isinstance(entry, list | str)]


def _progress(state: Mapping[str, Any]) -> tuple[int, ...]:
    """Return (epoch, position), followed by the number of items consumed from the current block or from each member."""
    if state["mode"] != "join":
        return int(state["epoch"]), int(state["position"]), *map(int, state.get("counters", ()))
    _, epoch, *members = state["members"]
    return epoch, sum(count for count, _ in members)


def _described(progress: tuple[int, ...]) -> str:
    epoch, position, *counters = progress
    return f"position {position} of epoch {epoch}" + (f", counters {counters}" if counters else "")
