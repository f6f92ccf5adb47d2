"""Writes the page of the commands from their own help texts, so that there is one place to change."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from typer.models import ArgumentInfo

from shmload.cli import app
from tests.reference.docstrings import markdown

KINDS = {int: "INTEGER", float: "FLOAT", str: "TEXT", Path: "PATH"}


def commands() -> dict[str, Callable[..., Any]]:
    """Returns every command's function by name."""
    return {info.name: info.callback for info in sorted(app.registered_commands, key=lambda info: info.name)}  # type: ignore[arg-type, misc, return-value]  # all have both


def undescribed() -> Iterator[str]:
    """Yields commands and options without help, and commands that do not describe their exit codes."""
    for name, command in commands().items():
        if not command.__doc__:
            yield f"shmload {name}: has no help"
        for parameter, info, _ in _options(command):
            if not info.help:
                yield f"shmload {name}: {parameter.name} has no help"
        if not _exit_codes(command):
            yield f"shmload {name}: its module does not say what its exit codes mean"


def commands_page() -> str:
    """Returns the page."""
    parts = ["# Commands\n\n`shmload COMMAND --help` says the same.\n"]
    for name, command in commands().items():
        shown = [(p, info, kind) for p, info, kind in _options(command) if not info.hidden]
        arguments = [entry for entry in shown if isinstance(entry[1], ArgumentInfo)]
        options = [entry for entry in shown if not isinstance(entry[1], ArgumentInfo)]
        usage = ["shmload", name, *(["[OPTIONS]"] if options else []), *(_in_usage(p, i, k) for p, i, k in arguments)]
        parts.append(f"\n## shmload {name}\n\n```\n{' '.join(usage)}\n```\n\n{_paragraphs(command.__doc__)}\n\n")
        parts.append("| | | default |\n|---|---|---|\n")
        parts += [f"| `{_metavar(i, k)}` | {_cell(i.help)} | |\n" for _, i, k in arguments]
        parts += [f"| `{_spelling(p, i, k)}` | {_cell(i.help)} | {_default(p, i)} |\n" for p, i, k in options]
        parts.append(f"\n{_exit_codes(command)}\n")
    return "".join(parts)


def _options(command: Callable[..., Any]) -> list[tuple[inspect.Parameter, Any, Any]]:
    """Returns (parameter, its typer info, its type without None and list) of each parameter."""
    found = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, info = get_args(parameter.annotation)[:2]
        while get_origin(kind) in (types.UnionType, Union, list):
            kind = next(part for part in get_args(kind) if part is not type(None))
        found.append((parameter, info, kind))
    return found


def _exit_codes(command: Callable[..., Any]) -> str:
    text = inspect.cleandoc(sys.modules[command.__module__].__doc__ or "")
    return next((markdown(" ".join(p.split())) for p in text.split("\n\n") if p.startswith("Exit code")), "")


def _spelling(parameter: inspect.Parameter, info: Any, kind: Any) -> str:
    name = parameter.name.replace("_", "-")
    given = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]  # as typer stores them
    if kind is bool:
        return ", ".join(given or (f"--{name}", f"--no-{name}"))
    return f"{', '.join(given or (f'--{name}',))} {_metavar(info, kind)}"


def _metavar(info: Any, kind: Any) -> str:
    return str(info.metavar or KINDS[kind])


def _in_usage(parameter: inspect.Parameter, info: Any, kind: Any) -> str:
    name = _metavar(info, kind)
    return name if parameter.default is inspect.Parameter.empty else f"[{name}]"


def _default(parameter: inspect.Parameter, info: Any) -> str:
    if isinstance(info.show_default, str):
        return info.show_default
    value = parameter.default
    return "" if value is None or isinstance(value, bool) else f"`{value}`"


def _paragraphs(text: str | None) -> str:
    return markdown("\n\n".join(" ".join(p.split()) for p in inspect.cleandoc(text or "").split("\n\n")))


def _cell(text: str) -> str:
    return markdown(text).replace("|", "\\|")
