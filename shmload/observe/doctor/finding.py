"""What a check says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["good", "advice", "problem"]


@dataclass(frozen=True)
class Finding:
    """One sentence about the host.

    Attributes:
        check: what was looked at.
        level: "problem": something fails; "advice": it works, and could be better or deserves a look; "good".
        text: what was found and, unless it is good, what comes of it.
        remedy: what to change; empty if nothing needs to be.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def mib(nbytes: int) -> str:
    """Bytes as people say them."""
    return f"{nbytes / (1 << 30):,.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):,.0f} MiB"
