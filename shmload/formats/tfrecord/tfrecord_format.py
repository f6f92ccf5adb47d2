"""The format TFRecord: records of tf.train.Examples.

Format: https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from shmload._core.crc32c import crc32c, masked
from shmload._core.records import SEQUENCE, RecordReader, example_features, record_starts
from shmload.batch.row_placer import OneSample
from shmload.errors import ShardCorrupt
from shmload.formats.block_format import BlockFormat
from shmload.formats.block_index import Bounds, Pieces, Read, RecordIndex
from shmload.formats.head import Head
from shmload.formats.summary import RECORDS_SEEN, Sizes, Summary, fields_seen
from shmload.formats.tfrecord.record_errors import cause_of
from shmload.formats.tfrecord.record_fields import RecordField, fields_of
from shmload.formats.tfrecord.record_file import SUFFIX, RecordFile
from shmload.formats.tfrecord.record_values import rows_written, text_value
from shmload.formats.tfrecord.tfrecord_dataset import FORMS, LEVELS

_INFLATED_MAX = 1 << 34
_REMEDY = "TFRecords(is_example=False) gives its bytes"
_AT_ZERO = np.zeros(1, np.int64)  # the index and the offset of a block's only record
_ONE_RECORD = np.ones(1, np.int64)  # the number of records


@dataclass(frozen=True)
class TFRecords(BlockFormat):
    """TFRecord files whose records are tf.train.Examples, or whole records. Checksums are compared.

    Args:
        schema: type and shape of the features that samples have, as for TFRecordDataset: {"label": "int64", "name": str, "x":
            ("float32", (3,)), "image": bytes}. If None, all features: numbers as arrays of shape `(n,)`, bytes as bytes or a list.
        is_example: whether records are Examples. If False, a sample is the record itself, as the field "data".
    Raises:
        TypeError, ValueError: the schema is invalid, or a record cannot have such a field.
    """

    name: ClassVar[str] = "tfrecord"
    title: ClassVar[str] = "TFRecord"
    endings: ClassVar[tuple[str, ...]] = (".tfrecord", ".tfrecords")
    index_suffix: ClassVar[str] = SUFFIX
    schema: Mapping[str, Any] | None = None
    is_example: bool = True
    _fields: tuple[RecordField, ...] = field(default=(), init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.schema is not None:
            object.__setattr__(self, "_fields", tuple(fields_of(self.schema, {})))

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
            at = min(at + 16 + int.from_bytes(head[:8], "little"), nbytes + 1)  # a length beyond int64 ends beyond the object, too
            bounds.append(at)
        return self._whole(url, nbytes, np.array(bounds, np.int64))

    def pack(self, url: str, data: Any) -> bytes:
        text, problem, _ = record_starts(data)
        if problem:
            return super().pack(url, data)  # raises an error with offset and cause
        nbytes = memoryview(data).nbytes
        return self._packed(url, nbytes, self._whole(url, nbytes, np.frombuffer(text, np.int64)))

    def _whole(self, url: str, nbytes: int, bounds: Bounds) -> RecordIndex:
        if bounds[-1] != nbytes:
            raise ShardCorrupt(f"{url}: record {len(bounds) - 2}, at byte {bounds[-2]}: goes beyond the end of the object")
        return RecordIndex(url, bounds)

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        if self.is_example and self._fields:
            return self._row(data)
        record = _payload(data)
        if not self.is_example:
            return {"data": record}
        try:
            found = example_features(record)
        except ValueError as error:
            raise ValueError(f"is not an Example ({error}): {_REMEDY}") from error
        return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in found.items()}

    def _row(self, data: memoryview) -> dict[str, Any]:
        """Return the fields of the schema, read as `TFRecordDataset` reads them."""
        assert self.schema is not None
        out, fields = OneSample(self.schema), list(self._fields)
        native = [each.native() for each in fields]
        reader = RecordReader([data], [None], _ONE_RECORD, _AT_ZERO, native, FORMS.index("example"), LEVELS.index("all"))
        survey = reader.survey(_AT_ZERO)
        texts = None if survey.problem else rows_written(survey, fields, out)
        if texts is None:
            assert survey.problem is not None
            cause = cause_of(survey.problem, fields)
            raise ValueError(f"{cause}: {_REMEDY}" if survey.problem[0] in ("wire", "sequence") else cause)
        for each in fields:
            if each.is_text:
                out[each.name] = [text_value(each, texts[each.name][0])]
        return out.sample()

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
        notes = [f"{SEQUENCE}: its bytes are the field bin"] if any(map(_is_sequence, records)) else []
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


def _is_sequence(record: bytes) -> bool:
    try:
        example_features(record)
    except ValueError as error:
        return str(error) == SEQUENCE
    return False


def sample_of(record: bytes) -> dict[str, Any]:
    """Return a record's features by name; single values are not in a list. A record that is not an Example is the field "bin"."""
    features = features_of(record)
    if features is None:
        return {"bin": record}
    return {name: values[0] if len(values) == 1 else values for name, values in features.items()}


def features_of(record: bytes) -> dict[str, Any] | None:
    """Return a tf.train.Example's values by name: bytes in a list, float32 or int64 arrays.

    Return None if it is not an Example, or one without features.
    """
    try:
        return example_features(record) or None
    except ValueError:
        return None
