"""Recognize tables of pandas and polars without importing either."""

from __future__ import annotations

from typing import Any

_TABLES = {("pandas", "DataFrame"), ("polars", "DataFrame"), ("polars", "LazyFrame")}


def is_table(value: Any) -> bool:
    """Return whether a value is a DataFrame, whose items are columns and not rows."""
    return not _TABLES.isdisjoint((base.__module__.partition(".")[0], base.__name__) for base in type(value).__mro__)
