"""Fuzz every native parser of TFRecord with mutated files; run by ../fuzz.py.

Valid outcomes are a result or a documented error. Sometimes the file changes between the survey and the copy of a batch, as a
mapped
file can.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from shmload._core.crc32c import crc32c, masked
from shmload._core.record_writer import BYTES, RecordBuffer
from shmload._core.records import PROBLEMS, RecordReader, record_starts
from shmload.formats.tfrecord.record_fields import fields_of

GUARD = 64  # guard bytes after the rows that must stay unchanged
BY_TENSORFLOW = Path(__file__).parent / "written_by_tensorflow"
SCHEMAS = [
    ("raw", {"bytes": bytes}, {}),
    ("raw", {"bytes": ("uint16", (None,))}, {}),
    (
        "example",
        {"floats": ("float32", (3,)), "ints": ("int64", (2,)), "ragged": ("int64", (None,)), "text": bytes, "a": ("int8", ())},
        {"floats": 1, "ints": 2, "text": b"", "a": 0},
    ),
    ("example", {"floats": ("float64", (None, 3)), "ints": ("int16", (None,)), "text": ("uint8", (None,)), "": "bool"}, {"": 0}),
    ("example", {"floats": ("float32", (3,)), "ints": ("int64", (2,)), "a": "int8"}, {"floats": 1, "ints": 2, "a": 0}),
    ("sequence", {"frames": ("float32", (None, 2)), "label": "uint8", "r": ("float64", (None,)), "k": "uint64"}, {"label": 0, "k": 0}),
]  # fmt: skip
WHOLE = [
    "0a180a160a016112111a0f0a0d01ffffffffffffffffff01ac02",
    "0a0d0a0b0a016112061a0408010802",
    "0a130a110a0161120c120a0d0000c03f0d00002040",
    "0a090a070a016512021a00",
    "0a070a050a016e1200",
    "0a0c0a0a0a016b12051a030a0107121b0a190a017212140a0812060a04000090400a0812060a040000a040",
    "100119000000000000000025000000002a0178333b3c340a0d0a0b0a016112061a0408010802",
]


def framed(data: bytes) -> bytes:
    """Returns a record of these bytes with correct checksums."""
    head = len(data).to_bytes(8, "little")
    return head + masked(crc32c(head)).to_bytes(4, "little") + data + masked(crc32c(data)).to_bytes(4, "little")


def corpus() -> list[list[bytes]]:
    """Returns the records of small valid files."""
    found = [[bytes.fromhex(data) for data in WHOLE]]
    for name in ("plain", "sequence"):
        file = (BY_TENSORFLOW / f"{name}.tfrecord").read_bytes()
        starts = np.frombuffer(record_starts(file)[0], np.int64)
        found.append([file[a + 12 : b - 4] for a, b in pairwise(starts)])
    found.append([b"", bytes(range(256)) * 70])  # long enough that its checksum is computed during the copy
    huge, file = RecordBuffer(), io.BytesIO()
    huge.append_example([(b"text", BYTES, [bytes(range(256)) * 1100])])
    huge.write_to(file)
    found.append([file.getvalue()[12:-4]])  # long enough for nontemporal stores
    return found


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Returns a record with bytes changed, removed or duplicated, mostly in lengths and tags."""
    some = bytearray(data)
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(min(len(some), 64) or 1) if rng.random() < 0.7 else rng.randrange(len(some) or 1)
        kind = rng.randrange(5)
        if kind == 0 and some:
            some[at] = rng.choice((0, 1, 0x0A, 0x12, 0x1A, 0x7F, 0x80, 0xFF, 0x0D, 0x08, 0x0B, 0x0C, rng.randrange(256)))
        elif kind == 1 and some:
            some[at] = (some[at] + rng.choice((-1, 1))) % 256
        elif kind == 2:
            some[at:at] = rng.choice((b"\x80" * 9, b"\xff" * 10, bytes([rng.randrange(256)]), some[at : at + 8]))
        elif kind == 3:
            del some[at : at + rng.choice((1, 4, 100))]
        else:
            some += some[at : at + 30]
    return bytes(some)


def mutations(seed: int, folder: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yields (file, content while it is being read); the two are mostly the same."""
    rng = random.Random(seed)
    valid = corpus()
    while True:
        records = valid[-1] if rng.random() < 0.005 else rng.choice(valid[:-1])
        data = bytearray(b"".join(framed(mutated(r, rng)) for r in records))
        if rng.random() < 0.2:  # including the frames
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] = rng.choice((0, 0xFF, rng.randrange(256)))
            del data[rng.choice((len(data), rng.randrange(len(data)))) :]
        later = bytearray(data)
        if rng.random() < 0.2 and later:
            kinds = [
                at for at, byte in enumerate(later) if byte in b"\x0a\x12\x1a"
            ]  # tags, some of which determine the kind of the values
            for _ in range(rng.randint(1, 8)):
                if kinds and rng.random() < 0.5:
                    later[rng.choice(kinds)] = rng.choice(b"\x0a\x12\x1a")
                else:
                    later[rng.randrange(len(later))] = rng.randrange(256)
        yield bytes(data), bytes(later)


def read(data: bytes, later: bytes) -> bool:
    """Reads everything in a file natively. Returns whether a record was accepted as an Example or SequenceExample."""
    text, problem, _ = record_starts(data)
    assert problem in PROBLEMS
    starts = np.frombuffer(text, np.int64)
    if problem:  # as an index of another file would contain
        starts = np.append(starts, [len(data) - 12, len(data) - 1, 1 << 62])
    count = len(starts) - 1
    is_sound = False
    for form, (_, schema, defaults) in ((("raw", "example", "sequence").index(s[0]), s) for s in SCHEMAS):
        fields = fields_of(schema, defaults)
        for verify in range(3):
            file = np.frombuffer(data, np.uint8).copy()  # exactly as long as needed, for the sanitizer
            reader = RecordReader([file], [None], np.array([count]), starts[:-1], [f.native() for f in fields], form, verify)
            for indices in (*([i] for i in range(count)), range(count)):
                is_sound |= _taken(reader, fields, list(indices), file, later) and form > 0
    return is_sound


def _taken(reader: RecordReader, fields: list, indices: list[int], file: np.ndarray, later: bytes) -> bool:
    before = bytes(file)
    survey = reader.survey(np.array(indices, np.int64))
    if survey.problem is not None:
        assert survey.problem[0] in PROBLEMS[1:]
        return False
    targets: list[np.ndarray | None] = []
    guarded = []
    for number, field in enumerate(fields):
        if field.is_text:
            targets.append(None)
            continue
        steps = sum(survey.steps(number)) if field.is_ragged else len(indices)
        nbytes = steps * field.numel * field.element.itemsize
        guarded.append(np.full(nbytes + GUARD, 0xA5, np.uint8))
        targets.append(guarded[-1][:nbytes])
    if not any(field.is_text or field.is_ragged for field in fields):
        at_once = reader.survey(np.array(indices, np.int64), targets)
        again = reader.survey(np.array(indices, np.int64))
        again.write(targets)  # the checksum of a long record is computed during the copy
        assert at_once.problem == again.problem
    file[:] = np.frombuffer(later, np.uint8)
    is_written = survey.write(targets)
    assert is_written == (survey.problem is None)
    assert all((rows[-GUARD:] == 0xA5).all() for rows in guarded)
    for number, field in enumerate(fields):
        if field.is_text:
            survey.texts(number)
    file[:] = np.frombuffer(before, np.uint8)
    return is_written
