"""Write numbers, sizes, and durations as short text."""

from __future__ import annotations


def number(value: float) -> str:
    """Return a number as text: a whole number from 100 on, else with one decimal."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def nbytes_text(nbytes: float) -> str:
    """Return a number of bytes as text, in powers of 1000, as is usual for the rates that are beside it."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 999.5 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} B"


def seconds(value: float) -> str:
    """Return a duration as text, in ms, s or min."""
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.0f} min"
