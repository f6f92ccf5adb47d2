"""`shmload top`: the loaders of this host (`Watch`), and their picture for a terminal of any width (`picture`).

`Watch.look` reports what has happened since the last look. Each loader is shown as a panel: its progress and speed, its slots as
a bar, the interval's time as a bar, its workers as a table. What does not fit a narrow terminal is left out, least important
first: columns of a table here, the end of a line by rich.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shmload.engine.process_usage import Process, add_memory_usage, command_of, usage_of
from shmload.engine.ring_reader import ControlBlock, HostRings, RingReader
from shmload.engine.stage_record import About
from shmload.engine.stats import Report, describe
from shmload.engine.time_shares import Snapshot

HISTORY = 60  # looks whose samples per second are kept
FINDING_SHARE = 20  # the search for loaders in /proc takes at most 1 / FINDING_SHARE of the time
FINDING_S = 2.0  # and happens at most once in this many seconds


class Watch:
    """The loaders of this host, or of some of its processes.

    Args:
        pids: trainers, or the processes that have started them. If empty, all loaders are shown.
    """

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._pids = frozenset(pids)
        self._found, self._search_at_s = HostRings([], []), 0.0
        self._known: dict[str, tuple[Snapshot, deque[float], str]] = {}  # by stem: the last look, samples/s, its command

    def look(self) -> Report:
        """Return what has happened since the last look; for a new loader, since it began.

        Returns:
            loaders, one report each (docs/top.md); totals over them; what dead ones have left; blocks that could not be read.
        """
        began = time.monotonic()
        if began >= self._search_at_s:
            self._found = RingReader.find()
            self._search_at_s = began + max(FINDING_S, FINDING_SHARE * (time.monotonic() - began))
        found = self._found
        reports, unreadable = [], []
        for block in found.blocks:
            process = usage_of(block.pid)
            if self._pids and self._pids.isdisjoint({block.pid, process and process.parent}):
                continue
            try:
                reader = RingReader.open(block.path)
                seen, about = reader.snapshot(), reader.pipeline_stages
            except (FileNotFoundError, PermissionError):  # it has closed since, or belongs to another user
                continue
            except (OSError, ValueError) as error:
                unreadable.append({"path": block.path, "uid": block.uid, "pid": block.pid, "why": str(error)})
                continue
            reports.append(self._report(block, seen, process, about))
        self._known = {report["stem"]: self._known[report["stem"]] for report in reports}
        reports.sort(key=lambda report: (report["parent_pid"] or 0, report["rank"], -report["age_s"]))
        return {
            "time_s": time.time(),
            "loaders": reports,
            "totals": totals(reports),
            "leftovers": {
                "num": len(found.leftovers),
                "nbytes": sum(leftover.nbytes for leftover in found.leftovers),
                "pids": [leftover.pid or None for leftover in found.leftovers],
            },
            "unreadable": unreadable,
        }

    def _report(self, block: ControlBlock, seen: Snapshot, process: Process | None, about: About | None) -> Report:
        known = self._known.get(block.stem)
        last, history, command = known or (None, deque(maxlen=HISTORY), command_of(block.pid))
        report = describe(seen, last)
        # elsewhere the workers' pids belong to another PID namespace, and mean other processes here
        add_memory_usage(report, seen["owner_pid"], is_known=block.pid == seen["owner_pid"])
        history.append(report["samples_per_s"])
        self._known[block.stem] = seen, history, command
        return {
            "stem": block.stem,
            "kind": block.kind,
            "uid": block.uid,
            "pid": block.pid,
            "owner_pid": seen["owner_pid"],
            "parent_pid": None if process is None else process.parent,
            "is_stopped": None if process is None else process.is_stopped,
            "command": command,
            "rank": seen["rank"],
            "world_size": seen["world_size"],
            **report,
            "stages": about and [{"name": name, "where": where} for name, where in about],
            "history": list(history),
        }


def totals(reports: list[Report]) -> Report:
    """Return the totals over all loaders."""
    summed = ("samples_per_s", "nbytes_per_s", "num_bad_samples", "num_restarts")
    return {
        "num_loaders": len(reports),
        "num_workers": sum(len(report["workers"]) for report in reports),
        "ring_nbytes": sum(report["memory"]["ring_nbytes"] for report in reports),
        **{name: sum(report[name] for report in reports) for name in summed},
    }


WORKERS_MAX = 16  # rows of a loader's table: the workers that have been busy with a sample for longest
BAR, WIDE = 24, 100  # cells of a bar; half as many in a terminal with fewer columns
LATE_S = 1.0  # seconds; a sample that takes longer is colored
SPARKS = "▁▂▃▄▅▆▇█"
SLOTS = (("leased", "held", "magenta"), ("ready", "ready", "green"), ("filling", "filling", "yellow"),
         ("draining", "draining", "red"), ("free", "free", "bright_black"))  # fmt: skip
TIMES = (("trainer_waits", "trainer waits", "red"), ("workers_wait", "workers wait", "magenta"), ("free", "free", "green"),
         ("start_up", "start-up", "cyan"))  # fmt: skip
BOTTLENECKS = {
    **{name: (f"bottleneck is {name}", "bold red") for name in ("source", "decode", "hand-off")},
    "trainer": ("bottleneck is trainer", "bold magenta"),
    "unknown": ("starting", "bold cyan"),
    "none": ("nobody waits", "bold green"),
}
# columns of the workers' table: heading -> the minimum width of the terminal that shows it, and a worker's cell
COLUMNS: dict[str, tuple[int, Callable[[Report], str]]] = {
    "pid": (0, lambda worker: str(worker["pid"] or "-")),
    "state": (0, lambda worker: "stopped" if worker["is_stopped"] else worker["state"]),
    "sample": (0, lambda worker: str(worker["index"]) if worker["state"] == "decoding" else "-"),
    "for": (0, lambda worker: "-" if worker["for_s"] is None else seconds(worker["for_s"])),
    "busy": (0, lambda worker: f"{worker['busy_share']:.0f} %"),
    "samples/s": (70, lambda worker: number(worker["samples_per_s"])),
    "restarts": (76, lambda worker: str(worker["num_restarts"] or "-")),
    "batch": (90, lambda worker: "-" if worker["step"] is None else f"{worker['epoch']}:{worker['step']}"),
    "foreign": (100, lambda worker: str(worker["num_foreign"] or "-")),
    "RSS": (110, lambda worker: "-" if worker["rss_bytes"] is None else nbytes_text(worker["rss_bytes"])),
    "node": (0, lambda worker: worker["node"] or "-"),
}


def picture(look: Report, width: int) -> RenderableType:
    """Return the whole view.

    Args:
        look: the result of `Watch.look`.
        width: columns of the terminal.
    """
    parts: list[RenderableType] = [_head(look)]
    for parent, group in groupby(look["loaders"], key=lambda loader: _job(loader)):
        loaders = list(group)
        if parent is not None:
            parts.append(_job_line(loaders))
        parts += [_panel(loader, width) for loader in loaders]
    if not look["loaders"]:
        parts.append(Text("no loader is running", style="yellow"))
    for block in look["unreadable"]:
        parts.append(Text(f"{block['path']} cannot be read: {block['why']}", style="yellow"))
    if num := look["leftovers"]["num"]:
        left = f"{num} dead loader{'s have' if num > 1 else ' has'} left {nbytes_text(look['leftovers']['nbytes'])}: shmload clean"
        parts.append(Text(left, style="yellow"))
    return Group(*parts)


def _job(loader: Report) -> tuple[Any, ...] | None:
    """Return the fields that the ranks of one run have in common; None for a loader that is not one of several ranks."""
    return None if loader["world_size"] < 2 else (loader["parent_pid"], loader["world_size"])


def _job_line(loaders: list[Report]) -> Text:
    ranks = sorted({loader["rank"] for loader in loaders})
    speed, nbytes = (sum(loader[name] for loader in loaders) for name in ("samples_per_s", "nbytes_per_s"))
    slowest = max(loaders, key=lambda loader: float(loader["time"]["trainer_waits"]))
    text = _line().append(f"ranks {', '.join(map(str, ranks))} of {loaders[0]['world_size']}", style="bold")
    text.append(f"  {number(speed)} samples/s  {nbytes_text(nbytes)}/s; ")
    return text.append(f"rank {slowest['rank']} waits most: {slowest['time']['trainer_waits']:.0f} %")


def _head(look: Report) -> Text:
    totals = look["totals"]
    text = _line().append("shmload top", style="bold")
    count = totals["num_loaders"]
    text.append(f"  {count} loader{'s' * (count != 1)}, {totals['num_workers']} workers")
    if count:
        text.append(f"  {number(totals['samples_per_s'])} samples/s  {nbytes_text(totals['nbytes_per_s'])}/s")
        text.append(f"  {nbytes_text(totals['ring_nbytes'])} in rings")
    return text


# ------------------------------------------------------------ a loader


def _panel(loader: Report, width: int) -> Panel:
    return Panel(
        Group(
            *(_speed(loader, width), _slots(loader, width), _time(loader, width)),
            *([_stages(loader)] if loader.get("stages") else []),
            *([_hung(loader)] if loader["is_hung"] else []),
            *([_cluster(loader["cluster"])] if loader["cluster"] is not None else []),
            _workers(loader, width),
        ),
        title=_title(loader),
        title_align="left",
        border_style="red" if loader["is_hung"] else "bright_black",
        box=box.ROUNDED,
        padding=(0, 1),
        width=width,
    )


def _title(loader: Report) -> Text:
    process = f"pid {loader['pid']}" if loader["pid"] else f"pid {loader['owner_pid']} of another container"
    text = Text(process, style="bold", no_wrap=True, overflow="ellipsis")
    if loader["world_size"] > 1:
        text.append(f" rank {loader['rank']}/{loader['world_size']}")
    if loader["is_stopped"]:
        text.append(" stopped", style="red")
    text.append(f" · {loader['dataset']} by {loader['read_by']} · {loader['mode']} mode", style="not bold")
    if loader["command"]:
        text.append(f" · {loader['command']}", style="not bold bright_black")
    return text


def _line() -> Text:
    return Text(no_wrap=True, overflow="ellipsis")


def _speed(loader: Report, width: int) -> Text:
    text = _line()
    epoch, num_steps = loader["epoch"], loader["num_steps"]
    text.append("no batch yet" if epoch is None else f"epoch {epoch} batch {loader['step'] + 1}")
    if num_steps:
        text.append(f" of {num_steps}" if epoch is None else f"/{num_steps}")
    text.append(f"  {number(loader['samples_per_s'])} samples/s", style="bold")
    text.append(f"  {nbytes_text(loader['nbytes_per_s'])}/s  {number(loader['batches_per_s'])} batches/s  ")
    history = loader["history"][-max(width - 70, 8) :]
    return text.append(sparkline(history) if len(history) > 2 else "", style="cyan")


def _slots(loader: Report, width: int) -> Text:
    counts = loader["slots"]
    text = _line().append("slots ")
    append_bar(text, [(counts[name] / loader["num_slots"], color) for name, _, color in SLOTS], width)
    for name, words, color in SLOTS:
        if counts[name]:
            text.append(f" {counts[name]} {words}", style=color)
    oldest = next(iter(loader["orders"]), None)
    if oldest is not None and oldest["num_chunks_done"] < oldest["num_chunks"]:
        text.append(f" (next: {oldest['num_chunks_done']}/{oldest['num_chunks']} chunks)", style="yellow")
    text.append(f"  {nbytes_text(loader['memory']['ring_nbytes'])}")
    for name in ("bad_samples", "restarts", "copied_out"):
        if count := loader[f"num_{name}"]:
            text.append(f"  {count} {name.replace('_', ' ')}", style="bold red")
    return text


def _time(loader: Report, width: int) -> Text:
    time = loader["time"]
    text = _line().append("time  ")
    append_bar(text, [(time[name] / 100, color) for name, _, color in TIMES], width)
    words, style = BOTTLENECKS[loader["bottleneck"]]
    text.append(f" {words}:", style=style)
    for name, words, color in TIMES:
        if time[name] >= 1:
            text.append(f" {words} {time[name]:.0f} %", style=color)
    return text


def _stages(loader: Report) -> Text:
    """List a pipeline's stages; those at the bottleneck have its color."""
    _, style = BOTTLENECKS[loader["bottleneck"]]
    at_bottleneck = {"decode": "workers", "trainer": "trainer"}.get(loader["bottleneck"])
    text = _line().append("stages")
    for number, stage in enumerate(loader["stages"]):
        name = stage["name"] if stage["name"].isprintable() else repr(stage["name"])
        text.append(" → " if number else " ").append(name, style=style if stage["where"] == at_bottleneck else "")
        if stage["where"] == "trainer":
            text.append(" in the trainer", style="bright_black")
    return text


def _hung(loader: Report) -> Text:
    waits = loader["waits_for"]
    text = Text(f"hung: it has waited {seconds(waits['for_s'])} ", style="bold red")
    text.append("for a batch" if waits["step"] is None else f"for batch {waits['step']} of epoch {waits['epoch']}")
    if waits["worker"] is None:
        return text.append(", which no worker has taken")
    worker = loader["workers"][waits["worker"]]
    at = f"on sample {worker['index']}" if worker["state"] == "decoding" else "filling it"
    text.append(f": worker {waits['worker']} (pid {worker['pid']}) is {at}")
    if worker["is_stopped"]:
        return text.append(" and stopped")
    return text.append(f" for {seconds(worker['for_s'])}" if worker["for_s"] else "")


def _cluster(cluster: Report) -> Text:
    text = _line().append("ray   ")
    count, nodes = cluster["num_actors"], len(cluster["nodes"])
    text.append(f"{count} actor{'s' * (count != 1)} on {nodes} node{'s' * (nodes != 1)}", style="bold")
    text.append(f"  {nbytes_text(cluster['nbytes_fetched_per_s'])}/s from the object store, of these")
    text.append(f" {nbytes_text(cluster['nbytes_remote_per_s'])}/s over the network")
    if replaced := cluster["num_replaced"]:
        text.append(f"  {replaced} actor{'s' * (replaced != 1)} replaced", style="bold red")
    return text


def _workers(loader: Report, width: int) -> RenderableType:
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
    return Group(table, Text(f"and {left} more workers", style="bright_black")) if left else table


# ------------------------------------------------------------ small things


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


def number(value: float) -> str:
    """Return a number as text: a whole number from 100 on, else with one decimal."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def nbytes_text(nbytes: float) -> str:
    """Return a number of bytes as text, in powers of 1000, as is usual for rates."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 999.5 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} B"


def seconds(value: float) -> str:
    """Return a duration as text, in ms, s or min."""
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.0f} min"
