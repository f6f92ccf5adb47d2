"""Find the line of the user's code that called this package, for warnings and messages."""

from __future__ import annotations

import os
import sys
from functools import cache
from types import FrameType


@cache
def _inside() -> tuple[str, ...]:
    """Return the folders whose code is not the user's."""
    import torch.utils.data  # here, because importing shmload alone must not import torch

    package = sys.modules[__name__.partition(".")[0]]
    return tuple(os.path.join(os.path.dirname(str(file)), "") for file in (package.__file__, torch.utils.data.__file__))


def users_frame() -> tuple[FrameType, int]:
    """Return the nearest frame outside shmload and torch's loader, and its distance from the calling frame.

    The distance is what `warnings.warn` calls a stacklevel.
    """
    inside = _inside()
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return frame, level


def users_place() -> str:
    """Return the position of the frame that `users_frame` finds, as "file:line in function"."""
    frame, _ = users_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
