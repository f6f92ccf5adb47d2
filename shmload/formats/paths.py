"""Find the local files that a dataset's arguments name: paths, folders, and patterns with * ? [ ]."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import filter as matching_names
from glob import has_magic
from typing import Any

from shmload.formats.file_names import is_about, is_hidden, without_number
from shmload.storage.folder_walk import walk_following_links

log = logging.getLogger("shmload")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")  # at least two letters, because a single one is a drive of another system
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def each_path(given: Any) -> list[Any]:
    """Return the paths of an argument that is one path or several. Anything else is returned as one, for `path_text` to refuse."""
    is_several = isinstance(given, Iterable) and not isinstance(given, str | bytes | os.PathLike)
    return list(given) if is_several else [given]


def path_text(path: str | os.PathLike[str], reader: str, remedy: str = "") -> str:
    """Return a path as a str.

    Args:
        path: the user's argument.
        reader: name of the class that was asked to read it, for the error.
        remedy: advice at the end of the error.
    Raises:
        TypeError: it is no path, or a path of bytes.
    """
    text: object = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if isinstance(text, str):
        return text
    advice = "os.fsdecode() makes a str of bytes" if isinstance(text, bytes) else remedy
    raise TypeError(f"{reader} takes a path as a str or an os.PathLike; got {path!r:.200}{advice and f': {advice}'}")


def check_local(path: str | os.PathLike[str], reader: str, remedy: str = "") -> None:
    """Raise if `path` is a URL or no path.

    Args:
        path: the path to check.
        reader: name of the class that was asked to read it, for the error.
        remedy: advice at the end of the error if it is no path.
    Raises:
        TypeError: it is no path, or a path of bytes.
        ValueError: it is a URL.
    """
    text = path_text(path, reader, remedy)
    if scheme := _URL.match(text):
        raise ValueError(
            f"{reader} reads files of this machine; got the URL {text!r}: copy the files to a local disk, mount it, or "
            f"read {scheme[1]}:// with RemoteDataset.from_urls, which needs no local files"
        )


JOIN = "give the path of a file; several are joined by torch.utils.data.ConcatDataset"


def check_file(path: str | os.PathLike[str], reader: str, remedy: str = JOIN) -> None:
    """Raise if `path` is a URL, a folder or a pattern. Used by readers of a single file.

    Args:
        path: the user's argument.
        reader: name of the class that was asked to read it, for the error.
        remedy: advice at the end of the error.
    Raises:
        FileNotFoundError: it is a pattern.
        TypeError: it is no path.
        ValueError: it is a URL or a folder; the message names some of the folder's files.
    """
    check_local(path, reader, remedy)
    if has_magic(os.fspath(path)) and not os.path.exists(path):
        raise FileNotFoundError(f"{reader} reads one file, and there is no file with the name {os.fspath(path)!r}: {remedy}")
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if not is_hidden(name))
        there = f"it contains {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else "it is empty"
        raise ValueError(f"{reader} reads one file, and {os.fspath(path)} is a folder ({there}): {remedy}")


def files_below(folder: str, kind: str, endings: tuple[str, ...], beside: tuple[str, ...] = ()) -> list[str]:
    """Return the sorted paths of the files in a folder, at any depth, that have one of the format's endings.

    If there are none, return the files whose names have no ending (`part-00000`), except those that describe the data (README).
    Hidden files are ignored.

    Args:
        folder: the folder to search.
        kind: kind of the files, for errors: "TFRecord".
        endings: endings of the names of such files.
        beside: endings of the names of indexes, which are ignored.
    Raises:
        FileNotFoundError: there are no such files.
    """
    keys, ignored = list[str](), list[str]()
    for place, folders, names in walk_following_links(folder):
        folders.sort()
        for name in names:
            key = os.path.relpath(os.path.join(place, name), folder)
            (ignored if is_hidden(key) or key.endswith(beside) else keys).append(key)
    named = [key for key in keys if without_number(key.lower()).endswith(endings)]
    found = named or [key for key in keys if "." not in key.rpartition("/")[2] and not is_about(key)]
    if others := sorted({*keys, *ignored} - {*found}):
        log.debug("%s: %d files are not %s files and are ignored: %s", folder, len(others), kind, ", ".join(others[:5]))
    if not found:
        there = f"only {len(others)} others, such as {others[0]!r}" if others else "it is empty"
        raise FileNotFoundError(
            f"{folder}: the folder contains no {kind} file ({', '.join(endings)}), {there}; names that begin with . or _ are "
            "ignored: give the paths of the files"
        )
    return [os.path.join(folder, key) for key in sorted(found)]


def _matching(pattern: str) -> Iterator[str]:
    """Yield the paths that match a pattern, some of them more than once, like `glob(pattern, recursive=True)`.

    Raises:
        OSError: a folder cannot be listed; `glob` would silently leave out everything below it.
    """
    above, name = os.path.split(pattern)
    for folder in _matching(above) if has_magic(above) else [above]:
        if name == "**":
            if os.path.isdir(folder or "."):
                yield os.path.join(folder or ".", "")
                for place, folders, names in walk_following_links(folder or "."):
                    folders[:] = [each for each in folders if not each.startswith(".")]
                    yield from (os.path.join(place, each) for each in (*folders, *names) if not each.startswith("."))
            continue
        with suppress(FileNotFoundError, NotADirectoryError):
            if not has_magic(name):
                os.lstat(path := os.path.join(folder, name))
                yield path
                continue
            with os.scandir(folder or ".") as entries:
                found = [entry.name for entry in entries if name.startswith(".") or not entry.name.startswith(".")]
            yield from (os.path.join(folder, each) for each in matching_names(found, name))


def _num_hidden(path: str) -> int:
    """Return the number of hidden parts of a path, by the rule of `is_hidden`: a Hive partition such as `_year=2024` is not one."""
    parts = [part for part in path.split("/") if part not in (".", "..")]
    is_partition = parts[-1].startswith("_") and "=" in parts[-1] and os.path.isdir(path)
    folders = parts if is_partition else parts[:-1]
    hidden = [folder for folder in folders if folder.startswith(".") or (folder.startswith("_") and "=" not in folder)]
    return len(hidden) + (not is_partition and parts[-1].startswith((".", "_")))


def expanded(paths: Paths, kind: str, *, endings: tuple[str, ...] = (), beside: tuple[str, ...] = ()) -> list[str]:
    """Return the absolute paths of the files that are given by paths, folders and patterns with * ? [ ].

    The files of a pattern or a folder are sorted by name. Hidden ones (`is_hidden`) are omitted, unless the pattern contains their
    dot or underscore; a file that is given by its path is always included.

    Args:
        paths: one or several paths, folders or patterns.
        kind: kind of the files, for errors: "TFRecord".
        endings: endings of the names of such files in a folder. If empty, a folder is returned itself.
        beside: endings of the names of indexes next to the files, which patterns and folders omit.
    Raises:
        FileNotFoundError: a pattern or a folder has no such file.
        OSError: a folder that is searched cannot be listed.
        ValueError: there is no path, or one is a URL.
    """
    return [path for path, _ in expanded_below(paths, kind, endings=endings, beside=beside)]


def expanded_below(
    paths: Paths, kind: str, *, endings: tuple[str, ...] = (), beside: tuple[str, ...] = ()
) -> list[tuple[str, str]]:
    """Return (file, the folder below which it was found) for each file that `expanded` returns.

    That folder is the one that was given, the folder before a pattern's first * ? [, or the folder that contains a single file.
    Arguments and errors are those of `expanded`.
    """
    found: list[tuple[str, str]] = []
    for given in each_path(paths):
        check_local(given, f"{kind}Dataset")
        path = os.fspath(given)
        whole = os.path.abspath(path)
        if endings and os.path.isdir(path):
            found += ((file, whole) for file in files_below(whole, kind, endings, beside))
            continue
        if os.path.exists(path):
            found.append((whole, os.path.dirname(whole)))
            continue
        most = _num_hidden(path)
        matching = sorted({p for p in _matching(path) if p != "./" and not p.endswith(beside) and _num_hidden(p) <= most})
        if not matching:
            raise FileNotFoundError(
                f"no {kind} file has the name {path!r}, or matches it as a pattern with * ? [ ]: check the path"
            )
        base = os.path.abspath(os.path.dirname(re.split(r"[*?[]", path)[0]))
        for match in map(os.path.abspath, matching):
            if not endings or not os.path.isdir(match):
                found.append((match, base))
            elif "**" not in path:  # a pattern with ** also matches the files in the folder
                found += ((file, base) for file in files_below(match, kind, endings, beside))
    if not found:
        raise ValueError(f"{kind}Dataset needs at least one path")
    return found
