"""Fuzz every parser of the tar format with mutated shards; run by ../fuzz.py.

Valid outcomes are a result or a ValueError.
"""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shmload._core.tar import TarScan
from shmload._core.tar_rows import TarRows
from shmload.errors import ShardCorrupt
from shmload.formats.tar.shard_index import pack_index
from shmload.formats.tar.tar_format import scan_remote

ALTERNATIVES = ("npy", "cls", "txt")


def corpus() -> list[bytes]:
    """Returns small valid shards of each format."""
    found = []
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=format) as archive:
            for number in range(3):
                array = io.BytesIO()
                np.save(array, np.arange(number * 4, dtype=np.float32).reshape(-1, 2))
                folder = "d" * (20 if format == tarfile.USTAR_FORMAT else 200)
                for extension, data in (("npy", array.getvalue()), ("cls", b"%d" % number), ("txt", "é".encode())):
                    info = tarfile.TarInfo(f"{folder}/{number}.{extension}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        found.append(file.getvalue())
    return found


def mutations(seed: int, folder: Path) -> Iterator[tuple[bytes]]:
    """Yields damaged shards. Header checksums are usually corrected, because otherwise every shard would be rejected at once."""
    rng = random.Random(seed)
    valid = corpus()
    while True:
        data = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 6)):
            block = rng.randrange(len(data) // 512) * 512
            kind = rng.randrange(5)
            if kind == 4:
                _change_length(data, rng)
            elif kind == 0:
                data[block + rng.randrange(512)] = rng.choice((0, 0x20, 0x30, 0x37, 0x80, 0xFF, rng.randrange(256)))
            elif kind == 1:
                field = block + rng.choice((124, 156, 0, 345, 8, 60))
                data[field : field + 1] = rng.choice((b"L", b"x", b"g", b"S", b"\x80", b"7", b"9", b"5"))
            elif kind == 2:
                other = rng.randrange(len(data) // 512) * 512
                data[block : block + 512] = data[other : other + 512]
            elif len(data) > 1024:
                del data[block : block + rng.choice((1, 512))]
                data = data[: len(data) // 512 * 512]
        if rng.random() < 0.9:
            for at in range(0, len(data), 512):
                if data[at + 257 : at + 262] == b"ustar":
                    data[at + 148 : at + 156] = b" " * 8
                    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
        yield (bytes(data),)


def _change_length(data: bytearray, rng: random.Random) -> None:
    """Changes one of the lengths at the start of PAX records, usually to one with as many digits."""
    payloads = [at + 512 for at in range(0, len(data) - 1024, 512) if data[at + 156 : at + 157] in (b"x", b"g")]
    if not payloads:
        return
    begin = rng.choice(payloads)
    starts = [begin] + [at + 1 for at in range(begin, begin + 512) if data[at] == 10]
    at = rng.choice(starts)
    end = data.find(b" ", at)
    length = rng.choice((b"0", b"00", b"0" * 20, b"1", b"2", b"3", b"9", b"512", b"9223372036854775808", b"18446744073709551615"))
    if rng.random() < 0.5:
        length = length[: end - at].rjust(end - at, b"0")  # replaced in place, so that everything after it keeps its offset
    if end > 0:
        data[at:end] = length
        if extra := len(data) % 512:
            del data[-extra:]


def read(data: bytes) -> bool:
    """Reads everything in a shard natively. Returns whether the scan accepted it, after comparing it with the range reader."""
    scan = TarScan(data)
    try:
        found = scan_remote("shard", len(data), lambda offset, nbytes: data[offset : offset + nbytes])
    except ShardCorrupt:
        assert scan.cause or len(data) < 512
    else:
        assert found == pack_index("shard", data)
    if scan.cause:
        return False
    first = np.frombuffer(scan.first, np.uint64)
    names = [extension.decode("utf-8", "replace") for extension in scan.extensions]
    ranks = np.array([[0 if name == wanted else 255 for name in names] for wanted in ALTERNATIVES], np.uint8)
    rows = TarRows(np.array([0, scan.num_samples], np.int64))
    columns = (np.frombuffer(scan.offsets, np.uint64), np.frombuffer(scan.sizes, np.uint64))
    extensions = np.frombuffer(scan.member_extensions, np.uint16)
    rows.open(0, data, *columns, extensions, first, ranks.reshape(len(ALTERNATIVES), len(names)))
    count = scan.num_samples
    if not count:
        return True
    indices = np.arange(count, dtype=np.int64)
    arrays, numbers, texts = (rows.find(indices, field) for field in range(3))
    out = np.empty((count, 4), np.float32)
    extents = np.empty((count, 1), np.int64)
    for row in range(count):
        arrays.read_npy(out, row, b"<f4", np.array([2, 2], np.int64))
        numbers.read_ints(np.empty(count, np.int8), row, 1, True)
        numbers.read_raw(np.empty((count, 1), np.uint8), row)
    if arrays.extents(extents, 0, b"<f4", np.array([-1, 2], np.int64), 4) == count:
        ends = (extents[:, 0] * 8).cumsum().astype(np.uint64)
        arrays.copy_ragged(np.empty(int(ends[-1]), np.uint8), ends)
    texts.payloads(True)
    return True
