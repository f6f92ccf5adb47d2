"""The `tfrecord` package reads files written by shmload, and shmload reads files written by it, for random samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tfrecord
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tfrecord.tools.tfrecord2idx import create_index

from shmload.formats import TFRecordDataset, TFRecordWriter

Sample = dict[str, Any]

samples = st.lists(
    st.fixed_dictionaries(
        {
            "floats": st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=3),
            "ints": st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2),
            "ragged": st.lists(st.integers(-5, 300), min_size=1, max_size=6),
            "text": st.binary(max_size=40),
        }
    ),
    min_size=1,
    max_size=5,
)
SCHEMA = {"floats": ("float32", (3,)), "ints": ("int64", (2,)), "ragged": ("int64", (None,)), "text": bytes}
quickly = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quickly
@given(samples)
def test_tfrecord_package_reads_files_of_shmload(tmp_path: Path, written: list[Sample]) -> None:
    path = tmp_path / "ours.tfrecord"
    with TFRecordWriter(path) as writer:
        for sample in written:
            arrays = {name: np.array(sample[name], np.int64) for name in ("ints", "ragged")}
            writer.write({**arrays, "floats": np.array(sample["floats"], np.float32), "text": sample["text"]})
    read = list(tfrecord.tfrecord_loader(str(path), None))
    assert len(read) == len(written)
    for theirs, sample in zip(read, written, strict=True):
        assert bytes(theirs["text"]) == sample["text"]
        assert theirs["floats"].tolist() == sample["floats"]
        assert theirs["ints"].tolist() == sample["ints"]
        assert theirs["ragged"].tolist() == sample["ragged"]


@pytest.mark.parametrize("has_index", [False, True])
@quickly
@given(written=samples)
def test_shmload_reads_files_of_the_tfrecord_package(tmp_path: Path, has_index: bool, written: list[Sample]) -> None:
    path = tmp_path / "theirs.tfrecord"
    for old in tmp_path.glob("theirs.*"):
        old.unlink()
    writer = tfrecord.TFRecordWriter(str(path))
    for sample in written:
        writer.write(
            {
                "floats": (sample["floats"], "float"),
                "ints": (sample["ints"], "int"),
                "ragged": (sample["ragged"], "int"),
                "text": (sample["text"], "byte"),
            }
        )
    writer.close()
    if has_index:
        create_index(str(path), str(path.with_suffix(".tfindex")))
    dataset = TFRecordDataset(path, SCHEMA)
    assert len(dataset) == len(written)
    for number, sample in enumerate(written):
        ours = dataset[number]
        assert {name: value if name == "text" else value.tolist() for name, value in ours.items()} == sample
