"""`shmload top`: every running loader of this host, live: how fast it is, who waits for whom, which sample each worker is on.

Exit code 0 always: it looks, and judges nothing.
"""

import dataclasses
import json
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from shmload.tools.top.watch import Watch

WIDE = 120  # columns where nobody looks
QUIT = "qQ\x03"


def top(
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One interval, one view, and the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each look as one line of JSON.")] = False,
    pid: Annotated[list[int] | None, typer.Option(help="Only loaders of this process, or of its children.")] = None,
    cache: Annotated[
        list[Path] | None, typer.Option(help="Also this growing cache: its folder. May be repeated.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="With --once: also write the view as a picture.")] = None,
) -> None:
    """Show the running loaders of this host, from their control blocks, without touching them. q or ^C ends it."""
    from rich.console import Console

    from shmload.tools.top.watch import Watch

    if svg is not None and not once:
        raise typer.BadParameter("a picture is of one look: give --once, too", param_hint="--svg")
    if cache:
        from shmload.tools.inspect.formats import is_cache

        if others := [str(folder) for folder in cache if not is_cache(folder)]:
            raise typer.BadParameter(f"not a growing cache: {', '.join(others)}", param_hint="--cache")
    view = View(Watch(pid or ()), cache or ())
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE
    console = Console(record=svg is not None, width=width)
    try:
        with _keys() as wait:
            if once:
                _look_once(view, console, wait, interval, as_json=as_json)
            else:
                _look_on(view, console, wait, interval, as_json=as_json)
    except KeyboardInterrupt:
        pass
    if svg is not None:
        svg.write_text(picture_of(console), encoding="utf-8")


def picture_of(console: "Console") -> str:
    """What a recording console has printed, as SVG. Rich names fonts of a web site; a file that people open names none."""
    import re

    drawn = console.export_svg(title="shmload top", clear=False)
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code, ", "")


class View:
    """What there is to look at: loaders, and the growing caches that were named.

    Args:
        watch: of the loaders.
        caches: folders of growing caches.
    """

    def __init__(self, watch: "Watch", caches: Sequence[Path]) -> None:
        self._watch = watch
        self._caches = caches

    def look(self) -> dict[str, Any]:
        """Everything now; `caches` only if some were named."""
        found = self._watch.look()
        if self._caches:
            from shmload.growing.cache import SampleCache

            found["caches"] = {str(path): SampleCache.look(path) for path in self._caches}
        return found

    def picture(self, look: dict[str, Any], width: int) -> "RenderableType":
        """For a terminal with so many columns."""
        from rich.console import Group

        from shmload.tools.top.view import cache_panel, picture

        return Group(
            picture(look, width), *(cache_panel(path, stats, width) for path, stats in look.get("caches", {}).items())
        )


def _look_once(view: "View", console: "Console", wait: "Waiting", interval: float, *, as_json: bool) -> None:
    if view.look()["loaders"]:
        wait(interval)
    look = view.look()
    if as_json:
        typer.echo(json.dumps(look, default=dataclasses.asdict))
    else:
        console.print(view.picture(look, console.width))


def _look_on(view: "View", console: "Console", wait: "Waiting", interval: float, *, as_json: bool) -> None:
    from rich.live import Live

    if as_json or not console.is_terminal:
        while True:
            look = view.look()
            if as_json:
                typer.echo(json.dumps(look, default=dataclasses.asdict))
            else:
                console.print(view.picture(look, console.width))
            sys.stdout.flush()
            if wait(interval):
                return
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(view.picture(view.look(), console.width), refresh=True)
            if wait(interval):
                return


class Waiting:
    """Waits for the next look, or for a key that ends it.

    Args:
        keys: descriptor of a terminal that tells each key at once; None: there is none.
    """

    def __init__(self, keys: int | None) -> None:
        self._keys = keys

    def __call__(self, timeout_s: float) -> bool:
        """Whether to end now."""
        until = monotonic() + timeout_s
        while (left := until - monotonic()) > 0:
            if self._keys is None:
                select.select([], [], [], left)
            elif select.select([self._keys], [], [], left)[0]:
                pressed = os.read(self._keys, 64).decode(errors="replace")
                if not pressed:  # the terminal has gone
                    return True
                if set(pressed) & set(QUIT):
                    return True
        return False


@contextmanager
def _keys() -> "Iterator[Waiting]":
    """Keys come without the return key, and unseen; the terminal is as before afterwards."""
    import termios
    import tty

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield Waiting(None)
        return
    fd = sys.stdin.fileno()
    before: list[Any] = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield Waiting(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
