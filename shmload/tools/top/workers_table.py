"""Draw the workers of a loader as a table. Narrow terminals show fewer columns."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shmload.engine.stats import Report
from shmload.tools.counted import counted
from shmload.tools.top.quantities import nbytes_text, number, seconds

WORKERS_MAX = 16  # rows of a loader's table: the workers that have been busy with a sample for longest
LATE_S = 1.0  # seconds; a sample that takes longer is colored
# columns of the workers' table: heading -> the minimum width of the terminal that shows it, and a worker's cell
COLUMNS: dict[str, tuple[int, Callable[[Report], str]]] = {
    "pid": (0, lambda worker: str(worker["pid"] or "-")),
    "state": (0, lambda worker: "stopped" if worker["is_stopped"] else worker["state"]),
    "sample": (0, lambda worker: str(worker["index"]) if worker["state"] == "decoding" else "-"),
    "for": (0, lambda worker: "-" if worker["for_s"] is None else seconds(worker["for_s"])),
    "busy": (0, lambda worker: f"{worker['busy_share']:.0%}".replace("%", " %")),
    "samples/s": (70, lambda worker: number(worker["samples_per_s"])),
    "restarts": (76, lambda worker: str(worker["num_restarts"] or "-")),
    "batch": (90, lambda worker: "-" if worker["step"] is None else f"{worker['epoch']}:{worker['step']}"),
    "foreign": (100, lambda worker: str(worker["num_foreign"] or "-")),
    "RSS": (110, lambda worker: "-" if worker["rss_bytes"] is None else nbytes_text(worker["rss_bytes"])),
    "node": (0, lambda worker: worker["node"] or "-"),
}


def workers_table(loader: Report, width: int) -> RenderableType:
    """Return the table of a loader's workers, for a terminal of `width` columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    is_far = loader["cluster"] is not None
    columns = [name for name, (least, _) in COLUMNS.items() if width >= least and (is_far or name != "node")]
    for name in ("worker", *columns):
        table.add_column(name, justify="left" if name in ("state", "batch", "node") else "right", no_wrap=True)
    numbered = list(enumerate(loader["workers"]))
    if len(numbered) > WORKERS_MAX:
        numbered = sorted(sorted(numbered, key=lambda one: -(one[1]["for_s"] or 0.0))[:WORKERS_MAX])
    for index, worker in numbered:
        is_late = (worker["for_s"] or 0.0) >= LATE_S
        style = "red" if worker["is_stopped"] else "yellow" if is_late else None
        table.add_row(str(index), *(COLUMNS[name][1](worker) for name in columns), style=style)
    left = len(loader["workers"]) - len(numbered)
    return Group(table, Text(f"and {counted(left, 'more worker')}", style="bright_black")) if left else table
