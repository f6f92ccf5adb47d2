"""The `shmload` command: one command a file. Nothing heavy is imported before a command needs it."""

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
app.command("bench")(bench.bench)
app.command("clean")(clean.clean)
app.command("doctor")(doctor.doctor)
app.command("index")(index.index)
app.command("inspect")(inspect.inspect)
# what stands behind SCRIPT is the script's, options and all
app.command("launch", context_settings={"allow_interspersed_args": False})(launch.launch)
app.command("pack")(pack.pack)
app.command("top")(top.top)
app.command("trace")(trace.trace)
app.command("verify")(verify.verify)


def main() -> None:
    """Entry point of the `shmload` script."""
    app()
