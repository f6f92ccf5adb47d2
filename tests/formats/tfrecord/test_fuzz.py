from __future__ import annotations

import io
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np

from shmload._core.record_writer import INTS, RecordBuffer
from shmload._core.records import RecordReader
from shmload.formats.tfrecord.record_fields import fields_of


def test_unchanged_files_are_read(fuzz: ModuleType) -> None:
    for records in fuzz.corpus():
        file = b"".join(map(fuzz.framed, records))
        assert fuzz.read(file, file)


def test_mutated_files_are_read_or_rejected(fuzz: ModuleType, tmp_path: Path) -> None:
    found = [fuzz.read(*each) for each in islice(fuzz.mutations(1, tmp_path), 100)]
    assert True in found
    assert False in found


def test_integers_replaced_by_floats_during_a_read_stay_within_their_rows(fuzz: ModuleType) -> None:
    """Four floats that replaced sixteen one-byte integers during a read were once written as four doubles."""
    record = RecordBuffer()
    record.append_example([(b"n", INTS, [np.arange(16)])])
    file = io.BytesIO()
    record.write_to(file)
    data = np.frombuffer(file.getvalue(), np.uint8).copy()
    fields = fields_of({"n": ("int8", (None,))}, {})
    reader = RecordReader([data], [None], np.array([1]), np.array([0]), [f.native() for f in fields], 1, 0)
    survey = reader.survey(np.array([0]))
    assert survey.steps(0) == [16]
    kind = bytes(data).index(b"\x1a\x12\x0a\x10")
    data[kind] = 0x12  # a float list
    rows = np.full(64, 0xA5, np.uint8)
    assert not survey.write([rows[:16]])
    assert survey.problem[0] == "changed"
    assert (rows[16:] == 0xA5).all()
