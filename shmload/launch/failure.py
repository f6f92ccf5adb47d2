"""What is said when a rank has failed: which was the first and why, with its own words, then what became of the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shmload.launch.in_rank import Report
from shmload.worker.exits import describe_exit

_BEGINS = ("Traceback (most recent call last):", "Fatal Python error:")
_GOES_ON = ("The above exception was the direct cause", "During handling of the above exception")
_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # torch.distributed's own, before tracebacks
_LAST = 20  # lines of stderr, where they hold no traceback


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        exitcode: negative: a signal's number; None: it has reported an exception and still lives.
        report: what its function has raised.
        told: it had been told to end.
        killed: it did not, and was killed.
    """

    rank: int
    pid: int
    exitcode: int | None
    report: Report | None = None
    told: bool = False
    killed: bool = False

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return not self.told and (self.report is not None or self.exitcode not in (0, None))

    def __str__(self) -> str:
        what = f"raised {self.report.what}" if self.report is not None else describe_exit(self.exitcode)
        return f"rank {self.rank} (pid {self.pid}) {what}"


def first_to_fail(endings: Sequence[Ending]) -> Ending:
    """The cause among failures that were seen at one look.

    A signal comes before exceptions, which others raise because a rank has gone; exceptions go by when they were caught.
    """
    return min(
        endings,
        key=lambda e: (
            e.report is not None or e.exitcode is None or e.exitcode > 0,
            e.report.time_s if e.report else 0.0,
        ),
    )


def failure_text(first: Ending, last: str, others: Sequence[Ending], num_ranks: int, grace_s: float) -> str:
    """The text of the error.

    Args:
        first: the cause.
        last: what it wrote last to stderr.
    """
    parts = [f"{first}, the first of {num_ranks} to fail.{_hint(first)}"]
    if first.report is not None:
        parts.append(first.report.traceback.rstrip())
    elif found := words_of(last):
        parts.append(f"It wrote last to stderr:\n{found}")
    told = [*(f"then {other}" for other in others if other.failed), *fates(others, grace_s)]
    if told:
        parts.append("\n".join(told))
    return "\n\n".join(parts)


def fates(endings: Sequence[Ending], grace_s: float) -> list[str]:
    """What became of ranks that were told to end, a line each; nothing of those that ended by themselves."""
    told = []
    if ended := [ending.rank for ending in endings if ending.told and not ending.killed]:
        told.append(f"{_ranks(ended)} ended when told to (SIGTERM)")
    if killed := [ending.rank for ending in endings if ending.told and ending.killed]:
        told.append(f"{_ranks(killed)} did not end within {grace_s:g} s of SIGTERM and had to be killed (SIGKILL)")
    return told


def words_of(last: str) -> str:
    """The last traceback in a text, with its causes and what follows it; else its last lines."""
    lines = _TORCHS_PREFIX.sub("", last.rstrip()).splitlines()
    begins = [
        number
        for number, line in enumerate(lines)
        if line.startswith(_BEGINS) and not lines[max(number - 2, 0)].startswith(_GOES_ON)
    ]
    return "\n".join(lines[begins[-1] if begins else -_LAST :])


def _hint(ending: Ending) -> str:
    if ending.exitcode == -signal.SIGKILL:
        return " If nobody killed it, the kernel did for want of memory: see dmesg, or memory.events of its cgroup."
    return ""


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
