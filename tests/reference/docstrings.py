"""Parses docstrings into a summary, prose and sections of the project's template, as Markdown."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from itertools import groupby

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Cost", "Thread/process safety", "Source", "Example")
_HEAD = re.compile(rf"({'|'.join(SECTIONS)})(?: \(([^)]+)\))?:(.*)")  # Args (of one group): there may be several
_ITEM = re.compile(r"([\w*]+(?:, [\w*]+)*): (.*)")
_CODE = re.compile(r"(`+[^`]+`+)")
_SPECIAL = re.compile(r"(?<![^\W_])_+|_+(?![^\W_])|\*")
_GUIDE = re.compile(r"\bdocs/(\w+\.md)")  # the form of a link to a guide in docstrings
_VERBATIM = ("|", "    ")  # tables, and indented code


@dataclass
class Docstring:
    """One docstring.


    Attributes:
        items: sections of `name: text`; names that share a text are one item.
        groups: the heading before an item, if a new group of arguments begins with it.
        texts: sections of prose.
    """

    summary: str = ""
    prose: str = ""
    items: dict[str, dict[tuple[str, ...], str]] = field(default_factory=dict)
    groups: dict[tuple[str, ...], str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def names(self, *sections: str) -> set[str]:
        """Returns every name that these sections describe."""
        return {name for section in sections for names in self.items.get(section, {}) for name in names}


def parse(raw: str | None) -> Docstring:
    """Parses a docstring."""
    found = Docstring()
    lines = inspect.cleandoc(raw or "").splitlines()
    prose: list[str] = []
    at = 0
    while at < len(lines):
        head = _HEAD.fullmatch(lines[at])
        at += 1
        if head is None:
            prose.append(lines[at - 1])
            continue
        body = []
        while at < len(lines) and (not lines[at] or lines[at].startswith(" ")):
            body.append(lines[at])
            at += 1
        _add(found, head[1], head[2] or "", head[3].strip(), inspect.cleandoc("\n" + "\n".join(body)).splitlines())
    paragraphs = "\n".join(prose).strip().split("\n\n", 1)
    found.summary = " ".join(paragraphs[0].split())
    found.prose = paragraphs[1].strip("\n") if len(paragraphs) > 1 else ""
    return found


def _add(found: Docstring, section: str, group: str, beside: str, body: list[str]) -> None:
    if section in ("Args", "Attributes", "Raises"):
        items: dict[tuple[str, ...], str] = {}
        for line in body:
            item = _ITEM.match(line)
            if item and not line.startswith(" "):
                names = tuple(item[1].split(", "))
                items[names] = item[2]
            elif line:
                items[names] += " " + line.strip()
        if group and items:
            found.groups[next(iter(items))] = group
        found.items.setdefault(section, {}).update(items)
    elif section == "Example":
        found.texts[section] = "\n".join(body)
    else:
        found.texts[section] = " ".join([beside, *(line.strip() for line in body)]).strip()


def markdown(text: str) -> str:
    """Converts prose to Markdown: except in code and tables, special characters are escaped."""
    lines = text.splitlines()
    blocks = groupby(lines, key=lambda line: line.startswith(_VERBATIM))
    return "\n".join("\n".join(block) if verbatim else _literal("\n".join(block)) for verbatim, block in blocks)


def _literal(text: str) -> str:
    parts = _CODE.split(text)
    for number in range(0, len(parts), 2):
        plain = _SPECIAL.sub(lambda match: "".join("\\" + sign for sign in match[0]), parts[number]).replace("<", "&lt;")
        parts[number] = _GUIDE.sub(r"[\1](../\1)", plain)
    return "".join(parts)
