"""`shmload doctor`: what on this host, or in a Ray cluster, would break a loader, and what to change.

Exit code 0: nothing fails (advice may be given); 1: something fails; 2: the command line is wrong.
"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from shmload.cli.terminal import console, refuse
from shmload.tools.counted import counted

COLORS = {"good": "green", "advice": "yellow", "problem": "bold red"}


def doctor(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="With --cluster: address of the head node, as HOST:PORT.")
    ] = "auto",
    cluster: Annotated[bool, typer.Option("--cluster", help="Check a Ray cluster: each node, and an actor on it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every finding as JSON instead of text.")] = False,
) -> None:
    """Check this host: shared memory, cgroups, limits, kernel, processors, software; say what to change.

    With --cluster, check the nodes of a Ray cluster that this machine belongs to: versions, CPUs, shared memory, the object store,
    whether an actor starts there, and how fast its batches arrive here.
    """
    from rich.markup import escape

    if cluster:
        from shmload.tools.cluster_doctor import examine_cluster

        findings = examine_cluster(address)
    elif address != "auto":
        refuse("doctor", f"ADDRESS {address!r} needs --cluster: shmload doctor --cluster {address}")
    else:
        from shmload.shm.host import Host
        from shmload.tools.doctor import examine

        findings = examine(Host())
    levels = [finding.level for finding in findings]
    problems = levels.count("problem")
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
        raise typer.Exit(problems > 0)
    output = console()
    for finding in findings:
        head = f"[{COLORS[finding.level]}]{finding.level:<7}[/] {escape(finding.check)}: {escape(finding.text)}"
        output.print(head, highlight=False, soft_wrap=True)
        if finding.remedy:
            output.print(f"        -> {escape(finding.remedy)}", highlight=False, soft_wrap=True)
    total = counted(problems, "problem") if problems else "no problems"
    advised = f", advice on {levels.count('advice')}" if "advice" in levels else ""
    output.print(f"[bold]{total}{advised}[/]", highlight=False)
    raise typer.Exit(problems > 0)
