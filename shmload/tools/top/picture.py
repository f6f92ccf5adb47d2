"""Draw all loaders of this host for a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shmload.engine.stats import Report
from shmload.tools.byte_size import size_text
from shmload.tools.counted import counted
from shmload.tools.top.bars import unwrapped_line
from shmload.tools.top.loader_panel import loader_panel
from shmload.tools.top.quantities import nbytes_text, number


def picture(look: Report, width: int, pids: Sequence[int] = ()) -> RenderableType:
    """Return the whole view.

    Args:
        look: the result of `Watch.look`.
        width: columns of the terminal.
        pids: the processes whose loaders are shown; empty if all are.
    """
    parts: list[RenderableType] = [_head(look)]
    for parent, group in groupby(look["loaders"], key=lambda loader: _job(loader)):
        loaders = list(group)
        if parent is not None:
            parts.append(_job_line(loaders))
        parts += [loader_panel(loader, width) for loader in loaders]
    if not look["loaders"]:
        whose = f" of process {' or '.join(map(str, pids))}" if pids else ""
        parts.append(Text(f"no loader{whose} is running", style="yellow"))
    for block in look["unreadable"]:
        parts.append(Text(f"{block['path']} cannot be read: {block['why']}", style="yellow"))
    if num := look["leftovers"]["num"]:
        left = f"{counted(num, 'dead loader')} left {size_text(look['leftovers']['nbytes'])}: shmload clean"
        parts.append(Text(left, style="yellow"))
    return Group(*parts)


def _job(loader: Report) -> tuple[Any, ...] | None:
    """Return the fields that the ranks of one run have in common; None for a loader that is not one of several ranks."""
    return None if loader["world_size"] < 2 else (loader["parent_pid"], loader["world_size"])


def _job_line(loaders: list[Report]) -> Text:
    ranks = sorted({loader["rank"] for loader in loaders})
    speed, nbytes = (sum(loader[name] for loader in loaders) for name in ("samples_per_s", "nbytes_per_s"))
    slowest = max(loaders, key=lambda loader: float(loader["time"]["trainer_waits"]))
    text = unwrapped_line().append(f"ranks {', '.join(map(str, ranks))} of {loaders[0]['world_size']}", style="bold")
    text.append(f"  {number(speed)} samples/s  {nbytes_text(nbytes)}/s; ")
    return text.append(f"rank {slowest['rank']} waits most: {slowest['time']['trainer_waits']:.0f} %")


def _head(look: Report) -> Text:
    totals = look["totals"]
    text = unwrapped_line().append("shmload top", style="bold")
    count = totals["num_loaders"]
    text.append(f"  {counted(count, 'loader')}, {counted(totals['num_workers'], 'worker')}")
    if count:
        text.append(f"  {number(totals['samples_per_s'])} samples/s  {nbytes_text(totals['nbytes_per_s'])}/s")
        text.append(f"  {nbytes_text(totals['ring_nbytes'])} in rings")
    return text
