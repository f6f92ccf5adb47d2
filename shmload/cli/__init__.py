"""The `shmload` command: one command a file. Nothing heavy is imported before a command needs it."""

from collections.abc import Callable

import typer

from shmload.cli import bench, clean, doctor, index, inspect, launch, pack, top, trace, verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="shmload",
    help="A shared-memory, zero-copy data loader for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS: tuple[Callable[..., None], ...] = (
    *(bench.bench, clean.clean, doctor.doctor, index.index, inspect.inspect),
    *(launch.launch, pack.pack, top.top, trace.trace, verify.verify),
)
for command in COMMANDS:
    # what stands behind the SCRIPT of launch is the script's, options and all
    app.command(command.__name__, context_settings={"allow_interspersed_args": command is not launch.launch})(command)


def main() -> None:
    """Entry point of the `shmload` script."""
    app()
