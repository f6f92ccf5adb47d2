"""The `shmload` command: one command a file. Nothing heavy is imported before a command needs it."""

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from shmload.cli.bench_command import bench
from shmload.cli.clean_command import clean
from shmload.cli.doctor_command import doctor
from shmload.cli.index_command import index
from shmload.cli.inspect_command import inspect
from shmload.cli.launch_command import launch
from shmload.cli.pack_command import pack
from shmload.cli.terminal import WIDE
from shmload.cli.top_command import top
from shmload.cli.trace_command import trace
from shmload.cli.verify_command import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="shmload",
    help="A shared-memory, zero-copy data loader for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": WIDE},
    rich_markup_mode=None,  # plain help: half as many lines, and a flag is not shown with a value
)
COMMANDS: tuple[Callable[..., None], ...] = (bench, clean, doctor, index, inspect, launch, pack, top, trace, verify)


def first_sentence(command: Callable[..., None]) -> str:
    """What stands beside a command in the list of all; typer's own choice is cut off in the middle of a word."""
    return " ".join((command.__doc__ or "").split()).partition(". ")[0].rstrip(".") + "."


for command in COMMANDS:
    settings: dict[str, Any] = {"max_content_width": WIDE}
    if command is launch:
        # what stands behind the SCRIPT is the script's, options and all; torchrun takes --max_restarts, too
        settings |= {"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")}
    app.command(command.__name__, short_help=first_sentence(command), context_settings=settings)(command)


def main() -> None:
    """Entry point of the `shmload` script."""
    if sys.stdout is None:  # whoever started this has closed it
        sys.stdout = open(os.devnull, "w", errors="backslashreplace")  # noqa: SIM115  # for the process's life
    elif isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # what its encoding lacks: bars, and names of files
    app()
