"""Describe the failure of a run: which rank failed first, its own traceback, and how the others ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shmload.launch.in_rank import RankReport
from shmload.processes.exit_codes import describe_exit

_BEGINS = ("Traceback (most recent call last):", "Fatal Python error:")
_GOES_ON = ("The above exception was the direct cause", "During handling of the above exception")
_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # torch.distributed prints it before tracebacks
_LAST = 20  # lines of stderr to quote if they contain no traceback


@dataclass
class Ending:
    """The end of a rank, or its state while it still runs.

    Attributes:
        rank: its number among all ranks.
        pid: its process id.
        exitcode: its exit code, negative for a signal; None while it runs.
        report: the exception that its function raised; None without one.
        asked: whether it was asked to end.
        killed: whether it did not end when asked, and was killed.
    """

    rank: int
    pid: int
    exitcode: int | None = None
    report: RankReport | None = None
    asked: bool = False
    killed: bool = False

    @property
    def failed(self) -> bool:
        """Return whether it failed without being asked to end."""
        return not self.asked and (self.report is not None or self.exitcode not in (0, None))

    def __str__(self) -> str:
        what = f"raised {self.report.what}" if self.report is not None else describe_exit(self.exitcode)
        return f"rank {self.rank} (pid {self.pid}) {what}"


def first_to_fail(endings: Sequence[Ending]) -> Ending:
    """Return the likely cause among failures that were detected together.

    A rank that was killed by a signal comes before ranks with exceptions, because other ranks raise when a rank has ended.
    Exceptions are ordered by the time at which they were caught.

    Args:
        endings: the failures.
    """
    return min(
        endings, key=lambda e: (e.report is not None or e.exitcode is None or e.exitcode > 0, e.report.time_s if e.report else 0.0)
    )


def failure_text(first: Ending, last: str, others: Sequence[Ending], num_ranks: int, grace_s: float) -> str:
    """Return the text of the error for a failed run.

    Args:
        first: the rank that failed first.
        last: the end of its stderr.
        others: the endings of the other ranks.
        num_ranks: number of ranks of this machine.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    hint = ""
    if first.exitcode == -signal.SIGKILL:
        hint = " If no one killed it, the kernel did because memory ran out: see dmesg, or memory.events of its cgroup."
    parts = [f"{first}, the first of {num_ranks} to fail.{hint}"]
    if first.report is not None:
        parts.append(first.report.traceback.rstrip())
    elif found := words_of(last):
        parts.append(f"The end of its stderr:\n{found}")
    if lines := [*(f"then {other}" for other in others if other.failed), *fates(others, grace_s)]:
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def fates(endings: Sequence[Ending], grace_s: float) -> list[str]:
    """Return one line for the ranks that ended when asked, and one for those that were killed; none for others.

    Args:
        endings: the endings of ranks.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    found = []
    for killed, what in (
        (False, "ended when asked to (SIGTERM)"),
        (True, f"did not end within {grace_s:g} s of SIGTERM and had to be killed (SIGKILL)"),
    ):
        names = [str(ending.rank) for ending in endings if ending.asked and ending.killed is killed]
        if names:
            who = f"ranks {', '.join(names[:-1])} and {names[-1]}" if names[1:] else f"rank {names[0]}"
            found.append(f"{who} {what}")
    return found


def words_of(last: str) -> str:
    """Return the last traceback in a text, with its causes and what follows it, or else the last lines.

    Args:
        last: the end of a rank's stderr.
    """
    lines = _TORCHS_PREFIX.sub("", last.rstrip()).splitlines()
    begins = [
        number
        for number, line in enumerate(lines)
        if line.startswith(_BEGINS) and not lines[max(number - 2, 0)].startswith(_GOES_ON)
    ]
    return "\n".join(lines[begins[-1] if begins else -_LAST :])
