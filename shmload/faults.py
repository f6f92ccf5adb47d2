"""Named points at which a test can inject a fault into a process. They do nothing unless armed.

`SHMLOAD_FAULTS=<folder>` arms them: a file `<point>.<anything>` in the folder arms one fault. Its content decides what happens to
the first process that reaches the point: the number of a signal that the process sends to itself (empty: SIGKILL), `exit`
(os._exit, without cleanup), or the name of an exception to raise. The process first renames the file to `spent-...-<pid>`, so
each fault triggers once, in whichever process comes first, replacements included. A test that arms SIGSTOP must also send SIGCONT.

The names of the points are listed in tests/faults/points.py. Code that runs rarely calls `hit`; code that runs for every batch uses
the decorator `at`, which returns the function unchanged unless the points were armed at import.
"""

from __future__ import annotations

import builtins
import functools
import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

EXIT_CODE = 77  # exit status of a process in which an `exit` fault was triggered

F = TypeVar("F", bound=Callable[..., Any])

_folder = os.environ.get("SHMLOAD_FAULTS", "")
armed = bool(_folder)


def at(point: str) -> Callable[[F], F]:
    """Return a decorator that places a point before every call of a function."""

    def put(function: F) -> F:
        if not armed:
            return function

        @functools.wraps(function)
        def harmed(*args: Any, **kwargs: Any) -> Any:
            hit(point)
            return function(*args, **kwargs)

        return harmed  # type: ignore[return-value]  # the signature is unchanged

    return put


def hit(point: str) -> None:
    """Trigger the fault armed at this point, if any."""
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
            raise getattr(builtins, harm)(f"injected fault at {point}")
