"""Written samples are read back, and every damage to their file is detected."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from shmload import ShardCorrupt
from shmload.batch.layout import layout_of_schema
from shmload.batch.row_placer import RowOut, private_rows
from shmload.formats import TFRecordDataset, TFRecordWriter

slow = pytest.mark.slow(reason="hypothesis writes and reads many files")
DTYPES = ["float32", "int64", "int8", "uint16", "bool", "float64", "uint64", "float16", "complex64", "int32"]
IN_LISTS = ("float32", "int64", "int8", "uint16", "bool", "int32")  # dtypes that the lists of an Example can store unchanged


@st.composite
def schemas(draw: Any) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]]:
    """Draws a schema, the names of the fields that are written as bytes, and samples."""
    schema: dict[str, Any] = {}
    raw: list[str] = []
    values: dict[str, Any] = {}
    for name in draw(st.lists(st.text(max_size=5), min_size=1, max_size=4, unique=True)):
        kind = draw(st.sampled_from([*DTYPES, "text", "bytes"]))
        if kind in ("text", "bytes"):
            schema[name] = str if kind == "text" else bytes
            values[name] = st.text(max_size=20) if kind == "text" else st.binary(max_size=20)
            continue
        shape = draw(st.lists(st.integers(1, 3), max_size=2))
        axis = draw(st.integers(0, len(shape))) if draw(st.booleans()) else None
        if axis is not None:
            shape.insert(axis, None)
        schema[name] = (kind, tuple(shape))
        if kind not in IN_LISTS or draw(st.booleans()):
            raw.append(name)
        values[name] = st.integers(0, 3).flatmap(
            lambda steps, shape=tuple(shape), kind=kind: npst.arrays(kind, [steps if e is None else e for e in shape])
        )
    return schema, raw, draw(st.lists(st.fixed_dictionaries(values), min_size=1, max_size=4))


@slow
@settings(max_examples=100, deadline=None)
@given(schemas(), st.sampled_from([None, "gzip", "zlib"]))
def test_samples_of_any_schema_are_read_back(made, compression):
    schema, raw, samples = made
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        with TFRecordWriter(path, raw=raw, compression=compression) as writer:
            for sample in samples:
                writer.write(sample)
        dataset = TFRecordDataset(path, schema)
        for index, sample in enumerate(samples):
            found = dataset[index]
            assert list(found) == list(schema)
            np.testing.assert_equal(found, sample)
            assert all(found[name].dtype == spec[0] for name, spec in schema.items() if isinstance(spec, tuple))
        fixed = {n: s for n, s in schema.items() if isinstance(s, tuple) and None not in s[1]}
        if fixed:
            rows = private_rows(layout_of_schema(fixed), len(samples))
            TFRecordDataset(path, fixed).read_batch_into(range(len(samples)), RowOut(rows, slice(0, len(samples))))
            for name in fixed:
                np.testing.assert_equal(rows[name], np.stack([sample[name] for sample in samples]))


@slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=40) | st.just(bytes(range(256)) * 70), min_size=1, max_size=4), st.data(), st.booleans())
def test_any_changed_byte_and_any_truncation_is_detected(records, data, is_cut):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        with TFRecordWriter(path) as writer:
            for record in records:
                writer.write(record)
        whole = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(whole) - 1))
        if is_cut:
            del whole[at:]
        else:
            whole[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
        ends = np.cumsum([16 + len(record) for record in records])
        if is_cut and at in (0, *ends):
            dataset = TFRecordDataset(path)
            assert records[: len(dataset)] == [dataset[i]["bytes"] for i in range(len(dataset))]
            assert at == sum(16 + len(record) for record in records[: len(dataset)])
            return
        with pytest.raises(ShardCorrupt, match=r"a: record \d+, which starts at byte \d+: (corrupted|truncated)"):
            for sample in TFRecordDataset(path):
                assert sample["bytes"] in records
