"""`shmload top`: every running loader of this host, live: how fast it is, which side waits, and which sample each worker reads.

Exit code 0: success, because the command judges nothing; 2: bad usage, or with --once, no process of --pid has a loader.
"""

import json
import os
import sys
from contextlib import nullcontext
from time import sleep
from typing import Annotated

import typer

from shmload.cli.terminal import WIDE


def top(
    interval: Annotated[float, typer.Option(min=0.01, max=86_400, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view after one interval, then exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each update as one line of JSON.")] = False,
    pid: Annotated[list[int] | None, typer.Option(help="Show only loaders of this process and its children.")] = None,
) -> None:
    """Show the running loaders of this host, from their control blocks, without touching them. ^C ends it."""
    from rich.console import Console
    from rich.live import Live

    from shmload.tools.top.picture import picture
    from shmload.tools.top.watch import Watch

    watch = Watch(pid or ())
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)
    live = None
    if console.is_terminal and not (once or as_json):
        live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    try:
        with live or nullcontext():
            if once and watch.look()["loaders"]:
                sleep(interval)
            while True:
                look = watch.look()
                if as_json:
                    typer.echo(json.dumps(look))
                elif live is not None:
                    live.update(picture(look, console.width, pid or ()), refresh=True)
                else:
                    console.print(picture(look, console.width, pid or ()))
                sys.stdout.flush()
                if once:
                    raise typer.Exit(2 if pid and not look["loaders"] else 0)
                sleep(interval)
    except KeyboardInterrupt:
        pass
