"""Named points at which a test can make a process die, inert unless armed.

`SHMLOAD_FAULTS=<folder>` arms them: a file `<point>.<anything>` in the folder is a charge, whose content is a signal number.
The first process to reach the point removes the file and, if it was the one that did, kills itself with that signal; so a charge
goes off once, whoever comes first, replacements included.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "start",
    "before_claim",
    "after_claim",
    "mid_decode",
    "before_layout",
    "while_asking_layout",
    "waiting_layout",
    "waiting_grant",
    "before_finish",
    "after_finish",
    "before_post",
)
_folder = os.environ.get("SHMLOAD_FAULTS", "")
armed = bool(_folder)


def hit(point: str) -> None:
    """Dies here if a charge lies at this point."""
    if not armed:
        return
    for name in sorted(os.listdir(_folder)):
        if not name.startswith(point + "."):
            continue
        path = os.path.join(_folder, name)
        try:
            with open(path) as file:
                number = int(file.read() or signal.SIGKILL)
            os.rename(path, os.path.join(_folder, f"spent-{name}-{os.getpid()}"))
        except FileNotFoundError:
            continue
        os.kill(os.getpid(), number)
