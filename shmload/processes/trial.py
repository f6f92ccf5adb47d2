"""Mark a process that only tries out a dataset: what the dataset shares with other processes must not change there."""

from __future__ import annotations

_is_trial = False


def begin_trial() -> None:
    """Mark this process, until it ends."""
    global _is_trial
    _is_trial = True


def is_trial() -> bool:
    """Return whether this process only tries out a dataset."""
    return _is_trial
