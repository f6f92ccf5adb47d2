"""Errors for records that are damaged or do not have the fields of a schema."""

from __future__ import annotations

from typing import Any

from shmload._core.records import SEQUENCE
from shmload.errors import SampleError, ShardCorrupt, ShmloadError
from shmload.formats.tfrecord.record_fields import RecordField
from shmload.formats.tfrecord.record_file import CHANGED

_FOUND = ("nothing", "a bytes_list", "a float_list", "an int64_list")
_CAUSES = {
    "header": "truncated: fewer than 12 bytes are left for a record's header",
    "length_sum": "corrupted: the checksum of the record's length differs, so the length cannot be believed",
    "truncated": "truncated: the record's length of {nbytes} bytes goes beyond the end of the file",
    "sum": "corrupted: the checksum of the record's {nbytes} bytes differs",
    "wire": "not a valid message: the record's {nbytes} bytes do not parse",
    "changed": CHANGED,
    "twice": "field {name!r} is both in the context and in the feature lists",
}
_MISFITS = {
    "missing": "field {name!r} is missing",
    "kind": "field {name!r} needs {wanted}; the record has {kind} of {count} values",
    "count": "field {name!r} needs {wanted}; the record has {kind} of {count} values",
    "size": "field {name!r} needs {wanted}; the record has one value of {value_nbytes} bytes",
    "sequence": SEQUENCE,
    "range": "field {name!r} needs {wanted}; the record has a number outside of that type's range",
}


def error_of(
    problem: tuple[Any, ...], fields: list[RecordField], paths: list[str], file_nbytes: list[int], num_records: int
) -> Exception:
    """Return the error that a dataset raises for a `Survey.problem`, which names the file, the record and the cause.

    Args:
        problem: the problem.
        fields: the fields of the survey.
        paths: path of each file.
        file_nbytes: size of each file when it was opened.
        num_records: number of records of the dataset.
    """
    cause, _, index, file, start, *_ = problem
    if cause == "index":
        return IndexError(f"index {index} is out of range for a TFRecordDataset of {num_records} records")
    words: type[ShmloadError] = ShardCorrupt if cause in _CAUSES else SampleError
    text = cause_of(problem, fields, file_nbytes[file])
    if cause == "missing":
        text += f"; give TFRecordDataset(defaults={{{fields[problem[6]].name!r}: ...}}) a value for records without it"
    return words(f"{paths[file]}: record {index}, which starts at byte {start}: {text}")


def cause_of(problem: tuple[Any, ...], fields: list[RecordField], file_nbytes: int = 0) -> str:
    """Return the cause of a `Survey.problem` in words, without file and record.

    Args:
        problem: the problem.
        fields: the fields of the survey.
        file_nbytes: size of the record's file when it was opened.
    """
    cause, _, _, _, _, nbytes, which, kind, count, value_nbytes = problem
    field = fields[max(which, 0)]
    return (_CAUSES | _MISFITS)[cause].format(
        name=field.name, nbytes=nbytes, wanted=field, kind=_FOUND[kind], count=count, value_nbytes=value_nbytes, was=file_nbytes
    )
