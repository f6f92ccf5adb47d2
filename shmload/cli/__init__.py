"""The `shmload` command: one command a file. Nothing heavy is imported before a command needs it."""

import typer

from shmload.cli import bench

__all__ = ["app", "main"]

app = typer.Typer(
    name="shmload",
    help="A shared-memory, zero-copy data loader for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("bench")(bench.bench)


@app.callback()
def callback() -> None:
    """A shared-memory, zero-copy data loader for PyTorch."""  # keeps `bench` a subcommand while it is the only one


def main() -> None:
    """Entry point of the `shmload` script."""
    app()
