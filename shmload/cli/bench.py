"""`shmload bench`: loaders side by side on real input.

Exit code 0: fine; 1: bytes differ or a loader failed; 2: bad usage.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shmload.observe.bench.report import Report

Names = list[str] | None


def bench(
    workload: Annotated[
        Names, typer.Option(help="photos, records, rows, tokens, python; may repeat.", show_default="all")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="Your own dataset, or a function that returns it.")
    ] = None,
    images: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Your own JPEG photos for `photos`.")] = None,
    loader: Annotated[
        Names,
        typer.Option(
            help="shmload, torch, torch-getitems, torch-0, threads, shmload-seed, or module:factory; may repeat. "
            "The first is compared with torch.",
            show_default="shmload,torch",
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per batch.", show_default="the workload's own, or 64")
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes of each loader.")] = 2,
    seconds: Annotated[float, typer.Option(help="Length of a timed part, after the warm-up.")] = 2.0,
    epochs: Annotated[int, typer.Option(help="Time so many whole epochs after the first, instead of seconds.")] = 0,
    rounds: Annotated[int, typer.Option(help="Turns of every loader, each in a fresh process.")] = 3,
    start_method: Annotated[
        str | None, typer.Option(help="fork, spawn or forkserver.", show_default="Python's own")
    ] = None,
    collate: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="Your own collate_fn, with --dataset.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order, alike for all loaders.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures; - is stdout, without a table.")
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the ratios.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds: to see that it works, not how fast.")] = False,
) -> None:
    """Measure torch's DataLoader and ShmLoader side by side, on built-in workloads or on your own dataset.

    Both deliver the same batches in the same order, each in fresh processes and in turn; the bytes are compared.
    """
    from shmload.observe.bench import plot
    from shmload.observe.bench.options import Options
    from shmload.observe.bench.rounds import benchmark
    from shmload.observe.bench.spec import BenchError, names

    to_stdout = json_file == Path("-")
    try:
        options = Options(
            workloads=tuple(names(workload or [])),
            dataset=dataset,
            images=images,
            loaders=tuple(names(loader or ["shmload", "torch"])),
            batch_size=batch_size,
            num_workers=workers,
            seconds=seconds,
            epochs=epochs,
            rounds=1 if quick else rounds,
            seed=seed,
            start_method=start_method,
            collate=collate,
            quick=quick,
        )
        for path in (json_file, plot_file):
            if path is not None and not to_stdout and not path.absolute().parent.is_dir():
                raise BenchError(f"{path}: needs an existing folder to write to, given {str(path.parent)!r}")
        from shmload.cli.progress import shown

        with shown(sys.stderr.isatty() and not to_stdout) as progress:
            report = benchmark(options, progress)
    except BenchError as error:
        typer.echo(f"shmload bench: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("shmload bench: interrupted", err=True)
        raise typer.Exit(130) from None
    if plot_file is not None:
        absent = plot.missing()
        if absent:
            report.notes.append(absent)
        else:
            plot.save(report, plot_file)
    deliver(report, json_file)
    if report.failures or report.mismatches:
        raise typer.Exit(1)


def deliver(report: "Report", json_file: Path | None) -> None:
    """The table on stdout, or with `--json -` only JSON there; what went wrong also on stderr."""
    from rich.console import Console

    from shmload.observe.bench.table import WIDE, show

    if json_file is not None:
        text = json.dumps(report.as_dict(), indent=1)
        if json_file == Path("-"):
            typer.echo(text)
        else:
            json_file.write_text(text + "\n")
    if json_file != Path("-"):
        show(report, Console() if sys.stdout.isatty() else Console(width=WIDE))
        return
    for line in [*report.failures, *report.mismatches]:
        typer.echo(f"shmload bench: {line}", err=True)
