"""A growing cache in `shmload top`: a bar of its budget, its rates, and what its samplers and writers do."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from shmload.growing.inspected import lines_of
from shmload.growing.library import CacheStatistics
from shmload.observe.live.view import append_bar


def cache_panel(path: Any, stats: CacheStatistics, width: int) -> Panel:
    """One cache's panel.

    Args:
        width: columns of the terminal.
    """
    full = Text("budget  ", no_wrap=True, overflow="ellipsis")
    append_bar(full, [(min(stats.nbytes / stats.capacity_bytes, 1.0), "green")], width)
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines_of(stats)]
    return Panel(Group(full, *lines), title=f"growing cache {path}", title_align="left")
