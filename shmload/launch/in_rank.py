"""The function of a rank, called in its process; what it raises is reported to the launcher before the process comes apart.

The report is one line of JSON on a pipe that the launcher reads as it comes. It is acted on at once: a process whose libraries take
long to come apart does not keep the others waiting for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

_WHAT, _TRACEBACK = 2_000, 50_000  # characters


class RankReport(NamedTuple):
    """What a rank's function has raised.

    Attributes:
        what: type and message.
        traceback: as Python prints it.
        time_s: of the monotonic clock, when it was caught.
    """

    what: str
    traceback: str
    time_s: float


def main(fn: Callable[..., object], args: tuple[Any, ...], local_rank: int, report_fd: int) -> None:
    """Calls the function; ends the process with code 1 if it raises."""
    os.set_inheritable(report_fd, False)
    try:
        fn(local_rank, *args)
    except KeyboardInterrupt:  # it has been sent to this rank: it ends by it, without a word
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception as error:
        below = error.__traceback__ and error.__traceback__.tb_next  # without this function
        trace = traceback.format_exception(type(error), error, below)
        what = "".join(traceback.format_exception_only(error)).strip()
        report = RankReport(_cut(what, _WHAT), _cut("".join(trace), _TRACEBACK), monotonic())
        with open(report_fd, "wb", closefd=False) as file:
            file.write(json.dumps(report._asdict()).encode() + b"\n")
        sys.exit(1)


def _cut(text: str, length: int) -> str:
    """A text without its middle, where it is too long."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2]}\n  ... ({len(text) - length} characters) ...\n{text[-length // 2 :]}"


def read_report(line: bytes) -> RankReport | None:
    """What `main` has written; None if it is not whole."""
    return RankReport(**json.loads(line)) if line.endswith(b"\n") else None
