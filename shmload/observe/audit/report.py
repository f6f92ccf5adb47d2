"""What `verify` found, as plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["LISTED_MAX", "EpochReport", "Finding", "LoaderReport", "Report", "ranges"]

LISTED_MAX = 100  # findings of one kind that are told singly


@dataclass(frozen=True)
class Finding:
    """One defect. Kinds: damaged, missing, doubled, swapped, stale, replay (a batch delivered again is another), content."""

    kind: str
    text: str


@dataclass
class EpochReport:
    """One epoch of one loader (in torch mode: one pass).

    `state` is "proven" (exactly once), "unfinished" (so far exactly once; `remaining` is what is left), "consistent" (nothing wrong
    was found, and nothing says which samples it should hold) or "defect".
    """

    epoch: int
    state: str = "proven"
    num_batches: int = 0
    num_samples: int = 0  # rows that are no padding
    num_padding: int = 0
    num_skipped: int = 0
    num_substituted: int = 0
    num_superseded: int = 0  # batches that a resume rolled back
    remaining: str = ""


@dataclass
class LoaderReport:
    """One loader over all its ranks and starts."""

    title: str
    epochs: list[EpochReport] = field(default_factory=list)
    num_ranks: int = 0
    num_files: int = 0


@dataclass
class Report:
    """The verdict."""

    loaders: list[LoaderReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # why exactly-once cannot be said
    accounted: list[str] = field(default_factory=list)  # samples skipped or substituted, as on_error says
    notes: list[str] = field(default_factory=list)
    num_found: Counter[str] = field(default_factory=Counter)
    num_reread: int = 0

    def found(self, kind: str, text: str) -> None:
        """Adds a finding; beyond LISTED_MAX of a kind it is only counted."""
        self.num_found[kind] += 1
        if self.num_found[kind] <= LISTED_MAX:
            self.findings.append(Finding(kind, text))

    @property
    def status(self) -> int:
        """0: proven; 1: defects; 2: cannot be judged."""
        if self.num_found:
            return 1
        return 2 if self.unjudged or not self.loaders else 0

    @property
    def verdict(self) -> str:
        """The status in words."""
        return ("proven: every sample exactly once", "defects", "cannot be judged")[self.status]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"status": self.status, "verdict": self.verdict, **asdict(self), "num_found": dict(self.num_found)}


def ranges(numbers: list[int], most: int = 8) -> str:
    """Ascending numbers for people: "3-5, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:most])
    return shown if len(runs) <= most else f"{shown} and {len(runs) - most} more runs"
