"""Get the exit code of a process, even if another part of the program has collected it first, and describe it."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

UNKNOWN_EXIT = 255  # the value that multiprocessing's fork server and asyncio use


def wait_exit_code(process: Any) -> int:
    """Wait for a multiprocessing process that has ended, and return its exit code.

    Return UNKNOWN_EXIT if the code is lost, because the program ignores SIGCHLD or waits for all of its children itself.
    multiprocessing would treat such a process as still running.
    """
    process.join()
    if process.exitcode is None:
        process._popen.returncode = UNKNOWN_EXIT
        process.join()
    return int(process.exitcode)


def wait_popen_exit_code(process: subprocess.Popen[Any]) -> int:
    """Wait for a subprocess and return its exit code, or UNKNOWN_EXIT where subprocess would return 0 for a lost code.

    Args:
        process: the process.
    """
    if process.returncode is None:
        try:
            process.returncode = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        except ChildProcessError:
            process.returncode = UNKNOWN_EXIT
    return int(process.returncode)


def describe_exit(code: Any) -> str:
    """Return a phrase for an exit code, such as "was killed by SIGKILL", to follow the name of the process."""
    if code is None:
        return "is still running"
    if code == UNKNOWN_EXIT:
        return f"exited with code {code}, or the code is unknown because the program waits for its children itself"
    if code < 0:
        names = {int(each): each.name for each in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"exited with code {code}"
