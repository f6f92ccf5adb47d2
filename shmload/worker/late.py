"""What is said of a sample that took longer than `sample_timeout_s`, wherever its worker was."""

from __future__ import annotations

REMEDY = (
    'Raise sample_timeout_s if such a sample is all right, or give on_error="skip" or "substitute" to go on without it'
)


def late_text(what: str, limit_s: float | None, worker: int, pid: int, stack: str) -> str:
    """What took longer than its limit, whose worker was ended over it, and where that was."""
    return (
        f"{what} sample_timeout_s={limit_s}: worker {worker} (pid {pid}) was ended and is replaced. "
        f"Where it was:\n{stack}\n"
    )


def sample_at(key: object, epoch: int, row: int, step: int) -> str:
    """A sample by its place."""
    return f"sample {key} of epoch {epoch} (row {row} of batch {step})"
