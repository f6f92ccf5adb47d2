"""Checks the outcome of a cell of the fault matrix against its promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.matrix_cells import HARMS, Cell
from tests.faults.matrix_data import NUM_BATCHES_READ, NUM_WORKERS

REACTION_S = 2.0  # from the harm to the next batch or error, and from a trainer's death to the end of its descendants
NOTICE_S = 0.1  # from a worker's death until the trainer notices it
EXITS = {"SIGKILL": -9, "SIGSEGV": -11, "SIGTERM": -15, "os._exit": 77}


@dataclass
class Outcome:
    """Observations of one cell. Times are in seconds, or None for an event that did not happen."""

    events: list[dict[str, Any]]
    exit_code: int | None  # of the trainer; negative for a signal; None if it hung and was killed
    harmed_at: float | None
    died_at: float | None = None  # when the killed worker was seen dead
    gone_s: float = 0.0  # from the trainer's end to that of its last descendant
    survivors: list[str] = field(default_factory=list)
    names_left: list[str] = field(default_factory=list)
    was_reached: bool = True

    @property
    def reaction_s(self) -> float | None:
        """Returns the seconds from the harm to the next batch, error or end."""
        return self._first_after(self.harmed_at, "batch", "error", "end", "left")

    @property
    def notice_s(self) -> float | None:
        """Returns the seconds from a worker's death until the trainer notices it."""
        return self._first_after(self.died_at, "noticed", "error")

    def _first_after(self, since: float | None, *kinds: str) -> float | None:
        if since is None:
            return None
        return next((event["at"] - since for event in self.events if event["kind"] in kinds and event["at"] >= since), None)


def defects(cell: Cell, outcome: Outcome, expected: Sequence[Sequence[str]]) -> list[str]:
    """Returns every broken promise of a cell, apart from delays."""
    found = []
    if not outcome.was_reached:
        found.append("the point was not reached")
    found += _stream_defects(outcome.events, expected, is_cut=cell.promise == "gone")
    errors = [event for event in outcome.events if event["kind"] == "error"]
    if cell.promise == "error":
        found += _error_defects(cell, errors)
    else:
        found += [f"unexpected error: {error['type']}: {error['text'][:200]}" for error in errors]
    found += [f"the trainer's program failed: {event['text']}" for event in outcome.events if event["kind"] == "failed"]
    wanted = EXITS[cell.harm] if cell.promise == "gone" else 0
    if outcome.exit_code is None:
        found.append(f"it hung after {[e['kind'] for e in outcome.events[-3:]]}")
    elif outcome.exit_code != wanted:
        found.append(f"the trainer ended with {outcome.exit_code}, not {wanted}")
    elif cell.promise != "gone":
        left = next((dict(event) for event in outcome.events if event["kind"] == "left"), None)
        found += ["it did not finish"] if left is None else _left_defects(left)
        slots = next((event for event in outcome.events if event["kind"] == "slots"), None)
        if slots is not None and (slots["held"] or slots["leased"]):
            found.append(f"slots not released: {slots['held']} held, {slots['leased']} leased")
        if slots is not None and slots["pool"] != NUM_WORKERS:
            found.append(f"{slots['pool']} workers are left")
    found += [f"a process survived: {words}" for words in outcome.survivors]
    found += [f"a name is left: {name}" for name in outcome.names_left]
    return found


def delays(cell: Cell, outcome: Outcome, start_s: float, time_factor: float = 1.0) -> list[str]:
    """Returns every exceeded time limit. On a busy machine only repeated delays mean something.

    Args:
        start_s: duration of an undisturbed start; a new worker may have to import as much as the first ones.
        time_factor: factor for every limit.
    """
    found = []
    reaction_s, notice_s = outcome.reaction_s, outcome.notice_s
    if cell.promise != "gone" and reaction_s is not None and reaction_s > time_factor * (REACTION_S + start_s):
        found.append(f"no event for {reaction_s:.2f} s")
    if outcome.gone_s > time_factor * (REACTION_S + start_s):
        found.append(f"the last process ended {outcome.gone_s:.2f} s after the trainer")
    kills_worker = not cell.is_trainers and cell.harm != "STOP+CONT" and cell.point != "leaving"
    if kills_worker and notice_s is not None and notice_s > time_factor * NOTICE_S:
        found.append(f"noticed after {notice_s:.2f} s")
    return found


def _stream_defects(events: Sequence[dict[str, Any]], expected: Sequence[Sequence[str]], *, is_cut: bool) -> list[str]:
    """Finds missing and wrong batches. After an error one may be missing; after WorkerDied, the rest of the epoch."""
    found = []
    epoch, at, num_lost, is_lost = -1, 0, 0, False
    for event in events:
        kind = event["kind"]
        if kind == "epoch":
            epoch, at, num_lost, is_lost = event["epoch"], 0, 0, False
        elif kind == "error":
            num_lost, is_lost = 1, event["type"] == "WorkerDied"
        elif kind == "batch":
            skipped = next((n for n in range(num_lost + 1) if event["digest"] in expected[epoch][at + n : at + n + 1]), None)
            if skipped is None:
                found.append(f"batch {at} of epoch {epoch} differs")
            at, num_lost = at + 1 + (skipped or 0), 0
        elif kind == "end" and not len(expected[epoch]) - num_lost <= at <= len(expected[epoch]) and not is_lost:
            found.append(f"epoch {epoch} ended after batch {at - 1}")
    if not is_cut and epoch + 1 != len(NUM_BATCHES_READ):
        found.append(f"it ended in epoch {epoch}")
    return found


def _error_defects(cell: Cell, errors: Sequence[dict[str, Any]]) -> list[str]:
    if len(errors) != 1:
        return [f"{len(errors)} errors instead of one: {[(e['type'], e['text'][-300:]) for e in errors]}"]
    error = errors[0]
    if cell.is_raised and (cell.is_trainers or error["type"] != "WorkerDied"):
        kind, text = HARMS[cell.harm], f"injected fault at {cell.point}"
    else:
        kind, text = "WorkerDied", "exited unexpectedly"
    if error["type"] != kind or text not in error["text"]:
        return [f"not {kind} with {text!r}, but {error['type']}: {error['text'][-300:]}"]
    return []


def _left_defects(left: dict[str, Any]) -> list[str]:
    return [f"{name} not as before: {value}" for name, value in left.items() if name not in ("kind", "at")]
