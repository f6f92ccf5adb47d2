"""The pages of the API reference, docs/api/*.md: the page of each name, and how it is shown.

`python -m tests.reference` writes them. A forge shows the files, and the site has the same ones.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shmload.errors
from tests.reference.commands import commands_page
from tests.reference.docstrings import Docstring, markdown, parse
from tests.reference.public import BASE_NAMES, documentation, function_of, is_protocol, members, names, parameters, returned

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "api"
NOTE = "<!-- `python -m tests.reference` writes this page from the docstrings. Edit those. -->\n\n"
WIDTH = 88  # columns of a signature on one line
PAGES = {  # page -> its title, prefixes of the names and modules on it (the first page that fits gets a name), its guides
    "loader.md": ("Loaders", ("shmload.loader", "shmload.cluster"), ("switch", "resume", "memory")),
    "orders.md": ("Orders", ("shmload.schedule",), ("batches",)),
    "errors.md": ("Errors", ("shmload.errors",), ("operations",)),
    "formats.md": ("Formats", ("shmload.formats",), ("arrays", "images", "tfrecord", "own_format")),
    "integrations.md": ("Integrations", ("shmload.integrations",), ("frameworks",)),
    "growing.md": ("Growing cache", ("shmload.growing",), ("growing",)),
    "pipeline.md": ("Pipelines", ("shmload.pipeline",), ("pipelines",)),
    "launch.md": ("Launching", ("shmload.launch",), ("launch",)),
    "cache.md": (
        "Local cache",
        tuple(f"shmload.storage.{module}" for module in ("cache", "budgeted_folder", "file_lease", "reservation")),
        ("stores",),
    ),
    "remote.md": (
        "Shards on an object store",
        ("shmload.remote", "shmload.storage", "shmload.schedule.samplers"),
        ("packing", "remote", "stores"),
    ),
    "metrics.md": ("Metrics", ("shmload.metrics",), ("top",)),
    "debug.md": ("Debugging", ("shmload.debug", "shmload.engine.holders"), ("memory",)),
    "samples.md": ("Samples and batches", ("shmload",), ("batches", "memory")),
}
SECTIONS = ("Returns", "Yields", "Raises", "Cost", "Thread/process safety", "Source", "Example")


def pages() -> dict[str, str]:
    """Returns every page's text by its file name."""
    on: dict[str, list[tuple[str, Any]]] = {page: [] for page in PAGES}
    for place, value in names().items():
        page = next(
            page for page, (_, begins, _) in PAGES.items() if value.__module__.startswith(begins) or place.startswith(begins)
        )
        on[page].append((place, value))
    found = {"index.md": _index(on), "commands.md": commands_page()}
    for page, listed in on.items():
        title, _, guides = PAGES[page]
        head = f"# {title}\n\nGuides: {', '.join(f'[{name}.md](../{name}.md)' for name in guides)}.\n"
        if page == "errors.md":
            head += "\n" + (shmload.errors.__doc__ or "").strip() + "\n"
        titles = _titles(listed)
        found[page] = head + "".join(_entry(titles[place], place, value) for place, value in listed)
    return {page: NOTE + text for page, text in found.items()}


def slug(heading: str) -> str:
    """Returns the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _index(on: dict[str, list[tuple[str, Any]]]) -> str:
    lines = ["# API reference\n"]
    for page, listed in on.items():
        titles = _titles(listed)
        lines.append(f"\n## [{PAGES[page][0]}]({page})\n\n| | |\n|---|---|\n")
        for place, value in listed:
            summary = markdown(parse(documentation(None, "", value)).summary).replace("|", "\\|")
            lines.append(f"| [`{place}`]({page}#{slug(titles[place])}) | {summary} |\n")
    lines.append("\n## [Commands](commands.md)\n\nWhat `shmload --help` says, with all options.\n")
    return "".join(lines)


def _titles(listed: list[tuple[str, Any]]) -> dict[str, str]:
    """Returns the heading of each place on a page: its name, after that of its module if the page has the name twice."""
    names = Counter(place.rsplit(".", 1)[1] for place, _ in listed)
    return {place: ".".join(place.split(".")[-1 if names[place.rsplit(".", 1)[1]] == 1 else -2 :]) for place, _ in listed}


def _entry(title: str, place: str, value: Any) -> str:
    name = place.rsplit(".", 1)[1]
    found = parse(documentation(None, "", value))
    told = f"from {place.rsplit('.', 1)[0]} import {name}"
    if isinstance(value, type) and issubclass(value, BaseException):
        told += f"\n\nclass {name}({', '.join(base.__name__ for base in value.__bases__)})"
    elif not (isinstance(value, type) and (inspect.isabstract(value) or is_protocol(value))):
        told += f"\n\n{_signature(name, value)}"
    parts = [f"\n## {title}\n\n```python\n{told}\n```\n\n", _body(found, name)]
    if isinstance(value, type):
        listed = members(value)
        plain = [name for name in listed if _base_of(value, name) is not None]
        if plain:
            base = _base_of(value, plain[0])
            told = ", ".join(f"`{name}`" for name in plain)
            parts.append(f"\nIt also has {told} of [{base}](#{slug(str(base))}).\n")
        parts += [_member(value, name, member) for name, member in listed.items() if name not in plain]
    return "".join(parts)


def _base_of(cls: type, member: str) -> str | None:
    """Returns the base class that describes a member and has its own entry."""
    places = {base.__name__: base for base in cls.__mro__[1:] if base.__name__ in BASE_NAMES}
    own = [base for base in cls.__mro__ if base not in places.values()]
    if any(getattr(vars(base).get(member), "__doc__", None) for base in own):
        return None
    return next((name for name, base in places.items() if member in vars(base)), None)


def _member(holder: type, name: str, member: Any) -> str:
    found = parse(documentation(holder, name, member))
    function = function_of(member)
    head = f"\n### {holder.__name__}.{name}\n\n"
    if function is None:
        return f"{head}Property. {_body(found)}"
    shown = f"{holder.__name__}.{name}" if isinstance(member, classmethod) else name
    return f"{head}```python\n{_signature(shown, function)}\n```\n\n{_body(found)}"


def _signature(name: str, value: Any) -> str:
    texts = [parameter.text for parameter in parameters(value)]
    result = "" if isinstance(value, type) else returned(value)
    arrow = f" -> {result}" if result and result != "None" else ""
    line = f"{name}({', '.join(texts)}){arrow}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){arrow}"


def _body(found: Docstring, name: str = "") -> str:
    return "".join(f"{part}\n\n" for part in _parts(found, name)).rstrip("\n") + "\n"


def _parts(found: Docstring, name: str) -> Iterator[str]:
    yield markdown(found.summary)
    if found.prose:
        yield markdown(found.prose)
    for section in ("Args", "Attributes"):
        if items := found.items.get(section):
            yield "\n".join(_heading(found, name, listed) + _item(listed, text) for listed, text in items.items())
    for section in SECTIONS:
        if items := found.items.get(section):
            lines = [f"* {', '.join(f'`{n}`' for n in listed)}: {markdown(text)}" for listed, text in items.items()]
            yield f"**{section}**\n\n" + "\n".join(lines)
        elif section == "Example" and section in found.texts:
            yield f"**Example**\n\n```pycon\n{found.texts[section]}\n```"
        elif section in found.texts:
            yield f"**{section}**: {markdown(found.texts[section])}"


def _item(listed: tuple[str, ...], text: str) -> str:
    return f"* {', '.join(f'`{n}`' for n in listed)}: {markdown(text)}"


def _heading(found: Docstring, name: str, listed: tuple[str, ...]) -> str:
    """Returns the heading of the group of arguments that begins with this item, if one does."""
    group = found.groups.get(listed)
    return f"\n### {name}: {group}\n\n" if group else ""
