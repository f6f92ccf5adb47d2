"""`shmload top`: every running loader of this host, live: how fast it is, who waits for whom, which sample each worker is on.

Exit code 0 always: it looks, and judges nothing.
"""

import dataclasses
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 120  # columns where nobody looks


def top(
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One interval, one view, and the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each look as one line of JSON.")] = False,
    pid: Annotated[list[int] | None, typer.Option(help="Only loaders of this process, or of its children.")] = None,
    cache: Annotated[list[Path] | None, typer.Option(help="Also this growing cache: its folder. May be repeated.")] = None,
    svg: Annotated[Path | None, typer.Option(help="With --once: also write the view as a picture.")] = None,
) -> None:
    """Show the running loaders of this host, from their control blocks, without touching them. ^C ends it."""
    from rich.console import Console
    from rich.live import Live

    from shmload.tools.inspect.formats import is_cache
    from shmload.tools.top import Watch, picture

    if svg is not None and not once:
        raise typer.BadParameter("a picture is of one look: give --once, too", param_hint="--svg")
    if others := [str(folder) for folder in cache or () if not is_cache(folder)]:
        raise typer.BadParameter(f"not a growing cache: {', '.join(others)}", param_hint="--cache")
    watch = Watch(pid or (), cache or ())
    console = Console(record=svg is not None, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)
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
                    typer.echo(json.dumps(look, default=dataclasses.asdict))
                elif live is not None:
                    live.update(picture(look, console.width), refresh=True)
                else:
                    console.print(picture(look, console.width))
                sys.stdout.flush()
                if once:
                    break
                sleep(interval)
    except KeyboardInterrupt:
        pass
    if svg is not None:
        svg.write_text(picture_of(console), encoding="utf-8")


def picture_of(console: "Console") -> str:
    """What a recording console has printed, as SVG. Rich names fonts of a web site; a file that people open names none."""
    import re

    drawn = console.export_svg(title="shmload top", clear=False)
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code, ", "")
