r"""Functions on files that several formats share.

* Find the files that a dataset's arguments name: paths, folders, patterns (`expanded`), and braces (`shard_paths`).
* Write files atomically: `make_half`, `AtomicWriter`, `write_whole`.
* Parse .npy headers (`npy_head`), and decompress gzip and zlib up to a limit (`inflated`).

Braces name many shards at once, `train-{000000..000099}.tar`, and expand as in bash and webdataset:

    {a,b}  {a,{b,c}}  {,x}     alternatives, which may be nested and empty
    {0..9}  {01..10..3}        numbers, ascending or descending, with a step; zero-padded if one begins with 0
    {a..e}                     letters
    {a}  \{                   literal

`::` separates several names.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import stat
import string
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import lru_cache
from glob import glob
from typing import Any, Self

import numpy as np

log = logging.getLogger("shmload")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")  # at least two letters, because a single one is a drive of another system
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def check_local(path: str | os.PathLike[str], reader: str) -> None:
    """Raise if `path` is a URL.

    Args:
        path: the path to check.
        reader: name of the class that was asked to read it, for the error.
    Raises:
        ValueError: it is a URL.
    """
    if scheme := _URL.match(os.fspath(path)):
        raise ValueError(
            f"{reader} reads files of this machine; got the URL {os.fspath(path)!r}: copy what is there to a local disk, or "
            f"mount it; tar shards are read from where they are ({scheme[1]}) by RemoteDataset.from_urls"
        )


_JOIN = "give the path of a file; several are joined by torch.utils.data.ConcatDataset"


def check_file(path: str | os.PathLike[str], reader: str, remedy: str = _JOIN) -> None:
    """Raise if `path` is a URL or a folder. Used by readers of a single file.

    Args:
        path: the user's argument.
        reader: name of the class that was asked to read it, for the error.
        remedy: advice at the end of the error if it is a folder.
    Raises:
        ValueError: it is a URL or a folder; the message names some of the folder's files.
    """
    check_local(path, reader)
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if not is_hidden(name))
        there = f"it holds {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else "it is empty"
        raise ValueError(f"{reader} reads one file, and {os.fspath(path)} is a folder ({there}): {remedy}")


def is_hidden(key: str) -> bool:
    """Return whether readers of a folder ignore a path in it, because a part of the path begins with "." or "_".

    This is the rule of Hadoop and pyarrow; it covers `.ipynb_checkpoints`, `_temporary`, `_delta_log`, `_SUCCESS` and `__MACOSX`.
    As in Spark, a Hive partition such as `_year=2024` is data.

    Args:
        key: relative to the folder that was given, with slashes.
    """
    *folders, name = key.split("/")
    return name.startswith((".", "_")) or any(
        folder.startswith(".") or (folder.startswith("_") and "=" not in folder) for folder in folders
    )


_NUMBERED = re.compile(r"-\d+-of-\d+$")


def without_number(name: str) -> str:
    """Return a name without the shard number that TensorFlow and Beam append to it: `x.tfrecord-00000-of-00010`."""
    return _NUMBERED.sub("", name)


_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|makefile|dockerfile)(\..*)?"
    r"|(dataset_infos?|dataset_dict|state|features|config|metadata)\.json|(md5|sha\d+)sums?(\.txt)?"
    r"|.*\.(md|rst|py|ipynb|ya?ml|toml|cff|lock|html?|pdf|crc|md5|sha1|sha256)",
    re.IGNORECASE,
)


def is_about(key: str) -> bool:
    """Return whether a file, such as README.md or dataset_info.json, describes a dataset and so is not a shard of it."""
    return _ABOUT.fullmatch(key.rpartition("/")[2]) is not None


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
    for place, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        for name in names:
            key = os.path.relpath(os.path.join(place, name), folder)
            (ignored if is_hidden(key) or key.endswith(beside) else keys).append(key)
    named = [key for key in keys if without_number(key.lower()).endswith(endings)]
    found = named or [key for key in keys if "." not in key.rpartition("/")[2] and not is_about(key)]
    if others := sorted({*keys, *ignored} - {*found}):
        log.debug("%s: %d files are no %s files and are ignored: %s", folder, len(others), kind, ", ".join(others[:5]))
    if not found:
        there = f"only {len(others)} others, such as {others[0]!r}" if others else "it is empty"
        raise FileNotFoundError(
            f"{folder}: the folder holds no {kind} file ({', '.join(endings)}), {there}; names that begin with . or _ are ignored: "
            "give the paths of the files"
        )
    return [os.path.join(folder, key) for key in sorted(found)]


def _num_hidden(path: str) -> int:
    return sum(part.startswith((".", "_")) and part not in (".", "..") for part in path.split("/"))


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
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[tuple[str, str]] = []
    for path in [os.fspath(p) for p in given]:
        check_local(path, f"{kind}Dataset")
        whole = os.path.abspath(path)
        if endings and os.path.isdir(path):
            found += ((file, whole) for file in files_below(whole, kind, endings, beside))
            continue
        if os.path.exists(path):
            found.append((whole, os.path.dirname(whole)))
            continue
        most = _num_hidden(path)
        matching = sorted(p for p in glob(path, recursive=True) if not p.endswith(beside) and _num_hidden(p) <= most)
        if not matching:
            raise FileNotFoundError(f"no {kind} file is named, or matches, {path!r}")
        base = os.path.abspath(os.path.dirname(re.split(r"[*?[]", path)[0]))
        for match in map(os.path.abspath, matching):
            if not endings or not os.path.isdir(match):
                found.append((match, base))
            elif "**" not in path:  # a pattern with ** also matches the files in the folder
                found += ((file, base) for file in files_below(match, kind, endings, beside))
    if not found:
        raise ValueError(f"{kind}Dataset needs at least one path")
    return found


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise unless an atomic write may replace an existing file at `path`.

    Raises:
        ValueError: `path` is a folder, a device or a pipe, which root could overwrite.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{os.fspath(path)} is not a file, so it is not replaced: give the path of a file")


def make_half(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Create a temporary file in the folder of `path`, which the caller renames to `path`. Return (descriptor, name)."""
    half = os.path.join(os.path.dirname(path), f".shmload-{secrets.token_hex(8)}")
    return os.open(half, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), half


class AtomicWriter(ABC):
    """A writer whose file appears atomically: complete after the `with` block, or not at all if the block raised."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def abandon(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self.abandon)
            if kind is None:
                self.close()
                stack.pop_all()


def write_whole(path: str | os.PathLike[str], data: bytes, *, is_new: bool = False) -> bool:
    """Write a file atomically, replacing an older one. Return whether it was written.

    Args:
        path: path of the file.
        data: its contents.
        is_new: do not replace an existing file; return False instead.
    Raises:
        OSError: it cannot be written.
    """
    fd, half = make_half(path)  # no file object, which would warn about an open file when a signal ends the process here
    try:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        (os.link if is_new else os.replace)(half, path)
    except FileExistsError:
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(half)
    return True


def write_if_possible(path: str | os.PathLike[str], data: bytes) -> None:
    """Write an optional file, such as an index, atomically. Errors, such as a full disk, are ignored."""
    with suppress(OSError):
        write_whole(path, data)


def npy_head(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a .npy file. Return (shape, whether it is in Fortran order, dtype).

    Raises:
        ValueError, and any error of numpy's parser for a malicious header: it is not valid.
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its version {version} is none of 1.0, 2.0 and 3.0")
    return (np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0)(file)


def npy_head_of(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Parse the header in the bytes of a .npy file. Return (shape, whether it is in Fortran order, dtype, size of the header).

    Results are cached, because the samples of a dataset often have the same header.

    Raises:
        The same as npy_head.
    """
    at = 10 if data[6:7] == b"\1" else 12
    return _parsed_head(bytes(data[: at + int.from_bytes(data[8:at], "little")]))


@lru_cache(maxsize=256)
def _parsed_head(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    file = io.BytesIO(head)
    return *npy_head(file), file.tell()


_STEP = 1 << 20  # bytes inflated per step


def inflated(data: Any, kind: str, limit: int, remedy: str = "") -> bytes:
    """Decompress a whole "gzip" or "zlib" stream. A gzip stream may have several members, followed by zeros.

    Args:
        data: the compressed bytes.
        kind: "gzip" or "zlib".
        limit: greatest number of decompressed bytes.
        remedy: advice at the end of the error if there are more.
    Raises:
        ValueError: the stream is truncated, damaged, or expands to more than `limit` bytes.
    """
    parts: list[bytes] = []
    total = at = 0
    while at < len(data) or not parts:
        stream = zlib.decompressobj(31 if kind == "gzip" else 15)
        pending: Any = b""
        while not stream.eof:
            if not len(pending):
                pending = data[at : at + _STEP]
                at += len(pending)
            is_over = not len(pending)
            try:
                parts.append(stream.decompress(pending, _STEP))
            except zlib.error as error:
                raise ValueError(f"the {kind} stream is corrupted after {total} inflated bytes: {error}") from error
            pending = stream.unconsumed_tail
            if is_over and not parts[-1] and not stream.eof:
                raise ValueError(f"the {kind} stream is truncated: it does not end with its {len(data)} bytes")
            total += len(parts[-1])
            if total > limit:
                raise ValueError(f"the {kind} stream inflates to more than {limit} bytes{remedy}")
        at -= len(stream.unused_data)
        while kind == "gzip" and at < len(data):  # zeros may follow a member, as gzip(1) allows
            piece = bytes(data[at : at + _STEP])
            at += len(piece) - len(rest := piece.lstrip(b"\0"))
            if rest:
                break
    return b"".join(parts)


_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d+))?")
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase
_MOST = 1_000_000  # more names are a mistake that would exhaust memory


def shard_paths(
    given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, reader: str | None = None, endings: tuple[str, ...] = ()
) -> list[str]:
    """Expand the braces and the `::` of names of tar shards. Return the paths in order.

    Args:
        given: names, with braces; a `Path` is not expanded.
        reader: name of the class, for errors, if it reads only local files: URLs are then rejected, and paths become absolute. If
            None, URLs are allowed, and nothing is searched on disk.
        endings: endings of the files that replace a folder; if empty, a folder stays unchanged.
    Raises:
        FileNotFoundError: a folder has no such file.
        ValueError: there are no names, a brace has no partner, or the reader was given a URL.
    """
    names = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    found: list[str] = []
    for name in names:
        if isinstance(name, os.PathLike):  # a path object is used without expansion
            found.append(os.fspath(name))
        else:
            for part in name.split("::"):
                if reader is not None:
                    check_local(part, reader)
                found += expand_braces(part)
    if not found:
        raise ValueError(f"a tar dataset needs at least one shard; got {given!r}")
    if reader is None:
        return found
    groups = (files_below(path, "tar", endings) if endings and os.path.isdir(path) else [path] for path in found)
    return [os.path.abspath(path) for group in groups for path in group]


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
