"""`shmload trace`: record what the processes of a running loader do, as a file for Perfetto.

Exit code 0: success; 1: no loader runs, or the file could not be written; 2: bad usage, or the process of --pid has no loader.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from shmload.cli.terminal import check_folder, refuse
from shmload.tools.counted import counted

DEFAULT_OUT = Path("trace.json")


def trace(
    out: Annotated[Path, typer.Option(metavar="FILE.json", help="Trace file to write; ui.perfetto.dev opens it.")] = DEFAULT_OUT,
    pid: Annotated[
        int | None, typer.Option(help="ID of the training process, or of its parent.", show_default="every loader")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds to record; 0: only what has been recorded so far.")] = 5.0,
) -> None:
    """Record what trainer and workers of running loaders do, from outside and without disturbing them.

    Without --pid, the file contains all of your loaders on this host, such as the ranks of a run, each with rows of its own.
    """
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
        raise typer.Exit(1 if pid is None else 2)
    try:
        write(timelines, out)
    except OSError as error:
        refuse("trace", f"{out}: {error.strerror}", 1)
    num_batches = sum(timeline.num_batches for timeline in timelines)
    num_lost = sum(timeline.num_lost for timeline in timelines)
    pids = list(dict.fromkeys(timeline.owner_pid for timeline in timelines))
    whose = f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids))} (--pid records one of them)"
    lost = f"; {counted(num_lost, 'event')} overwritten before being read" if num_lost else ""
    typer.echo(f"{out}: {counted(num_batches, 'batch')} of {whose}{lost}; open it in https://ui.perfetto.dev")
