"""The `shmload` command. Each subcommand is a file of its own, such as `top_command.py`, and is listed in `COMMANDS`.

A subcommand's options are the annotated parameters of its function, and its help is the docstring. Slow modules (torch, rich, most
tools) are imported inside the functions, so that `shmload --help` is quick.
"""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer

import shmload
from shmload.cli.bench_command import WORKLOADS, bench
from shmload.cli.clean_command import clean
from shmload.cli.doctor_command import doctor
from shmload.cli.index_command import index
from shmload.cli.inspect_command import inspect
from shmload.cli.launch_command import launch
from shmload.cli.pack_command import pack
from shmload.cli.terminal import WIDE, Unwritable
from shmload.cli.top_command import top
from shmload.cli.trace_command import trace
from shmload.cli.verify_command import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="shmload",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": WIDE, "help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help: half as many lines, and a flag is not shown with a value
)
COMMANDS: tuple[Callable[..., None], ...] = (bench, clean, doctor, index, inspect, launch, pack, top, trace, verify)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(shmload.__version__)
        raise typer.Exit


@app.callback()
def of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A shared-memory, zero-copy data loader for PyTorch."""


def first_sentence(command: Callable[..., None]) -> str:
    """Return the description of a command in the list of commands; typer's own choice is cut in the middle of a word."""
    return " ".join((command.__doc__ or "").split()).partition(". ")[0].rstrip(".") + "."


for command in COMMANDS:
    settings: dict[str, Any] = {"max_content_width": WIDE}
    if command is launch:
        # everything after SCRIPT belongs to the script, including options; torchrun also accepts --max_restarts
        settings |= {"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")}
    epilog = WORKLOADS if command is bench else None
    app.command(command.__name__, short_help=first_sentence(command), epilog=epilog, context_settings=settings)(command)


class _Stdout(io.TextIOWrapper):
    """A stdout that raises Unwritable instead of OSError, so that `main` can tell its errors from those of other files.

    BrokenPipeError, which means that the reader has left, is unchanged, because typer handles it.
    """

    def write(self, text: str) -> int:
        with _as_unwritable():
            return super().write(text)

    def flush(self) -> None:
        with _as_unwritable():
            super().flush()


@contextmanager
def _as_unwritable() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritable(error.errno, error.strerror) from None


def main() -> None:
    """Run the `shmload` script. If stdout cannot be written to, its exit status is 74 (EX_IOERR)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the process that started this one has closed it
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))  # noqa: SIM115  # for the process's life
    if isinstance(sys.stdout, io.TextIOWrapper):
        given = sys.stdout
        errors = "backslashreplace" if given.errors == "strict" else given.errors  # bars and file names may not fit its encoding
        sys.stdout = _Stdout(given.buffer, given.encoding, errors, None, given.line_buffering, given.write_through)
    try:
        try:
            app()
        finally:
            _flush()
    except Unwritable as error:
        _drop_buffered()
        with suppress(OSError):  # stderr may be on the same full disk
            typer.echo(f"shmload: cannot write its output: {error.strerror}", err=True)
        sys.exit(os.EX_IOERR)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # in launch, whose ranks continue without a reader
        _drop_buffered()


def _drop_buffered() -> None:
    """Drop the output that could not be written; otherwise it would fail again at the interpreter's exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
