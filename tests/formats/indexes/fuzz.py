"""Fuzz tar, TFRecord and tfindex indexes next to valid shards; run by ../fuzz.py.

Checksums are usually corrected, as an attacker would do. Valid outcomes are the samples, other samples of the same shard, or an
error
that names the file, because addresses are computed from an index.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from shmload._core.crc32c import crc32c
from shmload.formats import TarDataset, TarWriter, TFRecordDataset, TFRecordWriter
from shmload.formats.tar.shard_index import SUFFIX as TAR_SUFFIX
from shmload.formats.tfrecord.record_file import SUFFIX as RECORD_SUFFIX

TAR_HEAD, TAR_SUM = 64, 56  # bytes in the header of a tar index; offset of its checksum
RECORDS = [b"record %d" % i * (i + 1) for i in range(6)]
WORDS = (0, 1, 15, 16, 17, -1, -16, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63))


def corpus(folder: Path) -> dict[str, tuple[Path, bytes]]:
    """Returns (shard, valid index) by the name of the index file."""
    tar, records = folder / "a.tar", folder / "a.tfrecord"
    if not tar.exists():
        with TarWriter(tar) as writer:
            for number in range(4):
                writer.write({"__key__": f"{number:03}", "cls": number, "txt": "é" * number})
        with TFRecordWriter(records) as made:
            for record in RECORDS:
                made.write(record)
    found = {}
    for shard, suffix in ((tar, TAR_SUFFIX), (records, RECORD_SUFFIX)):
        index = Path(f"{shard}{suffix}")
        index.unlink(missing_ok=True)
        len(TarDataset(shard) if shard is tar else TFRecordDataset(shard))
        found[index.name] = (shard, index.read_bytes())
    lines, at = [], 0
    for record in RECORDS:
        lines.append(b"%d %d\n" % (at, 16 + len(record)))
        at += 16 + len(record)
    found["a.tfindex"] = (records, b"".join(lines))
    return found


def mutations(seed: int, folder: Path) -> Iterator[tuple[Path, str, bytes]]:
    """Yields (shard, name of the index, content) with words and bytes changed, removed or duplicated."""
    rng = random.Random(seed)
    valid = corpus(folder)
    while True:
        name = rng.choice(list(valid))
        shard, content = valid[name]
        data = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            if name == "a.tfindex":
                _change_number(data, rng)
            else:
                _change_word(data, rng, TAR_HEAD if shard.suffix == ".tar" else content.index(b"}") + 2)
        if rng.random() < 0.9:
            _sum_up(data, name)
        yield shard, name, bytes(data)


def _change_word(data: bytearray, rng: random.Random, body: int) -> None:
    is_of_head = rng.random() < 0.2 and body == TAR_HEAD
    words = range(8, min(TAR_SUM, len(data) - 7), 8) if is_of_head else range(body, len(data) - 7, 8)
    kind = rng.randrange(5)
    if kind == 0:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind <= 2 and words:
        at = rng.choice(words)
        old = struct.unpack_from("<q", data, at)[0]
        word = rng.choice((*WORDS, old + 1, old - 1, old + 16, old ^ 1 << rng.randrange(62)))
        data[at : at + 8] = (word % (1 << 64)).to_bytes(8, "little")
    elif kind == 3:
        del data[rng.randint(1, len(data)) :]
    elif rng.random() < 0.3:
        data[:] = data[:body]
    else:
        data += data[-8 * rng.randint(1, 3) :]


def _change_number(data: bytearray, rng: random.Random) -> None:
    words = bytes(data).split()
    if words:
        word = rng.choice((*WORDS, 1 << 64, rng.randrange(400)))
        at = rng.randrange(len(words))
        words[at : at + rng.randint(0, 1)] = [b"%d" % word]
        words = words[: rng.choice((len(words), rng.randint(0, len(words))))]
    data[:] = b" ".join(words)


def _sum_up(data: bytearray, name: str) -> None:
    if name.endswith(TAR_SUFFIX) and len(data) >= TAR_HEAD:
        data[TAR_SUM : TAR_SUM + 4] = struct.pack("<I", zlib.crc32(data[TAR_HEAD:]))
    elif name.endswith(RECORD_SUFFIX):
        magic, head, body = [*bytes(data).split(b"\n", 2), b"", b""][:3]
        try:
            said = json.loads(head)
        except ValueError:
            return
        if isinstance(said, dict):
            data[:] = b"\n".join((magic, json.dumps({**said, "crc32c": crc32c(body)}).encode(), body))


def read(shard: Path, name: str, data: bytes) -> bool:
    """Reads everything with an index. Returns whether all of it was read."""
    for other in shard.parent.glob("*index"):
        other.unlink()
    (shard.parent / name).write_bytes(data)
    try:
        if shard.suffix == ".tar":
            samples = TarDataset(shard, decode=False)
            [samples[index] for index in range(min(len(samples), 100))]
            return True
        records = TFRecordDataset(shard)
        found = [records[index]["bytes"] for index in range(len(records))]
    except ValueError:
        return False
    assert all(record in RECORDS for record in found)  # checksums are those of the records, whatever the index contains
    return True
