"""The format TFRecord: records of tf.train.Examples.

Format: https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shmload._core.crc32c import crc32c, masked
from shmload._core.records import example_features, record_starts
from shmload.batch.element_types import of_any
from shmload.errors import ShardCorrupt
from shmload.formats.block_format import BlockFormat
from shmload.formats.block_index import Bounds, Pieces, Read, RecordIndex
from shmload.formats.head import Head
from shmload.formats.summary import RECORDS_SEEN, Sizes, Summary, fields_seen
from shmload.formats.tfrecord.record_file import SUFFIX, RecordFile

_INFLATED_MAX = 1 << 34


@dataclass(frozen=True)
class TFRecords(BlockFormat):
    """Records of Examples. Checksums are compared.

    Args:
        schema: type and shape of the features that samples have, as for TFRecordDataset: {"label": "int64", "name": str, "x":
            ("float32", (3,)), "image": bytes}. If None, all features: numbers as arrays of shape `(n,)`, bytes as bytes or a list.
        is_example: whether records are Examples. If False, a sample is the record itself, as the field "data".
    """

    name: ClassVar[str] = "tfrecord"
    title: ClassVar[str] = "TFRecord"
    endings: ClassVar[tuple[str, ...]] = (".tfrecord", ".tfrecords")
    index_suffix: ClassVar[str] = SUFFIX
    schema: Mapping[str, Any] | None = None
    is_example: bool = True

    def recognize(self, head: Head) -> bool:
        if head.compression not in ("", "gzip", "zlib") or len(head.begin) < 12:
            return False
        return masked(crc32c(head.begin[:8])) == int.from_bytes(head.begin[8:12], "little")

    def index(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        pieces = Pieces(nbytes, read)
        bounds, at = [0], 0
        while at < nbytes:
            head = bytes(pieces(at, 12))
            if len(head) < 12 or masked(crc32c(head[:8])) != int.from_bytes(head[8:], "little"):
                what = "the record's header is cut" if len(head) < 12 else "the checksum of the record's length differs"
                raise ShardCorrupt(f"{url}: record {len(bounds) - 1}, at byte {at}: {what}, or this is not a TFRecord file")
            at += 16 + int.from_bytes(head[:8], "little")
            bounds.append(at)
        return self._whole(url, nbytes, np.array(bounds, np.int64))

    def pack(self, url: str, data: Any) -> bytes:
        text, problem, _ = record_starts(data)
        if problem:
            return super().pack(url, data)  # which raises an error with place and cause
        nbytes = memoryview(data).nbytes
        return self._packed(url, nbytes, self._whole(url, nbytes, np.frombuffer(text, np.int64)))

    def _whole(self, url: str, nbytes: int, bounds: Bounds) -> RecordIndex:
        if bounds[-1] != nbytes:
            raise ShardCorrupt(f"{url}: record {len(bounds) - 2}, at byte {bounds[-2]}: goes beyond the end of the object")
        return RecordIndex(url, bounds)

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        record = _payload(data)
        if not self.is_example:
            return {"data": record}
        try:
            found = example_features(record)
        except ValueError as error:
            raise ValueError(f"is not an Example ({error}): TFRecords(is_example=False) gives its bytes") from error
        if self.schema is None:
            return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in found.items()}
        return {name: _of_schema(name, spec, found) for name, spec in self.schema.items()}

    def describe(self, head: Head, num_samples: int) -> Summary:
        data: Any = RecordFile(os.path.abspath(head.path), "auto", _INFLATED_MAX).data
        text, problem, at = record_starts(data)
        starts = np.frombuffer(text, np.int64)
        count = len(starts) - 1
        if problem:
            raise ShardCorrupt(f"{head.path}: record {count}, which starts at byte {at}: truncated or damaged ({problem})")
        records = []
        for number in range(min(count, max(RECORDS_SEEN, num_samples))):
            start, end = int(starts[number]), int(starts[number + 1])
            try:
                records.append(_payload(data[start:end]))
            except ValueError as error:
                raise ShardCorrupt(f"{head.path}: record {number}, which starts at byte {start}: {error}") from error
        notes = []
        samples = [sample_of(record) for record in records]
        if samples and not any("bin" in sample for sample in samples):
            notes.append(f"records are tf.train.Example: fields are those of the first {len(samples)}")
        if head.compression:
            notes.append(f"compressed by {head.compression}: {len(data):,} bytes, inflated by each process that opens it")
        fields = fields_seen(samples, Counter(name for sample in samples for name in sample), len(samples))
        return Summary(
            str(head.path), self.title, head.nbytes, count, fields, Sizes.of(np.diff(starts) - 16), samples[:num_samples], notes
        )

    def write_index(self, path: str) -> int:
        return len(RecordFile(path, "auto", _INFLATED_MAX).offsets()) - 1


def _payload(framed: Any) -> bytes:
    """Return the data of a record, without its frame.

    Raises:
        ValueError: its checksum differs.
    """
    data = bytes(framed[12:-4])
    if masked(crc32c(data)) != int.from_bytes(framed[-4:], "little"):
        raise ValueError("the checksum of its data differs")
    return data


def _of_schema(name: str, spec: Any, features: Mapping[str, Any]) -> Any:
    """Return a feature in the form that the schema defines, as TFRecordDataset does. Numbers are never rounded to fit."""
    dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
    if name not in features and None not in shape:
        raise ValueError(f"has no feature {name!r}; it has {sorted(features)}")
    values = features.get(name, [])  # a ragged feature that is missing is empty
    if dtype in (str, bytes):
        if not isinstance(values, list) or len(values) != 1:
            raise ValueError(f"feature {name!r}: one value of bytes is needed for {dtype.__name__}; it has {_shown(values)}")
        return values[0].decode() if dtype is str else values[0]
    if (wanted := of_any(dtype).numpy) is None:
        raise ValueError(f"feature {name!r}: {dtype} is no type of numpy's; convert it later")
    if isinstance(values, list):
        is_kept, found = len(values) <= 1, np.frombuffer(b"".join(values), wanted).copy()
    elif values.dtype.kind == "f":
        is_kept, found = not values.size or wanted in (np.float32, np.float64), values.astype(wanted)
    else:
        found = values.astype(wanted)
        is_kept = not values.size or (wanted.kind in "iub" and np.array_equal(found, values))
    sizes = [-1 if size is None else int(size) for size in shape]
    if is_kept and sizes.count(-1) <= 1 and (found.size == np.prod(sizes, dtype=int) or -1 in sizes):
        return (found.reshape(sizes) if found.size else found.reshape([max(size, 0) for size in sizes]))[()]
    raise ValueError(f"feature {name!r}: {wanted} of shape {tuple(shape)} is needed; it has {_shown(values)}")


def _shown(values: Any) -> str:
    if isinstance(values, list):
        return f"{len(values)} values of bytes"
    return f"{values.size} values of {values.dtype}" + (f", from {values.min()} to {values.max()}" if values.size else "")


def sample_of(record: bytes) -> dict[str, Any]:
    """Return a record's features by name; single values are not in a list. A record that is not an Example is the field "bin"."""
    features = features_of(record)
    if features is None:
        return {"bin": record}
    return {name: values[0] if len(values) == 1 else values for name, values in features.items()}


def features_of(record: bytes) -> dict[str, Any] | None:
    """Return a tf.train.Example's values by name: bytes in a list, float32 or int64 arrays; None if it is not an Example."""
    try:
        return example_features(record) or None
    except ValueError:
        return None
