"""`shmload trace`: record what the processes of a running loader do, as a file for Perfetto.

Exit code 0: success; 1: no loader was found, or the file could not be written; 2: bad usage.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from shmload.cli.terminal import check_folder, refuse


def trace(
    out: Annotated[Path, typer.Option(metavar="FILE.json", help="Trace file to write; ui.perfetto.dev opens it.")],
    pid: Annotated[int | None, typer.Option(help="Process ID of the training process.", show_default="every loader")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds to record; 0: only what has been recorded so far.")] = 5.0,
) -> None:
    """Record what trainer and workers of running loaders do, from outside and without disturbing them."""
    from rich.console import Console

    from shmload.engine.tracing.ring_timeline import timelines_of
    from shmload.engine.tracing.trace_file import write
    from shmload.tools.trace_recording import TraceRecording

    check_folder("trace", out)
    recording = TraceRecording(pid)
    recording.search()
    if recording.event_logs:
        try:
            with Console(stderr=True).status(f"recording for {seconds:g} s") if sys.stderr.isatty() else nullcontext():
                recording.record(seconds)
        except KeyboardInterrupt:
            typer.echo("shmload trace: interrupted; writing what was recorded so far", err=True)
    timelines = timelines_of(recording.event_logs.values())
    if not timelines:
        whose = "no loader with workers runs on this machine" if pid is None else f"process {pid} has no loader with workers"
        typer.echo(f"shmload trace: {whose}, or it has done nothing", err=True)
        for why in recording.refused.values():
            typer.echo(f"shmload trace: left out {why}", err=True)
        raise typer.Exit(1)
    try:
        write(timelines, out)
    except OSError as error:
        refuse("trace", f"{out}: {error.strerror}", 1)
    num_batches = sum(timeline.num_batches for timeline in timelines)
    num_lost = sum(timeline.num_lost for timeline in timelines)
    pids = ", ".join(map(str, dict.fromkeys(timeline.owner_pid for timeline in timelines)))
    lost = f"; {num_lost:,} events were overwritten before they were read" if num_lost else ""
    typer.echo(f"{out}: {num_batches:,} batches of process {pids}{lost}; open it in https://ui.perfetto.dev")
