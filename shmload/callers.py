"""Where in the user's program a call into shmload came from."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch.utils.data

_INSIDE = tuple(os.path.join(os.path.dirname(str(file)), "") for file in (__file__, torch.utils.data.__file__))


def users_frame() -> tuple[FrameType, int]:
    """The nearest frame that is neither shmload's nor torch's loader's, and how far up from the asking one it is.

    The distance is what `warnings.warn` calls a stacklevel.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    return frame, level


def users_place() -> str:
    """That frame's line, "file:line in function"."""
    frame, _ = users_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
