r"""Expand the braces in names of tar shards.

Braces name many shards at once, `train-{000000..000099}.tar`, and expand as in bash and webdataset:

    {a,b}  {a,{b,c}}  {,x}     alternatives, which may be nested and empty
    {0..9}  {01..10..3}        numbers, ascending or descending, with a step; zero-padded if one begins with 0
    {a..e}                     letters
    {a}  \{                   literal

`::` separates several names. The readers of local shards then also expand patterns with * ? [ ].
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterable

from shmload.formats.paths import check_local, each_path, expanded, files_below, path_text

_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d+))?")
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase
_MOST = 1_000_000  # more names are a mistake that would exhaust memory


def shard_paths(
    given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, reader: str | None = None, endings: tuple[str, ...] = ()
) -> list[str]:
    """Expand the braces and the `::` of names of tar shards. Return the paths in order.

    Args:
        given: names, with braces and, if a reader is given, patterns; a `Path` is not expanded.
        reader: name of the class, for errors, if it reads only local files: URLs are then rejected, and paths become absolute. If
            None, URLs are allowed, and nothing is searched on disk.
        endings: endings of the files that replace a folder; if empty, a folder stays unchanged.
    Raises:
        FileNotFoundError: a folder or a pattern has no such file.
        TypeError: a name is no path.
        ValueError: there are no names, a brace has no partner, or the reader was given a URL.
    """
    found: list[str] = []
    for name in each_path(given):
        path_text(name, reader or "RemoteDataset")
        if isinstance(name, os.PathLike):  # a path object is used without expansion
            found.append(os.fspath(name))
        else:
            for part in name.split("::"):
                if reader is not None:
                    check_local(part, reader)
                found += (path for each in expand_braces(part) for path in _matching(each, reader, endings))
    if not found:
        raise ValueError(f"a tar dataset needs at least one shard; got {given!r}")
    if reader is None:
        return found
    groups = (files_below(path, "tar", endings) if endings and os.path.isdir(path) else [path] for path in found)
    return [os.path.abspath(path) for group in groups for path in group]


def _matching(name: str, reader: str | None, endings: tuple[str, ...]) -> list[str]:
    """Return the local files that a pattern with * ? [ ] matches; any other name, and every name of a remote shard, as it is."""
    if reader is None or not re.search(r"[*?[]", name) or os.path.exists(name):
        return [name]
    return expanded(name, "tar", endings=endings, beside=(".index",))


def expand_braces(text: str) -> list[str]:
    """Expand the braces of a name; the last ones vary fastest.

    Raises:
        ValueError: a brace has no partner, or there are more than a million names.
    """
    found, end = _expanded(text, 0, is_inside=False)
    if end < len(text):
        raise ValueError(f"the brace at {end} of {text!r} has no partner; a literal one is written \\}}")
    return found


def _expanded(text: str, at: int, *, is_inside: bool) -> tuple[list[str], int]:
    """Expand the text from `at` to its end, or to a comma or brace of the enclosing braces. Return (names, end)."""
    found = [""]
    while at < len(text) and text[at] != "}" and not (text[at] == "," and is_inside):
        if text[at] == "{":
            parts, at = _alternatives(text, at)
        else:
            at += text[at] == "\\" and at + 1 < len(text)
            parts = [text[at]]
        if len(found) * len(parts) > _MOST:
            raise ValueError(f"{text!r} expands to more than {_MOST:,} names")
        found, at = [head + part for head in found for part in parts], at + 1
    return found, at


def _alternatives(text: str, begin: int) -> tuple[list[str], int]:
    """Expand the braces that open at `begin`. Return (names, position of the closing brace)."""
    pieces, at = [], begin
    while at == begin or (at < len(text) and text[at] == ","):
        found, at = _expanded(text, at + 1, is_inside=True)
        pieces.append(found)
    if at == len(text):
        raise ValueError(f"the brace at {begin} of {text!r} has no partner; a literal one is written \\{{")
    if len(pieces) > 1:
        return [found for piece in pieces for found in piece], at
    inner = text[begin + 1 : at]
    if match := _NUMBERS.fullmatch(inner):
        return _numbers(match[1], match[2], match[3]), at
    if match := _LETTERS.fullmatch(inner):
        first, last = _ALPHABET.index(match[1]), _ALPHABET.index(match[2])
        return [_ALPHABET[i] for i in _range(first, last, match[3])], at
    return ["{" + found + "}" for found in pieces[0]], at


def _numbers(first: str, last: str, step: str | None) -> list[str]:
    is_padded = any(re.match("-?0.", number) for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    numbers = _range(int(first), int(last), step)
    if len(numbers) > _MOST:
        raise ValueError(f"{{{first}..{last}}} expands to more than {_MOST:,} names")
    return [f"{n:0{width}d}" for n in numbers]


def _range(first: int, last: int, step: str | None) -> range:
    by = abs(int(step or 1)) or 1
    return range(first, last + 1, by) if first <= last else range(first, last - 1, -by)
