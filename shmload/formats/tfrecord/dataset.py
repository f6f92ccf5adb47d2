"""TFRecord files as one dataset: any record at any time, decoded into the batch's rows without the GIL."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from glob import glob
from threading import Lock
from typing import Any

import numpy as np

from shmload._core.records import RecordReader, Survey
from shmload.errors import SampleError
from shmload.formats.tfrecord.fields import error_of, fields_of
from shmload.formats.tfrecord.files import COMPRESSIONS, RecordFile

FORMS = ("raw", "example", "sequence")
LEVELS = ("none", "length", "all")


class TFRecordDataset:
    """Records of TFRecord files, by number, in the order of the files.

    Files are mapped when a process first reads; until then a dataset is its arguments, and so it is pickled. Where records begin is
    found on the first `len()` and kept beside each file.

    Args:
        paths: files, or patterns with * ? [ ], whose files are sorted by name.
        schema: mapping name -> (dtype, shape); None in a shape is a ragged dimension, at most one a field; `str` and `bytes` are
            text. A bytes_list of one value fills a numeric field as it stands. None: {"bytes": bytes}, whole records.
        records: what a record is: "example", "sequence" (SequenceExample; a feature list is a field whose first extent is None), or
            "raw" (the schema has one field, which is the record). None: "raw" without a schema, else "example".
        verify: which checksums are compared: "all", "length" (of records' headers), "none". Bounds are always checked.
        defaults: values for records that lack a field. A ragged field that is lacking is empty.
        compression: "gzip" or "zlib" of whole files, "none", or "auto", by a file's first bytes.
        max_inflated_bytes: a compressed file that is larger is an error.
    Raises:
        FileNotFoundError: a pattern matches nothing.
        ShardCorrupt: on reading: a file is not what the format says; names file, record, offset and cause.
        SampleError: on reading: a record is valid and does not fit the schema.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        schema: Mapping[str, Any] | None = None,
        *,
        records: str | None = None,
        verify: str = "all",
        defaults: Mapping[str, Any] | None = None,
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
        self.paths = _expanded(paths)
        self.schema: Mapping[str, Any] = {"bytes": bytes} if schema is None else schema
        self.records, self.verify, self.compression = records, verify, compression
        self.max_inflated_bytes = max_inflated_bytes
        self.defaults = dict(defaults or {})
        self._fields = fields_of(self.schema, self.defaults)
        if records == "raw" and len(self._fields) != 1:
            raise ValueError(f'records="raw" needs a schema of one field, the whole record; got {list(self.schema)}')
        if records == "raw" and self.defaults:
            raise ValueError('records="raw" takes no defaults: no record lacks itself')
        self._is_fixed = not any(f.is_text or f.is_ragged for f in self._fields)
        self._begin()

    def _begin(self) -> None:
        self._lock = Lock()
        self._reader: RecordReader | None = None
        self._num_records = -1

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_reader", "_num_records")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _opened(self) -> RecordReader:
        if self._reader is None:
            with self._lock:
                if self._reader is None:
                    files = [RecordFile(path, self.compression, self.max_inflated_bytes) for path in self.paths]
                    offsets = [file.offsets() for file in files]
                    ends = np.cumsum([len(o) - 1 for o in offsets], dtype=np.int64)
                    starts = np.concatenate([np.empty(0, np.int64), *(o[:-1] for o in offsets)])
                    self._num_records = int(ends[-1])
                    self._reader = RecordReader(
                        [file.data for file in files],
                        ends,
                        starts,
                        [f.native() for f in self._fields],
                        FORMS.index(self.records),
                        LEVELS.index(self.verify),
                    )
        return self._reader

    def __len__(self) -> int:
        self._opened()
        return self._num_records

    def __repr__(self) -> str:
        return f"TFRecordDataset({len(self.paths)} files, {self.records}, {', '.join(self.schema)}, verify={self.verify!r})"

    def __getitem__(self, index: int) -> dict[str, Any]:
        survey = self._survey([index])
        sample: dict[str, Any] = {}
        targets: list[Any] = []
        for number, field in enumerate(self._fields):
            if field.element is None:
                (sample[field.name],) = self._texts(survey, number)
                targets.append(None)
                continue
            (steps,) = survey.steps(number)
            shape = tuple(steps if extent is None else extent for extent in field.shape)
            if field.element.numpy is not None:
                sample[field.name] = np.empty(shape, field.element.numpy)
            else:
                import torch

                sample[field.name] = torch.empty(shape, dtype=getattr(torch, field.element.name))
            targets.append(_memory_of(sample[field.name]))
        self._write(survey, targets)
        return sample

    def read_batch_into(self, indices: Any, out: Any) -> None:
        """Reads records into rows: see `shmload.ShmLoader` for `out`."""
        survey = self._survey(indices)
        if self._is_fixed:
            self._write(survey, [_memory_of(out[field.name]) for field in self._fields])
            return
        targets: list[Any] = []
        for number, field in enumerate(self._fields):
            if field.is_text:
                out[field.name] = self._texts(survey, number)
                targets.append(None)
            elif field.is_ragged:
                targets.append(_memory_of(out.reserve(field.name, survey.steps(number))))
            else:
                targets.append(_memory_of(out[field.name]))
        self._write(survey, targets)

    def _survey(self, indices: Any) -> Survey:
        reader = self._opened()
        wanted = np.ascontiguousarray(indices, np.int64)
        if wanted.size and wanted.min() < 0:
            wanted = np.where((wanted < 0) & (wanted >= -self._num_records), wanted + self._num_records, wanted)
        survey = reader.survey(wanted)
        self._check(survey)
        return survey

    def _write(self, survey: Survey, targets: list[Any]) -> None:
        if not survey.write(targets):
            self._check(survey)

    def _check(self, survey: Survey) -> None:
        problem = survey.problem
        if problem is not None:
            raise error_of(problem, self._fields, self.paths, self._num_records)

    def _texts(self, survey: Survey, number: int) -> list[Any]:
        texts = survey.texts(number)
        if not self._fields[number].is_str:
            return texts
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError as error:
            raise SampleError(
                f"{self.paths[0]}...: field {self._fields[number].name!r} needs UTF-8, as its type is str: {error}; "
                "give the schema bytes instead"
            ) from error


def _memory_of(rows: Any) -> Any:
    """An array's memory as a buffer: torch's types that numpy lacks go as bytes."""
    if isinstance(rows, np.ndarray):
        return rows
    import torch

    return rows.reshape(-1).view(torch.uint8).numpy()


def _expanded(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[str] = []
    for path in [os.fspath(p) for p in given]:
        if os.path.exists(path):
            found.append(os.path.abspath(path))
            continue
        matching = sorted(p for p in glob(path) if not p.endswith((".shmload-index", ".tfindex", ".index", ".idx")))
        if not matching:
            raise FileNotFoundError(f"no TFRecord file is named, or matches, {path!r}")
        found += map(os.path.abspath, matching)
    if not found:
        raise ValueError("TFRecordDataset needs at least one path")
    return found
