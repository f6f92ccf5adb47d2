"""`shmload bench`: loaders side by side on real input.

Exit code 0: success; 1: bytes differ, a loader failed, or a file could not be written; 2: bad usage. docs/bench.md explains the
results.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from shmload.cli.terminal import check_folder, console, progress_bar, refuse, refusing
from shmload.tools.bench.bench_job import LIMIT_S, MIN_BATCHES
from shmload.tools.bench.workload_table import BATCH_SIZE, FACTS

Text = str | None
Names = list[str] | None
Paths = list[Path] | None
WORKLOADS = "\b\nWorkloads:\n" + "\n".join(f"  {name:<7}  {facts.line()}" for name, facts in FACTS.items())


def bench(
    workload: Annotated[Names, Option(metavar="NAME", help="A workload below; may repeat.", show_default="all")] = None,
    dataset: Annotated[Text, Option(metavar="MODULE:NAME", help="Your dataset, or a function that returns it.")] = None,
    torch_loader: Annotated[Text, Option(metavar="MODULE:NAME", help="Your torch DataLoader, or its function.")] = None,
    loader: Annotated[
        Names,
        Option(
            metavar="NAME", help="shmload, shmload-threads, torch, shmload-seed or module:factory.", show_default="shmload,torch"
        ),
    ] = None,
    batch_size: Annotated[
        Names, Option(metavar="N,N", help="Samples per batch.", show_default=f"the workload's; of --dataset: {BATCH_SIZE}")
    ] = None,
    workers: Annotated[Names, Option(metavar="N,N", help="Worker processes; may be several.", show_default="2")] = None,
    prefetch: Annotated[Names, Option(metavar="N,N", help="Batches ahead of each worker.", show_default="2")] = None,
    step_ms: Annotated[float, Option(metavar="MS", help="Sleep after each batch.")] = 0.0,
    seconds: Annotated[
        float, Option(metavar="S", help=f"Seconds per measurement; up to {LIMIT_S:g} for {MIN_BATCHES} batches.")
    ] = 1.5,
    rounds: Annotated[
        int | None, Option(metavar="N", help="Measurements per loader.", show_default="3; 1 with several settings")
    ] = None,
    start_method: Annotated[Text, Option(metavar="NAME", help="fork, spawn or forkserver.", show_default=False)] = None,
    collate: Annotated[Text, Option(metavar="MODULE:NAME", help="Your collate_fn, for --dataset.")] = None,
    seed: Annotated[int, Option(metavar="N", help="Seed of the order.")] = 0,
    as_json: Annotated[bool, Option("--json", help="Print all figures as JSON instead of a table.")] = False,
    save_file: Annotated[Path | None, Option("--save", metavar="FILE.json", help="Write all figures to a JSON file, too.")] = None,
    plot_file: Annotated[Path | None, Option("--plot", metavar="FILE.png", help="Plot the results.")] = None,
    quick: Annotated[bool, Option("--quick", help="Run briefly, only to check that it works.")] = False,
) -> None:
    """Measure torch's DataLoader and ShmLoader side by side.

    Both read a built-in workload, your dataset or your DataLoader and deliver the same batches in the same order, in turn and in
    fresh processes; the bytes are compared. Reports the loader's bottleneck, and how many workers are enough.
    """
    from shmload.tools.bench import plot
    from shmload.tools.bench.bench_options import BenchOptions
    from shmload.tools.bench.report_table import show
    from shmload.tools.bench.rounds import benchmark
    from shmload.tools.list_options import names, numbers
    from shmload.tools.object_reference import UsageError

    check_folder("bench", save_file, plot_file)
    with refusing("bench", UsageError), progress_bar(sys.stderr.isatty()) as progress:
        options = BenchOptions(
            workloads=tuple(names(workload or [])),
            dataset=dataset,
            torch_loader=torch_loader,
            loaders=tuple(names(loader or ["shmload", "torch"])),
            batch_size=numbers("--batch-size", batch_size or []),
            num_workers=numbers("--workers", workers or []),
            prefetch_factor=numbers("--prefetch", prefetch or []),
            step_ms=step_ms,
            seconds=seconds,
            rounds=rounds,
            seed=seed,
            start_method=start_method,
            collate=collate,
            quick=quick,
        )
        report = benchmark(options, progress)
    if plot_file is not None and not importlib.util.find_spec("matplotlib"):
        report.notes.append("plot left out: needs matplotlib: pip install 'shmload[plot]'")
        plot_file = None
    text = json.dumps(report.as_dict(), indent=1)
    if as_json:
        typer.echo(text)
        for line in [*report.failures, *report.mismatches]:
            typer.echo(f"shmload bench: {line}", err=True)
    else:
        show(report, console())
    path = plot_file
    try:
        if path is not None:
            plot.save(report, path)
        path = save_file
        if path is not None:
            path.write_text(text + "\n")
        for path in filter(None, (plot_file, save_file)):
            typer.echo(f"wrote {path}", err=as_json)
    except OSError as error:
        refuse("bench", f"{path}: {error.strerror}", 1)
    if report.failures or report.mismatches:
        raise typer.Exit(1)
