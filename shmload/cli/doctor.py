"""`shmload doctor`: what of this host would go wrong with a loader, and what to change.

Exit code 0: nothing fails (advice may be given); 1: something does.
"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from shmload.cli.terminal import console

if TYPE_CHECKING:
    from rich.console import Console

    from shmload.tools.doctor import Finding

COLOURS = {"good": "green", "advice": "yellow", "problem": "bold red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print every finding as JSON instead of text.")] = False) -> None:
    """Check this host: shared memory, cgroups, limits, kernel, processors, software; say what to change."""
    from shmload.shm.names import Host
    from shmload.tools.doctor import examine

    findings = examine(Host())
    if as_json:
        typer.echo(json.dumps([finding.as_dict() for finding in findings], indent=1))
    else:
        show(findings, console())
    raise typer.Exit(any(finding.level == "problem" for finding in findings))


def show(findings: "list[Finding]", console: "Console") -> None:
    """A line for each finding, its remedy below, and how many of which kind."""
    from rich.markup import escape

    for finding in findings:
        head = f"[{COLOURS[finding.level]}]{finding.level:<7}[/] {escape(finding.check)}: {escape(finding.text)}"
        console.print(head, highlight=False, soft_wrap=True)
        if finding.remedy:
            console.print(f"        -> {escape(finding.remedy)}", highlight=False, soft_wrap=True)
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "advice")}
    problems = f"{counts['problem'] or 'no'} problem{'s' * (counts['problem'] != 1)}"
    console.print(f"[bold]{problems}, advice on {counts['advice'] or 'nothing'}[/]", highlight=False)
