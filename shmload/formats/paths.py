"""Files as a dataset's arguments name them: paths and patterns."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from glob import glob

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")  # two letters at least: of one, it is another system's drive
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def check_local(path: str | os.PathLike[str], reader: str) -> None:
    """Returns if a path is none of another machine's.

    Args:
        reader: what was to read it, for the error.
    Raises:
        ValueError: it is a URL.
    """
    if scheme := _URL.match(os.fspath(path)):
        raise ValueError(
            f"{reader} reads files of this machine; got the URL {os.fspath(path)!r}: copy what is there to a local disk, or "
            f"mount it; tar shards are read from where they are ({scheme[1]}) by RemoteDataset.from_urls"
        )


def expanded(paths: Paths, kind: str, *, beside: tuple[str, ...] = ()) -> list[str]:
    """The files that paths and patterns with * ? [ ] name, absolute; those of a pattern sorted by name.

    Args:
        kind: of the files, for the errors.
        beside: how the names of files end that patterns leave out: indexes that lie beside the files meant.
    Raises:
        FileNotFoundError: a pattern matches nothing.
        ValueError: there is no path, or one is a URL.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[str] = []
    for path in [os.fspath(p) for p in given]:
        check_local(path, f"{kind}Dataset")
        if os.path.exists(path):
            found.append(os.path.abspath(path))
            continue
        matching = sorted(p for p in glob(path, recursive=True) if not p.endswith(beside))
        if not matching:
            raise FileNotFoundError(f"no {kind} file is named, or matches, {path!r}")
        found += map(os.path.abspath, matching)
    if not found:
        raise ValueError(f"{kind}Dataset needs at least one path")
    return found
