"""The message about a failed rank."""

from __future__ import annotations

import signal

import pytest

from shmload.launch.in_rank import RankReport, read_report
from shmload.launch.rank_failure import Ending, failure_text, first_to_fail, words_of

RAISED = RankReport("ValueError: broken", "Traceback (most recent call last):\n  ...\nValueError: broken\n", 5.0)


def test_traceback_of_the_cause_comes_first() -> None:
    others = [
        Ending(0, 10, -15, asked=True),
        Ending(2, 12, 1, RankReport("RuntimeError: connection closed", "...", 6.0)),
        Ending(3, 13, -9, asked=True, killed=True),
        Ending(4, 14, -15, asked=True),
        Ending(5, 15, 0),
        Ending(6, 16, -9, asked=True, killed=True),
    ]
    assert (
        failure_text(Ending(1, 11, 1, RAISED), "noise", others, 7, 2.5)
        == """rank 1 (pid 11) raised ValueError: broken, the first of 7 to fail.

Traceback (most recent call last):
  ...
ValueError: broken

then rank 2 (pid 12) raised RuntimeError: connection closed
ranks 0 and 4 ended when asked to (SIGTERM)
ranks 3 and 6 did not end within 2.5 s of SIGTERM and had to be killed (SIGKILL)"""
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (7, "exited with code 7, the first of 2 to fail."),
        (-11, "was killed by SIGSEGV, the first of 2 to fail."),
        (
            -9,
            "SIGKILL, the first of 2 to fail. If no one killed it, the kernel did because memory ran out: see dmesg, or memory.events",
        ),
        (-50, "was killed by signal 50, "),
    ],
)
def test_without_a_report_the_exit_and_the_last_output_are_shown(code: int, words: str) -> None:
    text = failure_text(Ending(1, 11, code), "a\nb\n", [], 2, 5)
    assert words in text
    assert text.endswith("\n\nThe end of its stderr:\na\nb")


def test_cause_of_simultaneous_failures_is_a_signal_or_the_earliest() -> None:
    late, early = Ending(0, 1, None, RAISED._replace(time_s=6.0)), Ending(1, 2, None, RAISED)
    killed = Ending(2, 3, -signal.SIGSEGV)
    assert first_to_fail([late, early]) is early
    assert first_to_fail([late, early, killed]) is killed


LOG = """loading
Traceback (most recent call last):
  an old one
ValueError: caught
going on
Traceback (most recent call last):
  File "inner"
KeyError: 1

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "outer"
ValueError: 2
"""


def test_last_traceback_is_quoted_with_its_cause() -> None:
    assert words_of(LOG) == LOG[LOG.index("going on\n") + 9 :].rstrip()


def test_torchs_prefix_is_removed() -> None:
    prefixed = "\n".join(f"[rank1]: {line}" for line in LOG.splitlines())
    assert words_of(prefixed) == words_of(LOG)


def test_crash_is_quoted_from_its_first_line() -> None:
    crash = "Fatal Python error: Segmentation fault\n\nCurrent thread (most recent call first):\n  File"
    assert words_of(f"noise\n{crash}\n") == crash


def test_without_a_traceback_twenty_lines_are_quoted() -> None:
    assert words_of("\n".join(map(str, range(50)))) == "\n".join(map(str, range(30, 50)))
    assert words_of("") == ""


def test_incomplete_report_is_ignored() -> None:
    assert read_report(b"") is None
    assert read_report(b'{"what": "Val') is None
