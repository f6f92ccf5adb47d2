"""The result of `verify`: the contents of each epoch, the defects found, and the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

LISTED_MAX = 100  # findings of one kind that are listed


PROVEN, DEFECTS, UNJUDGED, UNFINISHED = 0, 1, 3, 4  # the status of a report and of the command; 2 means bad usage


@dataclass(frozen=True)
class AuditFinding:
    """One defect.

    Attributes:
        kind: "damaged" (a file), "missing" or "doubled" (samples or batches), "swapped" (other samples than expected, or batches
            out of order), "replay" (a batch delivered again differs), or "content" (a batch read again for the check differs).
        text: what is wrong, and in which file, epoch or step.
    """

    kind: str
    text: str


@dataclass
class EpochReport:
    """One epoch of one loader (in torch mode: one pass).

    `state` is "proven" (exactly once), "unfinished" (exactly once so far; `remaining` describes the rest), "consistent" (no error
    was found, but the expected samples are unknown) or "defect".
    """

    epoch: int
    state: str = "proven"
    num_batches: int = 0
    num_samples: int = 0  # rows that are not padding
    num_padding: int = 0
    num_skipped: int = 0
    num_substituted: int = 0
    num_left_out: int = 0  # samples of a proven epoch that drop_last or uneven="drop" leaves out
    num_superseded: int = 0  # batches that a resume rolled back
    remaining: str = ""
    num_expected: int | None = None  # samples of the whole epoch over all ranks; None if it is endless, or if that is unknown

    @property
    def so_far(self) -> str:
        """Return the progress of an unfinished epoch as text."""
        whole = "" if self.num_expected is None else f" of {self.num_expected:,}"
        return f"epoch {self.epoch} so far: {self.num_samples:,}{whole} samples, each once"


@dataclass
class AuditedLoader:
    """One loader over all its ranks and starts."""

    title: str
    epochs: list[EpochReport] = field(default_factory=list)
    num_ranks: int = 0
    num_files: int = 0


@dataclass
class AuditReport:
    """The result of an audit: loaders, findings and a verdict."""

    loaders: list[AuditedLoader] = field(default_factory=list)
    findings: list[AuditFinding] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # reasons why exactly-once delivery cannot be judged
    accounted: list[str] = field(default_factory=list)  # samples skipped or substituted, as on_error demands
    notes: list[str] = field(default_factory=list)
    num_found: Counter[str] = field(default_factory=Counter)
    num_reread: int = 0  # batches read again for the check

    def found(self, kind: str, text: str) -> None:
        """Add a finding; beyond LISTED_MAX of a kind it is only counted."""
        self.num_found[kind] += 1
        if self.num_found[kind] <= LISTED_MAX:
            self.findings.append(AuditFinding(kind, text))

    @property
    def status(self) -> int:
        """Return PROVEN, DEFECTS, UNJUDGED or UNFINISHED."""
        if self.num_found:
            return DEFECTS
        if self.unjudged or not self.loaders:
            return UNJUDGED
        return UNFINISHED if self._unfinished else PROVEN

    @property
    def verdict(self) -> str:
        """Return the status as text."""
        if self.status == UNFINISHED:
            return "; ".join(self._unfinished)
        return {PROVEN: self._proven, DEFECTS: "defects", UNJUDGED: "cannot be judged"}[self.status]

    @property
    def _proven(self) -> str:
        num_left_out = max((epoch.num_left_out for loader in self.loaders for epoch in loader.epochs), default=0)
        rule = f', except {num_left_out:,} of an epoch, which drop_last or uneven="drop" leaves out' if num_left_out else ""
        return f"proven: every sample exactly once{rule}"

    @property
    def _unfinished(self) -> list[str]:
        titles = {id(loader): f"{loader.title}: " if len(self.loaders) > 1 else "" for loader in self.loaders}
        epochs = [(titles[id(loader)], epoch) for loader in self.loaders for epoch in loader.epochs]
        return [f"{title}{epoch.so_far}" for title, epoch in epochs if epoch.state == "unfinished"]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {"status": self.status, "verdict": self.verdict, **asdict(self), "num_found": dict(self.num_found)}


Keys = NDArray[np.int64]


def ranges(numbers: list[int] | Keys, most: int = 8) -> str:
    """Return ascending numbers (at least one) as readable text: "3-5, 9"."""
    every = np.asarray(numbers)
    last = np.append(np.flatnonzero(np.diff(every) != 1), len(every) - 1)  # the end of each run
    runs = zip(every[np.insert(last[:-1] + 1, 0, 0)[:most]].tolist(), every[last[:most]].tolist(), strict=True)
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return shown if len(last) <= most else f"{shown} and {len(last) - most} more runs"
