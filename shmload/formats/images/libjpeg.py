"""Bind the libjpeg-turbo that Pillow uses, so that a part of an image can be decoded with it.

Pillow's wheels contain libjpeg-turbo as a shared library, and Linux distributions link Pillow with the system's. `_core.jpeg` binds
either at run time, unless it is too old or has another interface.
"""

from __future__ import annotations

import os
import re
from functools import cache

from shmload._core.jpeg import bind

HINT = "pip install 'shmload[images]'"
LEAST_VERSION = (2, 1)  # of libjpeg-turbo: the oldest version that was tested


@cache
def unbound() -> str:
    """Bind Pillow's libjpeg. Return why it cannot be used, or "" on success. The result is cached for the process."""
    try:
        from PIL import _imaging as native
    except ImportError as error:
        return f"Pillow is needed: {error}"
    version = str(getattr(native, "libjpeg_turbo_version", "none"))
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST_VERSION:
        return f"Pillow with libjpeg-turbo {'.'.join(map(str, LEAST_VERSION))} or later is needed; it has {version}"
    try:
        bind(os.fsencode(native.__file__ or ""))
    except ImportError as error:
        return str(error)
    return ""
