"""How a process ended, in words."""

from __future__ import annotations

import signal
from typing import Any


def describe_exit(code: Any) -> str:
    """What a process's exit code says, in words."""
    if code is None:
        return "is still running"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with code {code}"
