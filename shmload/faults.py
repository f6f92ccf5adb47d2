"""Named points at which a test can harm a process, inert unless armed.

`SHMLOAD_FAULTS=<folder>` arms them: a file `<point>.<anything>` in the folder is a charge. Its content says what happens to the
first process that reaches the point: the number of a signal that it sends itself (none: SIGKILL), `exit` (os._exit, no clean-up),
or the name of an exception that is raised there. That process renames the file to `spent-...-<pid>` first; so a charge goes off
once, whoever comes first, replacements included. Who lays a charge of SIGSTOP sends the SIGCONT, too.

The points' names stand in tests/faults/points.py. What runs once or seldom calls `hit`. On the way of every batch stands `at`,
which leaves the function as it is unless the points were armed when it was imported.
"""

from __future__ import annotations

import builtins
import functools
import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

EXIT_CODE = 77  # of a process that a charge has made exit

F = TypeVar("F", bound=Callable[..., Any])

_folder = os.environ.get("SHMLOAD_FAULTS", "")
armed = bool(_folder)


def at(point: str) -> Callable[[F], F]:
    """Puts a point before every call of a function."""

    def put(function: F) -> F:
        if not armed:
            return function

        @functools.wraps(function)
        def harmed(*args: Any, **kwargs: Any) -> Any:
            hit(point)
            return function(*args, **kwargs)

        return harmed  # type: ignore[return-value]  # the same signature

    return put


def hit(point: str) -> None:
    """Comes to harm here if a charge lies at this point."""
    if not armed:
        return
    for name in sorted(os.listdir(_folder)):
        if not name.startswith(point + "."):
            continue
        path = os.path.join(_folder, name)
        try:
            with open(path) as file:
                harm = file.read() or str(int(signal.SIGKILL))
            os.rename(path, os.path.join(_folder, f"spent-{name}-{os.getpid()}"))
        except FileNotFoundError:
            continue
        if harm.isdigit():
            os.kill(os.getpid(), int(harm))
        elif harm == "exit":
            os._exit(EXIT_CODE)
        else:
            raise getattr(builtins, harm)(f"a charge lay at {point}")
