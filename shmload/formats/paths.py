"""Files as a dataset's arguments name them: paths and patterns."""

from __future__ import annotations

import os
from collections.abc import Iterable
from glob import glob

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def expanded(paths: Paths, kind: str, *, beside: tuple[str, ...] = ()) -> list[str]:
    """The files that paths and patterns with * ? [ ] name, absolute; those of a pattern sorted by name.

    Args:
        kind: of the files, for the errors.
        beside: how the names of files end that patterns leave out: indexes that lie beside the files meant.
    Raises:
        FileNotFoundError: a pattern matches nothing.
        ValueError: there is no path.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[str] = []
    for path in [os.fspath(p) for p in given]:
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
