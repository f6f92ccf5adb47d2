"""Fuzz the readers of arrays and tokens with mutated .npy and Megatron files; run by ../fuzz.py.

Valid outcomes are rows or windows, a ValueError (ShardCorrupt is a subclass) or a TypeError. numpy and Python parse the headers,
but
native code follows the sizes and offsets they contain.
"""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shmload.formats import ArrayDataset, TokenDataset

HEAD = 34  # bytes in the header of a .idx file


def npy_files() -> list[bytes]:
    """Returns small valid .npy files of several versions, memory orders, byte orders and item sizes."""
    found = []
    for array in (
        np.arange(40, dtype="<f4").reshape(5, 8),
        np.asfortranarray(np.arange(60, dtype=">i8").reshape(5, 4, 3)),
        np.arange(9, dtype="<u2"),
        np.zeros((0, 3), np.complex64),
    ):
        for version in ((1, 0), (2, 0), (3, 0)):
            file = io.BytesIO()
            np.lib.format.write_array(file, array, version)
            found.append(file.getvalue())
    return found


def index_file() -> bytes:
    """Returns a valid .idx file of 4 sequences in 3 documents, 20 tokens of 16 bits."""
    lengths = np.array([5, 0, 8, 7], "<i4")
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * 2
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), 4)
    return head + lengths.tobytes() + pointers.tobytes() + np.array([0, 2, 3, 4], "<i8").tobytes()


def mutations(seed: int, folder: Path) -> Iterator[tuple[Path, str, bytes]]:
    """Yields (path, kind, content) of truncated files and files with changed bytes, header digits or words."""
    rng = random.Random(seed)
    valid = [("npy", data) for data in npy_files()] + [("idx", index_file())] * 6
    while True:
        kind, content = rng.choice(valid)
        data = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(data))
            way = rng.randrange(5)
            if way == 0:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            elif way == 1 and kind == "npy":
                digits = [i for i, byte in enumerate(data[:80]) if 48 <= byte <= 57]
                if digits:
                    data[rng.choice(digits)] = rng.choice(b"0123456789-,(L<>|=")
            elif way == 2 and kind == "idx":
                word = rng.choice((0, 1, 7, -1, 1 << 31, 1 << 62, rng.randrange(1 << 40)))
                place = rng.choice((18, 26, *range(HEAD, len(data) - 7, 4)))
                data[place : place + 8] = struct.pack("<q", word)
            elif way == 3:
                data = data[: rng.randrange(1, len(data) + 1)]
            elif way == 4 and rng.random() < 0.1:
                data += bytes(rng.randrange(64))
        yield folder, kind, bytes(data)


def read(folder: Path, kind: str, data: bytes) -> bool:
    """Reads everything in a file. Returns whether the file was valid."""
    path = folder / f"file.{kind}"
    path.write_bytes(data)
    tokens = folder / "tokens.bin"
    try:
        if kind == "idx":
            tokens.write_bytes(np.arange(20, dtype="<u2").tobytes())
            for options in ({"pack": True}, {"cross_documents": True}, {"stride": 2}):
                dataset = TokenDataset(tokens, 4, document_index=path, **options)
                [dataset[index] for index in range(-len(dataset), len(dataset))]
            return True
        rows = ArrayDataset(path)
        [rows[index] for index in range(-min(len(rows), 50), 0)]
        out = {name: np.empty((3, *shape), dtype) for name, (dtype, shape) in rows.schema.items()}
        if len(rows) and out["data"].nbytes < 1 << 20:
            rows.read_batch_into([0, len(rows) - 1, -len(rows)], out)
        windows = TokenDataset(path, 3, document_index=path)
        [windows[index] for index in range(len(windows))]
    except (ValueError, TypeError):
        return False
    return True
