"""What became of an index."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Indexed:
    """The index of one path.

    Attributes:
        path: of the index; None if there is none.
        why: there is none, or it is not new.
        is_refused: it was wanted, and could not be kept.
    """

    source: str
    path: str | None
    nbytes: int = 0
    num_samples: int = 0
    why: str = ""
    is_refused: bool = False
