"""Headers of tar members: 512 bytes of ustar, the same ones every time.

What of a path does not fit a header's name goes to its prefix; longer paths get a PAX header before their own, payloads from 8 GiB
on a size in base 256. Owners, times and modes are fixed.
"""

from __future__ import annotations

from shmload._core.tar import split_name

BLOCK = 512
RECORD = 20 * BLOCK  # what tar programs fill an archive up to
_OWNER = b"0000644\0" + 2 * b"0000000\0"  # mode, uid, gid
_LINK = bytes(100) + b"ustar\x0000" + bytes(64) + 2 * b"0000000\0"  # no link, no names of owners, no device
_PLAIN = sum(_OWNER) + sum(_LINK) + 8 * ord(" ")  # of a header's checksum, which counts itself as blanks


def whole(nbytes: int, of: int) -> int:
    """`nbytes`, filled up to a multiple of `of`."""
    return -(-nbytes // of) * of


def archive_nbytes(members_nbytes: int) -> int:
    """How large the file of such members is, with its end marker and filled up."""
    return whole(members_nbytes + 2 * BLOCK, RECORD)


def member_name(key: str, extension: str) -> bytes:
    """The name of a sample's member.

    Raises:
        ValueError: it would be read back as another key or extension.
    """
    name = f"{key}.{extension}".encode("utf-8", "surrogateescape")
    wanted = (key.encode("utf-8", "surrogateescape"), extension.encode("utf-8", "surrogateescape"))
    if split_name(name) != wanted or b"\0" in name or len(name) >= 1 << 16:
        raise ValueError(
            f"key {key!r} and extension {extension!r} cannot be told apart again: the last part of a key has no dot and "
            "is not empty, an extension is in lower case without a slash, a key does not begin with __meta__"
        )
    return name


def member_header(name: bytes, nbytes: int, *, mtime: int = 0, flag: bytes = b"0") -> bytes:
    """What stands before a payload of `nbytes`."""
    split = _split(name)
    before = b""
    if split is None:
        record = _pax_record(b"path", name)
        before = member_header(b"././@PaxHeader", len(record), mtime=mtime, flag=b"x")
        before += record + bytes(-len(record) % BLOCK)
        split = b"", name[:100]
    prefix, rest = split
    size = b"%011o\0" % nbytes if nbytes < 1 << 33 else b"\x80" + nbytes.to_bytes(11, "big")
    changed = b"%011o\0" % mtime
    checksum = _PLAIN + sum(rest) + sum(size) + sum(changed) + sum(flag) + sum(prefix)
    return b"%b%b%b%b%b%06o\0 %b%b%b%b" % (
        before,
        rest.ljust(100, b"\0"),
        _OWNER,
        size,
        changed,
        checksum,
        flag,
        _LINK,
        prefix.ljust(155, b"\0"),
        bytes(12),
    )


def _split(name: bytes) -> tuple[bytes, bytes] | None:
    """(prefix, name) of a ustar header; None if there is no slash in the right place."""
    if len(name) <= 100:
        return b"", name
    at = name.rfind(b"/", 0, 156)
    if at > 0 and 0 < len(name) - at - 1 <= 100:
        return name[:at], name[at + 1 :]
    return None


def _pax_record(keyword: bytes, value: bytes) -> bytes:
    """ "<length of it all> keyword=value\\n", whose length counts its own digits."""
    length = len(keyword) + len(value) + 3
    while len(b"%d" % length) + len(keyword) + len(value) + 3 != length:
        length = len(b"%d" % length) + len(keyword) + len(value) + 3
    return b"%d %b=%b\n" % (length, keyword, value)
