"""`shmload bench`: loaders side by side on real input.

Exit code 0: fine; 1: bytes differ or a loader failed; 2: bad usage. How to read it: docs/bench.md.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shmload.cli.terminal import check_folder, console, refusing, shown

Names = list[str] | None


def bench(
    workload: Annotated[Names, typer.Option(help="photos, records, rows, tokens, python; may repeat.", show_default="all")] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="Your own dataset, or a function that returns it.")
    ] = None,
    torch_loader: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Your own torch DataLoader, or a function that returns it: measured as it is, beside a ShmLoader with the "
            "same arguments.",
        ),
    ] = None,
    loader: Annotated[
        Names,
        typer.Option(
            help="shmload, torch, shmload-seed, or module:factory, which takes the dataset and a LoaderOptions; may repeat. "
            "The first is compared with torch.",
            show_default="shmload,torch",
        ),
    ] = None,
    batch_size: Annotated[
        Names, typer.Option(metavar="N,N", help="Samples per batch.", show_default="the workload's own, or 64")
    ] = None,
    workers: Annotated[
        Names,
        typer.Option(
            metavar="N,N",
            help="Worker processes of each loader. Several numbers here, for --prefetch or --batch-size: every combination "
            "is measured, and one recommended.",
            show_default="2, or as your DataLoader says",
        ),
    ] = None,
    prefetch: Annotated[
        Names, typer.Option(metavar="N,N", help="Batches ahead per worker (prefetch_factor).", show_default="torch's, 2")
    ] = None,
    step_ms: Annotated[
        float,
        typer.Option(
            help="Simulate a training step of so many milliseconds after each batch. The trainer sleeps in the kernel "
            "meanwhile, as one that waits for its GPU: workers have its core."
        ),
    ] = 0.0,
    cold: Annotated[
        bool, typer.Option("--cold", help="Also time one pass with the workload's files dropped from the page cache first.")
    ] = False,
    cold_files: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="With --cold: the files and folders your own data lie in; may repeat.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Length of a timed part, after the warm-up.")] = 1.5,
    rounds: Annotated[
        int | None, typer.Option(help="Turns of every loader, each in a fresh process.", show_default="3; 1 with several settings")
    ] = None,
    start_method: Annotated[str | None, typer.Option(help="fork, spawn or forkserver.", show_default="Python's own")] = None,
    collate: Annotated[str | None, typer.Option(metavar="MODULE:NAME", help="Your own collate_fn, with --dataset.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order, alike for all loaders.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures; - is stdout, without a table.")
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw what was measured.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds: to see that it works, not how fast.")] = False,
) -> None:
    """Measure torch's DataLoader and ShmLoader side by side, on built-in workloads, your own dataset or your DataLoader.

    Both deliver the same batches in the same order, each in fresh processes and in turn; the bytes are compared. Says what
    bounds the loader, and how many workers would do.
    """
    from shmload.tools.bench import plot
    from shmload.tools.bench.report import show
    from shmload.tools.bench.rounds import BenchOptions, benchmark
    from shmload.tools.named import BenchError, names, numbers

    to_stdout = json_file == Path("-")
    check_folder("bench", None if to_stdout else json_file, plot_file)
    with refusing("bench", BenchError), shown(sys.stderr.isatty() and not to_stdout) as progress:
        options = BenchOptions(
            workloads=tuple(names(workload or [])),
            dataset=dataset,
            torch_loader=torch_loader,
            loaders=tuple(names(loader or ["shmload", "torch"])),
            batch_size=numbers("--batch-size", batch_size or []),
            num_workers=numbers("--workers", workers or []),
            prefetch_factor=numbers("--prefetch", prefetch or []),
            step_ms=step_ms,
            cold=cold,
            cold_files=tuple(cold_files or []),
            seconds=seconds,
            rounds=rounds,
            seed=seed,
            start_method=start_method,
            collate=collate,
            quick=quick,
        )
        report = benchmark(options, progress)
    if plot_file is not None:
        if importlib.util.find_spec("matplotlib"):
            plot.save(report, plot_file)
        else:
            report.notes.append("plot left out: needs matplotlib: pip install 'shmload[plot]'")
    text = json.dumps(report.as_dict(), indent=1)
    if to_stdout:
        typer.echo(text)
        for line in [*report.failures, *report.mismatches]:
            typer.echo(f"shmload bench: {line}", err=True)
    else:
        if json_file is not None:
            json_file.write_text(text + "\n")
        show(report, console())
    if report.failures or report.mismatches:
        raise typer.Exit(1)
