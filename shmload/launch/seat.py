"""What a rank's process is started with, and what the launcher keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Seat:
    """One rank's place before anyone sits there.

    Attributes:
        local_rank: among the ranks of this machine.
        rank: among all.
        environ: its whole environment.
        cpus: the processors it may run on; none: all that the launcher may.
        log: the file its output goes to; "": through pipes to the launcher, which prints it.
    """

    local_rank: int
    rank: int
    environ: Mapping[str, str]
    cpus: tuple[int, ...] = ()
    log: str = ""


class Ends(NamedTuple):
    """The ends of pipes and files that a rank's process gets, by descriptor."""

    stdout: int
    stderr: int
    report: int


class Child(NamedTuple):
    """A started process: its id, and how to bury it once it has ended, which gives the exit code (negative: a signal's number)."""

    pid: int
    bury: Callable[[], int]


class Way(Protocol):
    """How a process is started."""

    def start(self, seat: Seat, ends: Ends) -> Child:
        """Starts the process of a rank; it is not waited for."""
