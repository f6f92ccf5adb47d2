"""Sizes on the command line, such as 100MB."""

import math
import re

__all__ = ["parse_size"]

UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_FORM = re.compile(r"\s*([0-9.]+(?:e[+]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """Return a number of bytes.

    Args:
        text: a number, such as 1000000, 1e8 or 2.5, and a unit of `UNITS` in any case; without a unit it is bytes.
        option: name of the option, for the error.
    Raises:
        ValueError: the text has another form, or the number is not finite.
    """
    found = _FORM.fullmatch(text)
    try:
        nbytes = float(found[1]) * UNITS[found[2].lower()] if found else math.nan
    except (ValueError, KeyError):
        nbytes = math.nan
    if not math.isfinite(nbytes):
        raise ValueError(f"{option}: needs a size such as 100MB, 64MiB or 2e8 (bytes), got {text!r}")
    return int(nbytes)
