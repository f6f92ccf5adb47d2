"""The parts of a line: bars and sparklines in the cells of a terminal."""

from __future__ import annotations

from rich.text import Text

BAR, WIDE = 24, 100  # cells of a bar; half as many in a terminal with fewer columns
SPARKS = "▁▂▃▄▅▆▇█"


def unwrapped_line() -> Text:
    """Return an empty line that is cut off at the width of the terminal."""
    return Text(no_wrap=True, overflow="ellipsis")


def append_bar(text: Text, parts: list[tuple[float, str]], width: int) -> None:
    """Append a bar of cells in proportion. Each boundary is rounded, so the total length never changes."""
    at, done, cells = 0.0, 0, BAR if width >= WIDE else BAR // 2
    for share, color in parts:
        at += share
        end = min(round(at * cells), cells)
        text.append("█" * (end - done), style=color)
        done = max(end, done)
    text.append("·" * (cells - done), style="bright_black")


def sparkline(values: list[float]) -> str:
    """Return one character per value; the highest value fills its cell."""
    top = max(values, default=0.0)
    return "".join(SPARKS[min(int(value / top * len(SPARKS)), len(SPARKS) - 1)] if top else SPARKS[0] for value in values)
