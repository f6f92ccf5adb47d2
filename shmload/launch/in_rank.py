"""Call a rank's function in its process, and report its exception to the launcher before the process shuts down.

The report is one line of JSON on a pipe. The launcher acts on it at once, so a process whose libraries take long to shut down does
not keep the other ranks waiting.
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

_WHAT, _TRACEBACK = 2_000, 50_000  # most characters of a report's fields


class RankReport(NamedTuple):
    """The exception that a rank's function raised.

    Attributes:
        what: its type and message.
        traceback: its traceback, as Python prints it.
        time_s: time of the monotonic clock at which it was caught.
    """

    what: str
    traceback: str
    time_s: float


def main(fn: Callable[..., object], args: tuple[Any, ...], local_rank: int, report_fd: int) -> None:
    """Call `fn(local_rank, *args)`. If it raises, write a report and end the process with exit code 1.

    Args:
        fn: the rank's function.
        args: its arguments after the local rank.
        local_rank: number of the rank on this machine.
        report_fd: the writing end of the pipe for the report.
    """
    os.set_inheritable(report_fd, False)
    try:
        fn(local_rank, *args)
    except KeyboardInterrupt:  # end by the signal, without a traceback
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
    """Cut out the middle of a text that is longer than `length`."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2]}\n  ... ({len(text) - length} characters) ...\n{text[-length // 2 :]}"


def read_report(line: bytes) -> RankReport | None:
    """Return the report from the line that `main` has written; None if the line is incomplete."""
    return RankReport(**json.loads(line)) if line.endswith(b"\n") else None
