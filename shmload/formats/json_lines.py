"""The format JSON lines: one object per line. Format: https://jsonlines.org."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shmload.errors import ShardCorrupt
from shmload.formats.block_format import BlockFormat
from shmload.formats.block_index import PIECE, Bounds, Read, RecordIndex
from shmload.formats.compression import compression_of, expanded_file, split_compression
from shmload.formats.head import COMPRESSIONS, Head
from shmload.formats.summary import RECORDS_SEEN, Sizes, Summary, fields_seen


@dataclass(frozen=True)
class JsonLines(BlockFormat):
    """Lines of JSON. A value that is not an object becomes the field "value". Blank lines are ignored."""

    name: ClassVar[str] = "jsonl"
    title: ClassVar[str] = "JSON lines"
    endings: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    def recognize(self, head: Head) -> bool:
        return not head.is_folder and head.compression != "zlib" and is_lines(head.path.name)

    def describe(self, head: Head, num_samples: int) -> Summary:
        nbytes, seen, at = list[int](), list[dict[str, Any]](), 0
        kinds = {name: kind for kind, name in COMPRESSIONS.items()}
        with open(head.path, "rb") as raw:
            try:
                for line in expanded_file(kinds[head.compression], raw) if head.compression else raw:
                    if line.strip():
                        nbytes.append(len(line))
                        if len(seen) < max(RECORDS_SEEN, num_samples):
                            value = json.loads(line)
                            seen.append(value if isinstance(value, dict) else {"value": value})
                    at += len(line)
            except ValueError as error:
                raise ShardCorrupt(f"{head.path}: line {len(nbytes)} with a sample, at byte {at}: {error}") from error
        fields = fields_seen(seen, Counter(name for sample in seen for name in sample), len(seen))
        notes = [f"compressed by {head.compression}: {at:,} bytes"] if head.compression else []
        return Summary(str(head.path), self.title, head.nbytes, len(nbytes), fields, Sizes.of(nbytes), seen[:num_samples], notes)

    def index(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        ends: list[Bounds] = []
        before = b""  # the first byte that is not blank of a line that began in an earlier piece
        for at in range(0, nbytes, PIECE):
            piece = bytes(memoryview(read(at, min(PIECE, nbytes - at))).cast("B"))
            if at == 0 and (compression := compression_of(piece)):
                raise ShardCorrupt(f"{url}: at byte 0: JSON is needed, but this is compressed ({compression})")
            found = np.flatnonzero(np.frombuffer(piece, np.uint8) == 10) + 1
            starts = np.concatenate([[0], found[:-1]]) if len(found) else found
            maybe = np.flatnonzero(np.isin(np.frombuffer(piece, np.uint8)[starts], list(_BLANKS)))
            blank = [k for k in maybe.tolist() if not (k == 0 and before) and not piece[starts[k] : found[k]].strip(_BLANKS)]
            before = (piece[found[-1] :] if len(found) else before + piece).lstrip(_BLANKS)[:1]
            ends.append(np.delete(found, blank) + at)  # a blank line belongs to the block of the line after it
        if before:
            ends.append(np.array([nbytes]))
        bounds = np.concatenate([np.zeros(1, np.int64), *ends]).astype(np.int64)
        return RecordIndex(url, bounds)

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        found = json.loads(bytes(data))
        return found if isinstance(found, dict) else {"value": found}


_BLANKS = b" \t\r\n"  # white space of JSON


def is_lines(name: str) -> bool:
    """Return whether a file is JSON lines, compressed or not, by its name, because its first bytes do not show it."""
    return split_compression(name.lower())[0].endswith(JsonLines.endings)
