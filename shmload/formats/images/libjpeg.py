"""The libjpeg-turbo that Pillow brings, called directly: it decodes what a crop needs of a JPEG, and leaves the rest out.

simplejpeg and OpenCV have a libjpeg-turbo each, but hide it. Pillow's wheels carry one as a shared library, and distributions link
Pillow with the system's. `_core.jpeg` binds whichever it is at run time; where there is none, or an old one, or one of another
interface, JPEGs are decoded whole, by simplejpeg or Pillow: the same pixels.
"""

from __future__ import annotations

import os
import re
from functools import cache

from shmload._core.jpeg import bind

LEAST_VERSION = (2, 1)  # before, cropped and skipped rows were wrong in places: libjpeg-turbo's ChangeLog, 2.0.x and 2.1


@cache
def unbound() -> str:
    """Why Pillow's libjpeg cannot be used; "" once it is bound. What is found out holds for the process."""
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
