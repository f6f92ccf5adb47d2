"""`TFRecordDataset`: records of TFRecord files by their number, decoded into the rows of a batch without the GIL."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from shmload._core.records import RecordReader, Survey
from shmload.batch.row_placer import OneSample, SingleRow
from shmload.errors import SampleError, ShardCorrupt
from shmload.formats.images.shared_choices import one_sample
from shmload.formats.paths import Paths, expanded
from shmload.formats.per_process import PerProcess
from shmload.formats.tfrecord.record_errors import error_of
from shmload.formats.tfrecord.record_fields import RecordField, fields_of
from shmload.formats.tfrecord.record_file import FOREIGN_SUFFIXES, SUFFIX, RecordFile
from shmload.formats.tfrecord.record_values import decode_into, decoded, memory_of, rows_written, text_value

_ENDINGS = tuple(f".tfrecord{s}{compression}" for s in ("", "s") for compression in ("", ".gz", ".zz"))
COMPRESSIONS = ("auto", "none", "gzip", "zlib")
FORMS = ("raw", "example", "sequence")
LEVELS = ("none", "length", "all")


class TFRecordDataset:
    """Records of TFRecord files, by number, in the order of the files.

    Files are mapped when a process first reads. A pickled dataset contains its arguments, and the sizes of the files that it has
    seen: another process must find the same sizes. Record offsets are determined on the first `len()` and kept next to each file.
    A file that was written to since is an error; a file that was replaced or removed is still read as it was.

    Args:
        paths: files, folders or patterns with * ? [ ]. The files of a folder or a pattern are sorted by name. Hidden files, and
            files in hidden folders, whose names begin with . or _, are ignored. In a folder, files named *.tfrecord or
            *.tfrecords are read, also with .gz, .zz or a shard number after that, or, if there are none, files without an ending.
        schema: mapping name -> (dtype, shape). None in a shape is a ragged dimension, at most one per field; `str` and `bytes` are
            text. A bytes_list of one value fills a numeric field with its bytes. If None, whole records: {"bytes": bytes}.
        records: the kind of records: "example", "sequence" (SequenceExample; a feature list is a field whose first extent is None),
            or "raw" (the schema has one field, which is the record). If None, "raw" without a schema, else "example".
        verify: the checksums to compare: "all", "length" (of records' headers), or "none". Bounds are always checked.
        defaults: values for records that lack a field. A missing ragged field is empty.
        decode: {field: function} for fields whose single bytes value becomes an array in Python, with the type and shape in the
            schema: {"image": ImageDecoder(...)}, with {"image": decoder.spec} in the schema.
        compression: compression of whole files: "gzip", "zlib", "none", or "auto", which uses a file's first bytes.
        max_inflated_bytes: limit on the expanded size of a compressed file; a larger file is an error.
    Raises:
        FileNotFoundError: a pattern or a folder has no such file.
        ShardCorrupt: on reading: a file does not match its format; the message names file, record, offset and cause.
        SampleError: on reading: a record is valid, but does not match the schema.
        ValueError: an option or a type is unknown, or options contradict each other.
    Thread/process safety: any number of readers.
    Example:
        >>> import tempfile
        >>> from shmload.formats import TFRecordDataset, TFRecordWriter
        >>> path = f"{tempfile.mkdtemp()}/train.tfrecord"
        >>> with TFRecordWriter(path) as writer:
        ...     for label in range(3):
        ...         writer.write({"label": label, "tokens": list(range(label))})
        >>> dataset = TFRecordDataset(path, {"label": "int64", "tokens": ("int64", (None,))})
        >>> len(dataset), dataset[2]["tokens"].tolist()
        (3, [0, 1])
    """

    def __init__(
        self,
        paths: Paths,
        schema: Mapping[str, Any] | None = None,
        *,
        records: str | None = None,
        verify: str = "all",
        defaults: Mapping[str, Any] | None = None,
        decode: Mapping[str, Callable[[bytes], Any]] | None = None,
        compression: str = "auto",
        max_inflated_bytes: int = 1 << 34,
    ) -> None:
        records = records or ("raw" if schema is None else "example")
        for name, value, allowed in (
            ("records", records, FORMS),
            ("verify", verify, LEVELS),
            ("compression", compression, COMPRESSIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is one of {', '.join(map(repr, allowed))}; got {value!r}")
        if schema is None and records != "raw":
            raise ValueError(f"records={records!r} needs a schema, which names the fields to read")
        self.paths = expanded(paths, "TFRecord", endings=_ENDINGS, beside=(SUFFIX, *FOREIGN_SUFFIXES))
        self.schema: Mapping[str, Any] = {"bytes": bytes} if schema is None else schema
        self.records, self.verify, self.compression = records, verify, compression
        self.max_inflated_bytes = max_inflated_bytes
        self.defaults = dict(defaults or {})
        self._fields = fields_of(self.schema, self.defaults, decode)
        if records == "raw" and len(self._fields) != 1:
            raise ValueError(f'records="raw" needs a schema of one field, the whole record; got {list(self.schema)}')
        if records == "raw" and self.defaults:
            raise ValueError('records="raw" takes no defaults, because the record itself is never missing')
        self._file_nbytes: list[int] = []  # size of each path when it was first opened, here or where this was pickled
        self._held: PerProcess[tuple[RecordReader, int]] = PerProcess(is_inherited=True)

    def _opened(self) -> tuple[RecordReader, int]:
        """Return the reader, and the number of records."""
        return self._held.get(self._open)

    def _open(self) -> tuple[RecordReader, int]:
        files = self._files()
        for file, was in zip(files, self._file_nbytes, strict=False):
            if was != file.nbytes:
                raise ShardCorrupt(
                    f"{file.path}: has {file.nbytes} bytes, and had {was} when this dataset first read it: create the dataset again"
                )
        self._file_nbytes[:] = [file.nbytes for file in files]
        offsets = [file.offsets() for file in files]
        ends = np.cumsum([len(o) - 1 for o in offsets], dtype=np.int64)
        reader = RecordReader(
            [file.data for file in files],
            [file.state for file in files],
            ends,
            np.concatenate([np.empty(0, np.int64), *(o[:-1] for o in offsets)]),
            [f.native() for f in self._fields],
            FORMS.index(self.records),
            LEVELS.index(self.verify),
        )
        return reader, int(ends[-1])

    def _files(self) -> list[RecordFile]:
        return [RecordFile(path, self.compression, self.max_inflated_bytes) for path in self.paths]

    def __len__(self) -> int:
        return self._opened()[1]

    def __repr__(self) -> str:
        return f"TFRecordDataset({len(self.paths)} files, {self.records}, {', '.join(self.schema)}, verify={self.verify!r})"

    def __getitem__(self, index: int) -> dict[str, Any]:
        out = OneSample(self.schema)
        survey, texts = self._read([operator.index(index)], out)  # a float would be truncated
        with one_sample(field.decode for field in self._fields):
            for field in self._fields:
                if field.decode is not None:
                    out[field.name] = [self._decoded(survey, field, partial(decoded, field, texts[field.name][0]))]
        return out.sample()

    @property
    def read_batch_into(self) -> Callable[[Any, Any], object] | None:
        """Return a function `read(indices, out)` that reads records into rows; None if a decoder does part of that.

        See docs/own_format.md for `out`. A decoder may draw random numbers, and each sample has a generator of its own only if
        samples are read one by one.
        """
        return None if any(field.decode is not None for field in self._fields) else self._read_all

    def read_into(self, index: int, out: Any) -> None:
        """Read one record into its row.

        Args:
            index: index of the record.
            out: the row, which has a place for each field of the schema.
        Raises:
            ShardCorrupt, SampleError: as for the class.
        """
        survey, texts = self._read([index], SingleRow(out))
        with one_sample(field.decode for field in self._fields):
            for field in self._fields:
                if field.decode is not None:
                    self._decoded(survey, field, partial(decode_into, field, texts[field.name][0], out))

    def _read_all(self, indices: Any, out: Any) -> None:
        self._read(indices, out)

    def _read(self, indices: Any, out: Any) -> tuple[Survey, dict[str, list[Any]]]:
        """Write the rows of all fields without decoders. Return the survey, and the rows of fields that `is_text`, by name."""
        if not any(field.is_text or field.is_ragged for field in self._fields):
            survey = self._survey(indices, [memory_of(out[field.name]) for field in self._fields])
            if not survey.is_still_so():
                raise self._error(survey)
            return survey, {}
        survey = self._survey(indices)
        texts: dict[str, list[Any]] | None = rows_written(survey, self._fields, out)
        if texts is None or not survey.is_still_so():
            raise self._error(survey)
        for field in self._fields:
            if field.is_str:
                texts[field.name] = [self._text(text, survey, row, field) for row, text in enumerate(texts[field.name])]
            if field.is_text and field.decode is None:
                out[field.name] = texts[field.name]
        return survey, texts

    def _survey(self, indices: Any, targets: list[Any] | None = None) -> Survey:
        reader, num_records = self._opened()
        wanted = np.ascontiguousarray(indices, np.int64)
        if wanted.size and wanted.min() < 0:
            wanted = np.where((wanted < 0) & (wanted >= -num_records), wanted + num_records, wanted)
        survey = reader.survey(wanted, targets)
        if survey.problem is not None:
            raise self._error(survey)
        return survey

    def _error(self, survey: Survey) -> Exception:
        return error_of(survey.problem or (), self._fields, self.paths, self._file_nbytes, len(self))

    def _decoded(self, survey: Survey, field: RecordField, decode: Callable[[], Any]) -> Any:
        try:
            return decode()
        except (ImportError, MemoryError):  # the record is not the cause
            raise
        except Exception as error:  # raised by a library or the user's decoder
            raise ShardCorrupt(f"{self._where(survey, 0)}: field {field.name!r}: {error}") from error

    def _text(self, text: bytes, survey: Survey, row: int, field: RecordField) -> str | bytes:
        try:
            return text_value(field, text)
        except ValueError as error:
            raise SampleError(f"{self._where(survey, row)}: {error}") from error

    def _where(self, survey: Survey, row: int) -> str:
        index, file, start = survey.place(row)
        return f"{self.paths[file]}: record {index}, which starts at byte {start}"
