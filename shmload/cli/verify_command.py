"""`shmload verify`: prove from an audit that every sample was delivered exactly once, or show which were not.

Exit code 0: proven; 1: defects; 2: bad usage, or the folder cannot be read; 3: cannot be judged; 4: an epoch is unfinished, and
each sample came once so far.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from shmload.cli.terminal import console, progress_bar, refusing
from shmload.tools.counted import counted

if TYPE_CHECKING:
    from rich.console import Console

    from shmload.tools.audit.findings import AuditReport

DATASET = "Read batches again and compare them: your dataset, ShmLoader or pipeline, or a function that returns it."
COLORS = {"proven": "green", "unfinished": "cyan", "consistent": "yellow", "defect": "bold red"}
LISTED_MAX = 20  # skipped and substituted samples in the table; --json has all


def verify(
    folder: Annotated[str, Argument(metavar="FOLDER", help="Folder given to ShmLoader(audit=...).")],
    as_json: Annotated[bool, Option("--json", help="Print everything as JSON instead of a table.")] = False,
    dataset: Annotated[str | None, Option(metavar="MODULE:NAME", help=DATASET)] = None,
    samples: Annotated[int, Option(min=1, help="With --dataset: number of batches to check, drawn at random.")] = 32,
    allow_restarts: Annotated[
        bool, Option("--allow-restarts", help="Accept starts without a state, which discard earlier batches.")
    ] = False,
) -> None:
    """Judge the records of a run: each epoch must hold each sample once, over ranks, resumes and world sizes."""
    from shmload.tools.audit.verify import read_folder, reread
    from shmload.tools.audit.verify import verify as judge
    from shmload.tools.object_reference import call, resolve

    with refusing("verify", OSError, ValueError), progress_bar(sys.stderr.isatty()) as progress:
        if not folder:  # Path("") is the current folder
            raise ValueError("FOLDER is empty: give the folder that ShmLoader(audit=...) was given; `.` is the current folder")
        logs = read_folder(Path(folder), over=lambda paths: progress.over(paths, lambda path: path.name))
        report, loaders = judge(logs, allow_restarts=allow_restarts)
        if dataset is not None:
            made = resolve(dataset, what="--dataset")
            if isinstance(made, type) or not (hasattr(made, "__len__") or hasattr(made, "stages")):
                made = call(made, {}, dataset)
            reread(loaders, made, samples, report, over=lambda items: progress.over(items, lambda one: one.where))
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))
    else:
        show(report, console())
    raise typer.Exit(report.status)


def show(report: "AuditReport", console: "Console") -> None:
    """Print a table of epochs, then the findings and the verdict."""
    from rich.markup import escape
    from rich.table import Table

    for loader in report.loaders:
        counts = f"{counted(loader.num_ranks, 'rank')}, {counted(loader.num_files, 'file')}"
        table = Table(title=f"{escape(loader.title)}, {counts}", title_justify="left")
        for name in ("epoch", "batches, all ranks", "samples", "padding", "left out", "skipped", "substituted", "rolled back"):
            table.add_column(name, justify="right")
        table.add_column("verdict")
        for e in loader.epochs:
            verdict = f"[{COLORS[e.state]}]{e.state}[/]" + (f": {escape(e.remaining)} are left" if e.remaining else "")
            of_rule = e.num_padding, e.num_left_out
            row = (e.num_batches, e.num_samples, *of_rule, e.num_skipped, e.num_substituted, e.num_superseded)
            table.add_row(str(e.epoch), *(f"{count:,}" if count else "" for count in row), verdict)
        console.print(table)
    lines = [f"[bold red]{finding.kind.upper()}[/] {escape(finding.text)}" for finding in report.findings]
    for kind, count in report.num_found.items():
        if (left := count - sum(finding.kind == kind for finding in report.findings)) > 0:
            lines.append(f"[bold red]{kind.upper()}[/] and {left:,} more")
    lines += [f"accounted: {escape(text)}" for text in report.accounted[:LISTED_MAX]]
    if len(report.accounted) > LISTED_MAX:
        lines.append(f"accounted: and {len(report.accounted) - LISTED_MAX:,} more; --json has them all")
    lines += [f"[yellow]not judged:[/] {escape(text)}" for text in report.unjudged]
    lines += [f"note: {escape(text)}" for text in report.notes]
    if report.num_reread:
        lines.append(f"{counted(report.num_reread, 'batch')} read again")
    for line in (*lines, f"[bold]{report.verdict}[/]"):
        console.print(line, highlight=False)
