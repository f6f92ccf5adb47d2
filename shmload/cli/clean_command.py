"""`shmload clean`: show or remove what killed loaders have left in /dev/shm.

Exit code 0: success; 1: something could not be removed.
"""

import json
from typing import Annotated

import typer

from shmload.tools.byte_size import size_text
from shmload.tools.counted import counted


def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Remove them. Without this option they are only listed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of text.")] = False,
) -> None:
    """Show what your dead loaders have left in shared memory, or remove it.

    A lock shows whether a loader is dead, not a process number, so a loader that runs in another container is not touched.
    """
    from shmload.shm import janitor

    found = janitor.sweep() if yes else janitor.find_leftovers()
    gone = [leftover for leftover in found if not leftover.error]
    if as_json:
        plain = []
        for leftover in found:
            more = {"owner": _name(leftover.uid), "pid": leftover.pid or None, "error": leftover.error or None}
            plain.append({**leftover._asdict(), **more, "age_s": round(leftover.age_s, 3), "removed": yes and not leftover.error})
        typer.echo(json.dumps(plain, indent=1))
        raise typer.Exit(len(gone) < len(found))
    for leftover in found:
        typer.echo(
            f"{leftover.stem}: of {_name(leftover.uid)}, process {leftover.pid or 'unknown'}, {_age(leftover.age_s)} old, "
            f"{counted(len(leftover.paths), 'file')}, {size_text(leftover.nbytes)}; {leftover.why}"
        )
        if leftover.error:
            typer.echo(f"shmload clean: {leftover.error}", err=True)
    nbytes = size_text(sum(leftover.nbytes for leftover in gone))
    if not found:
        typer.echo("dead loaders have left nothing")
    elif yes:
        typer.echo(f"removed {len(gone)} of {len(found)}, {nbytes}")
    else:
        typer.echo(f"{nbytes} can be freed: shmload clean --yes")
    raise typer.Exit(len(gone) < len(found))


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # no such user in this container
        return f"uid {uid}"


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
