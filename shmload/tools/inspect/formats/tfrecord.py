"""TFRecord files, plain or compressed."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import numpy as np

from shmload._core.crc32c import crc32c, masked
from shmload._core.records import record_starts
from shmload.errors import ShardCorrupt
from shmload.formats.tfrecord.files import SUFFIX, RecordFile
from shmload.tools.inspect.formats.example import features_of
from shmload.tools.inspect.summary import Head, Indexed, Sizes, Summary, outcome, stamp

NAME = "TFRecord"
_LOOKED_AT = 100  # records whose features are listed
_INFLATED_MAX = 1 << 34


def matches(head: Head) -> bool:
    if head.compression not in ("", "gzip", "zlib") or len(head.begin) < 12:
        return False
    return masked(crc32c(head.begin[:8])) == int.from_bytes(head.begin[8:12], "little")


def describe(head: Head, num_samples: int) -> Summary:
    path = os.path.abspath(head.path)
    data: Any = RecordFile(path, "auto", _INFLATED_MAX).data
    text, problem, at = record_starts(data)
    starts = np.frombuffer(text, np.int64)
    if problem:
        raise ShardCorrupt(
            f"{head.path}: record {len(starts) - 1}, which starts at byte {at}: truncated or damaged ({problem})"
        )
    count = len(starts) - 1
    found = [_record(head, data, starts, i) for i in range(min(count, max(_LOOKED_AT, num_samples)))]
    parsed = [features_of(record) for record in found]
    is_example = bool(parsed) and all(features is not None for features in parsed)
    samples: list[dict[str, Any]] = [
        {name: _single(values) for name, values in (features or {}).items()} if is_example else {"bytes": record}
        for features, record in zip(parsed[:num_samples], found, strict=False)
    ]
    fields = _fields([features or {} for features in parsed]) if is_example else {"bytes": "bytes"}
    notes = [f"records are tf.train.Example: fields are those of the first {len(parsed)}"] if is_example else []
    if head.compression:
        notes.append(f"compressed by {head.compression}: {len(data):,} bytes, inflated by each process that opens it")
    return Summary(str(head.path), NAME, head.nbytes, count, fields, Sizes.of(np.diff(starts) - 16), samples, notes)


def _record(head: Head, data: Any, starts: Any, number: int) -> bytes:
    start, end = int(starts[number]), int(starts[number + 1])
    record = bytes(data[start + 12 : end - 4])
    if masked(crc32c(record)) != int.from_bytes(data[end - 4 : end], "little"):
        raise ShardCorrupt(
            f"{head.path}: record {number}, which starts at byte {start}: the checksum of its data differs"
        )
    return record


def _fields(records: list[dict[str, Any]]) -> dict[str, str]:
    """Each feature's kind and how many values it has."""
    kinds: dict[str, set[str]] = defaultdict(set)
    counts: dict[str, list[int]] = defaultdict(list)
    for features in records:
        for name, values in features.items():
            kinds[name].add(str(values.dtype) if isinstance(values, np.ndarray) else "bytes" if values else "empty")
            counts[name].append(len(values))
    found = {}
    for name in sorted(kinds):
        low, high = min(counts[name]), max(counts[name])
        extent = "" if low == high == 1 else f" ({low},)" if low == high else f" ({low} to {high},)"
        missing = len(records) - len(counts[name])
        found[name] = (
            " or ".join(sorted(kinds[name]))
            + extent
            + (f", in {len(counts[name])} of {len(records)}" if missing else "")
        )
    return found


def _single(values: Any) -> Any:
    return values[0] if len(values) == 1 else values


def index(head: Head) -> Indexed:
    path = os.path.abspath(head.path)
    if head.compression:
        return Indexed(
            str(head.path),
            None,
            why=f"{head.path} is compressed: it is inflated when it is opened, and needs no index beside it",
        )
    before = stamp(path + SUFFIX)
    offsets = RecordFile(path, "auto", _INFLATED_MAX).offsets()
    return outcome(str(head.path), path + SUFFIX, len(offsets) - 1, before)
