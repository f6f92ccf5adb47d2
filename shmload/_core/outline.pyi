"""Split a batch into an outline, which marshal can write, and its leaves; and join them again."""

from typing import Any

def split(value: Any) -> tuple[Any, list[Any]]:
    """Return the outline of a value, and its leaves in the order of the structure."""

def join(outline: Any, values: list[Any]) -> Any:
    """Return the value that has this outline and these leaves."""
