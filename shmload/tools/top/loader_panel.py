"""Draw a loader as a panel: its progress and speed, its slots as a bar, the interval's time as a bar, the remedy, and its workers.

rich cuts off the end of a line that is too long for the terminal.
"""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from shmload.engine.stats import Report
from shmload.tools.counted import counted
from shmload.tools.top.bars import append_bar, sparkline, unwrapped_line
from shmload.tools.top.quantities import nbytes_text, number, seconds
from shmload.tools.top.workers_table import workers_table

SLOTS = (("leased", "held", "magenta"), ("ready", "ready", "green"), ("filling", "filling", "yellow"),
         ("draining", "draining", "red"), ("free", "free", "bright_black"))  # fmt: skip
TIMES = (("trainer_waits", "trainer waits", "red"), ("workers_wait", "workers wait", "magenta"), ("free", "free", "green"),
         ("start_up", "start-up", "cyan"))  # fmt: skip
BOTTLENECKS = {
    **{name: (f"bottleneck is {name}", "bold red") for name in ("source", "decode", "hand-off")},
    "trainer": ("bottleneck is trainer", "bold magenta"),
    "unknown": ("starting", "bold cyan"),
    "none": ("no one waits", "bold green"),
}


def loader_panel(loader: Report, width: int) -> Panel:
    """Return the panel of a loader, for a terminal of `width` columns."""
    return Panel(
        Group(
            *(_speed(loader, width), _slots(loader, width), _time(loader, width)),
            *([unwrapped_line().append(f"remedy: {loader['remedy']}")] if loader["remedy"] else []),
            *([_stages(loader)] if loader.get("stages") else []),
            *([_hung(loader)] if loader["is_hung"] else []),
            *([_cluster(loader["cluster"])] if loader["cluster"] is not None else []),
            workers_table(loader, width),
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


def _speed(loader: Report, width: int) -> Text:
    text = unwrapped_line()
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
    text = unwrapped_line().append("slots ")
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
    text = unwrapped_line().append("time  ")
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
    text = unwrapped_line().append("stages")
    for place, stage in enumerate(loader["stages"]):
        name = stage["name"] if stage["name"].isprintable() else repr(stage["name"])
        text.append(" → " if place else " ").append(name, style=style if stage["where"] == at_bottleneck else "")
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
    text = unwrapped_line().append("ray   ")
    count, nodes = cluster["num_actors"], len(cluster["nodes"])
    text.append(f"{counted(count, 'actor')} on {counted(nodes, 'node')}", style="bold")
    text.append(f"  {nbytes_text(cluster['nbytes_fetched_per_s'])}/s from the object store, of these")
    text.append(f" {nbytes_text(cluster['nbytes_remote_per_s'])}/s over the network")
    if replaced := cluster["num_replaced"]:
        text.append(f"  {counted(replaced, 'actor')} replaced", style="bold red")
    return text
