"""TarWriter: write samples to tar shards reproducibly: equal samples give equal bytes.

A member is a header of 512 bytes and its payload. The members of a sample are sorted by extension. Headers are ustar: the part of a
path that does not fit the name field goes to the prefix field. Longer paths, and payloads of 8 GiB or more, use GNU tar's headers.
Owners, modes and modification times are fixed.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shmload._core.tar import split_name
from shmload.formats.atomic_write import AtomicWriter, check_replaceable, make_half
from shmload.formats.compression import split_compression
from shmload.formats.tar.encoders import encode
from shmload.formats.tar.shard_index import BLOCK, KEY

RECORD = 20 * BLOCK  # tar programs pad an archive to a multiple of this
_OWNER = b"0000644\0" + 2 * b"0000000\0"  # mode, uid, gid
_LINK = bytes(100) + b"ustar\x0000" + bytes(64) + 2 * b"0000000\0"  # no link, no owner names, no device
# constant part of a header's checksum, which counts its own field as blanks
_PLAIN = sum(_OWNER) + sum(_LINK) + ord("0") + 8 * ord(" ")


def archive_nbytes(members_nbytes: int) -> int:
    """Return the size of an archive in bytes, including its end marker and padding, given the total size of its members."""
    return -(-(members_nbytes + 2 * BLOCK) // RECORD) * RECORD


def member_name(key: str, extension: str) -> bytes:
    """Return the name of a sample's member in the archive, `key.extension`.

    Raises:
        ValueError: it would be read back as another key or extension.
    """
    name = f"{key}.{extension}".encode("utf-8", "surrogateescape")
    wanted = (key.encode("utf-8", "surrogateescape"), extension.encode("utf-8", "surrogateescape"))
    if split_name(name) != wanted or b"\0" in name or len(name) >= 1 << 16:
        raise ValueError(
            f"key {key!r} and extension {extension!r} cannot be separated again: the last part of a key must have no dot "
            "and not be empty, an extension must be in lower case without a slash, and a key must not begin with __meta__"
        )
    return name


def member_header(name: bytes, nbytes: int, *, mtime: int = 0) -> bytes:
    """Return the header for a payload of `nbytes` bytes; `mtime` is in seconds since 1970."""
    prefix, rest = b"", name
    if len(name) > 100:
        at = name.rfind(b"/", 0, 156)
        prefix, rest = (name[:at], name[at + 1 :]) if at > 0 else (b"", name)  # a leading slash does not end a prefix
    if not 0 < len(rest) <= 100 or nbytes >= 1 << 33:
        info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
        info.size, info.mtime = nbytes, mtime
        return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    size, changed = b"%011o\0" % nbytes, b"%011o\0" % mtime
    checksum = _PLAIN + sum(rest) + sum(size) + sum(changed) + sum(prefix)
    return b"%b%b%b%b%06o\0 0%b%b%b" % (
        rest.ljust(100, b"\0"),
        _OWNER,
        size,
        changed,
        checksum,
        _LINK,
        prefix.ljust(155, b"\0"),
        bytes(12),
    )


_NUMBER = re.compile(r"%0?\d*d")


class TarWriter(AtomicWriter):
    """Writes samples to tar shards: dicts of values by extension, and `__key__`.

    A shard appears under its name when it is complete; if an error interrupts it, it does not appear. Values are encoded by
    extension; bytes and str are written unchanged.

    Args:
        path: path of a single shard, or a pattern with a number, "train-%06d.tar", for several. `.tar.gz`, `.tgz`, `.tar.bz2` and
            `.tar.xz` are compressed, and can only be read in order.
        maxcount: greatest number of samples per shard.
        maxsize: greatest size of a shard in bytes before compression, never exceeded.
        mtime: modification time of all members, in seconds since 1970.
        start_shard: number of the first shard.
    Raises:
        ValueError: limits are given without a pattern; the path's ending is that of another compression, or it exists and is not a
            file but, for example, a device; or a key or an extension would be read back as another.
    Cost: one copy of each payload.
    Example:
        >>> import tempfile
        >>> from shmload.formats import TarDataset, TarWriter
        >>> folder = tempfile.mkdtemp()
        >>> with TarWriter(f"{folder}/train-%06d.tar", maxcount=1000) as writer:
        ...     writer.write({"__key__": "0001", "txt": "three", "cls": 3})
        >>> TarDataset(f"{folder}/train-000000.tar")[0]
        {'__key__': '0001', 'cls': 3, 'txt': 'three'}
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        maxcount: int | None = None,
        maxsize: int | None = None,
        mtime: int = 0,
        start_shard: int = 0,
    ) -> None:
        self._pattern = os.fspath(path)
        self._is_pattern = _NUMBER.search(self._pattern) is not None
        if (kind := split_compression(self._pattern)[1]) not in ("", "gz", "bz2", "xz"):
            raise ValueError(
                f"TarWriter compresses with gzip, bzip2 or xz, not as .{kind}; got {path!r}: compress a .tar afterward"
            )
        if not self._is_pattern and (maxcount is not None or maxsize is not None):
            raise ValueError(f"maxcount and maxsize need a pattern for several shards, like train-%06d.tar; got {path!r}")
        if (maxcount is not None and maxcount < 1) or (maxsize is not None and maxsize < RECORD):
            raise ValueError(f"maxcount must be at least 1 and maxsize at least {RECORD}, got {maxcount}, {maxsize}")
        self._maxcount, self._maxsize, self._mtime = maxcount, maxsize, mtime
        self._shard = start_shard
        self._files: list[Any] = []  # of the current shard: the compressor, if any, and the file
        self._temporary = self._last_key = ""
        self._nbytes = self._count = 0
        self.paths: list[str] = []  # of complete shards

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append a sample.

        Args:
            sample: values by extension, and under `__key__` a str that differs from the previous sample's. Other names that begin
                with two underscores are skipped.
        Raises:
            ValueError: its key or an extension would be read back as another, it has no members, or it is larger than a shard.
        """
        key = sample.get(KEY)
        if not isinstance(key, str):
            raise ValueError(f"a sample needs its name under {KEY!r}, a str; got {key!r}")
        pieces = [self._member(key, name, sample[name]) for name in sorted(sample) if not name.startswith("__")]
        if not pieces:
            raise ValueError(f"sample {key!r} has no members; give at least one extension")
        nbytes = sum(len(piece) for piece in pieces)
        if self._maxsize is not None and archive_nbytes(nbytes) > self._maxsize:
            raise ValueError(f"sample {key!r} takes {nbytes} bytes, and a shard has at most maxsize={self._maxsize}")
        if self._is_full(nbytes):
            self._finish()
        if not self._files:
            self._begin()
        elif key == self._last_key:
            raise ValueError(f"two samples in a row are called {key!r}: they would be read back as one")
        for piece in pieces:
            self._files[0].write(piece)
        self._nbytes += nbytes
        self._count += 1
        self._last_key = key

    def close(self) -> None:
        """Complete the last shard. Without any sample, write one empty shard."""
        if not self._files and not self.paths:
            self._begin()
        if self._files:
            self._finish()

    def _is_full(self, nbytes: int) -> bool:
        if not self._files or not self._is_pattern:
            return False
        is_full = self._maxcount is not None and self._count >= self._maxcount
        return is_full or (self._maxsize is not None and archive_nbytes(self._nbytes + nbytes) > self._maxsize)

    def _member(self, key: str, extension: str, value: Any) -> bytes:
        name, payload = member_name(key, extension), encode(extension, value)
        return member_header(name, len(payload), mtime=self._mtime) + payload + bytes(-len(payload) % BLOCK)

    def _begin(self) -> None:
        path = self._path()
        check_replaceable(path)
        fd, self._temporary = make_half(path)
        raw = open(fd, "wb", buffering=1 << 20)  # noqa: SIM115  # closed with the shard
        self._files = [raw]  # in the order in which they are closed
        if (kind := split_compression(path)[1]) == "gz":
            self._files.insert(0, gzip.GzipFile("", "wb", 6, raw, 0))
        elif kind:
            self._files.insert(0, (bz2.BZ2File if kind == "bz2" else lzma.LZMAFile)(raw, "wb"))
        self._nbytes = self._count = 0

    def _path(self) -> str:
        return _NUMBER.sub(lambda match: match[0] % self._shard, self._pattern)

    def _finish(self) -> None:
        self._files[0].write(bytes(archive_nbytes(self._nbytes) - self._nbytes))
        for file in self._files:
            file.close()
        os.replace(self._temporary, self._path())
        self._files = []
        self.paths.append(self._path())
        self._shard += 1

    def abandon(self) -> None:
        """Discard the current shard without leaving a file; an older file of its name stays."""
        files, self._files = self._files, []
        if files:
            os.unlink(self._temporary)
        for file in files:
            with suppress(OSError):  # for example on a full disk, which may be the reason for discarding the shard
                file.close()
