"""TFRecordWriter: TensorFlow's bytes, values of every kind, and complete files or none."""

from __future__ import annotations

import errno
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from shmload import SampleError
from shmload._core.record_writer import INTS, RecordBuffer
from shmload._core.records import example_features
from shmload.formats import TFRecordDataset, TFRecordWriter

BY_TENSORFLOW = Path(__file__).parent / "written_by_tensorflow"


def test_written_bytes_equal_tensorflows(tmp_path):
    path = tmp_path / "ours"
    with TFRecordWriter(path, index=True) as writer:
        for i in range(5):
            writer.write({"ragged": np.arange(i), "text": f"text {i}", "ints": [-i, 300 * i], "floats": [i + 0.5, -i, 3.25]})
    assert (BY_TENSORFLOW / "plain.tfrecord").read_bytes() == path.read_bytes()


def test_written_sequence_equals_tensorflows(tmp_path):
    path = tmp_path / "ours"
    with TFRecordWriter(path) as writer:
        for i in range(4):
            writer.write_sequence({"label": i}, {"frames": [np.float32([t, i]) for t in range(i)]})
    assert (BY_TENSORFLOW / "sequence.tfrecord").read_bytes() == path.read_bytes()
    sample = TFRecordDataset(path, {"frames": ("float32", (None, 2)), "label": "int64"}, records="sequence")[3]
    assert (sample["frames"].tolist(), sample["label"]) == ([[0, 3], [1, 3], [2, 3]], 3)


def test_failed_writer_keeps_the_older_file(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"")
    with pytest.raises(TypeError, match=r"field 'a' is of type list and dtype complex128.*raw="), TFRecordWriter(path) as writer:
        writer.write({"a": [1j]})
    assert [path] == list(tmp_path.iterdir())
    assert len(TFRecordDataset(path)) == 0
    with pytest.raises(ValueError, match="is closed"):
        writer.write(b"")
    with pytest.raises(IndexError, match="index 0 is out of range for a TFRecordDataset of 0 records"):
        TFRecordDataset(path)[0]


def test_values_of_every_kind_are_written(tmp_path):
    path = tmp_path / "kinds"
    with TFRecordWriter(path) as writer:
        writer.write(
            {"a": torch.arange(3), "b": True, "c": 1.5, "d": ["x", b"y"], "e": [], "f": np.arange(6.0)[::2], "g": -(2**63)}
        )
        assert writer.num_records == 1
    schema = {"a": ("int64", (3,)), "b": "bool", "c": "float32", "e": ("float32", (None,)), "f": ("float32", (3,)), "g": "int64"}
    sample = TFRecordDataset(path, schema)[0]
    assert tuple(value.tolist() for value in sample.values()) == ([0, 1, 2], True, 1.5, [], [0, 2, 4], -(2**63))
    with pytest.raises(SampleError, match=r"field 'd' needs one value of str; the record has a bytes_list of 2 values"):
        TFRecordDataset(path, {"d": str})[0]


ODD = {  # values that numpy or torch store in their own way, and what a raw field of their type gives back
    "the other byte order": (np.arange(3, dtype=">f4"), "float32"),
    "a gradient": (torch.arange(3.0, requires_grad=True), "float32"),
    "bfloat16": (torch.arange(3).bfloat16(), "bfloat16"),
    "float8": (torch.arange(3.0).to(torch.float8_e5m2), "float8_e5m2"),
}


@pytest.mark.parametrize("name", ODD)
def test_arrays_of_unusual_types_are_read_back(tmp_path, name):
    value, dtype = ODD[name]
    with TFRecordWriter(tmp_path / "a", raw=["raw"]) as writer:
        writer.write({"raw": value, "floats": value})
    sample = TFRecordDataset(tmp_path / "a", {"raw": (dtype, (3,)), "floats": ("float32", (3,))})[0]
    assert [[float(each) for each in sample[field]] for field in ("raw", "floats")] == [[0, 1, 2]] * 2


def test_raw_record_of_the_other_byte_order_is_read_back(tmp_path):
    with TFRecordWriter(tmp_path / "a") as writer:
        writer.write(np.arange(3, dtype=">f4"))
    assert TFRecordDataset(tmp_path / "a", {"x": ("float32", (3,))}, records="raw")[0]["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "raw", "message"),
    [
        (None, [], "field 'a' is of type NoneType: an Example can store floats"),
        ({"b": 1}, ["a"], "field 'a' is of type dict: an Example can store floats"),
        (torch.ones(2, 2).to_sparse(), [], "field 'a': can't convert Sparse layout tensor to numpy"),
        ([[1], [1, 2]], ["a"], "field 'a': setting an array element with a sequence"),
    ],
)
def test_error_names_the_field_whose_value_cannot_be_stored(tmp_path, value, raw, message):
    with pytest.raises(TypeError, match=message), TFRecordWriter(tmp_path / "a", raw=raw) as writer:
        writer.write({"a": value})


@pytest.mark.parametrize("value", [2**63, np.uint64([1, 2**63]), [2**63, -1], [[2**63, 1], [-1, 1]]])
def test_numbers_beyond_int64_are_an_error_and_write_nothing(tmp_path, value):
    with TFRecordWriter(tmp_path / "a") as writer:
        with pytest.raises(ValueError, match="field 'n' holds 9223372036854775808: an int64_list has numbers from"):
            writer.write({"n": value})
        writer.write(b"one")
    assert [sample["bytes"] for sample in TFRecordDataset(tmp_path / "a")] == [b"one"]


def test_number_that_float32_makes_infinite_is_an_error_and_infinity_is_not(tmp_path):
    with TFRecordWriter(tmp_path / "a") as writer:
        for value in (np.array([1.0, 1e300]), 1e300):
            with pytest.raises(ValueError, match=r"field 'x' holds 1e\+300: a float_list ends at 3.4e38"):
                writer.write({"x": value})
        writer.write({"x": np.array([float("inf"), 1e-300])})
        writer.write({"x": float("-inf")})
    first, second = TFRecordDataset(tmp_path / "a", {"x": ("float32", (None,))})
    assert (first["x"].tolist(), second["x"].tolist()) == ([float("inf"), 0.0], [float("-inf")])


def test_list_that_grows_while_it_is_written_is_an_error():
    numbers = np.zeros(4, np.int64)

    class Growing:
        def __iter__(self):
            numbers[:] = -1
            return iter((b"b", INTS, [numbers[:1]]))

    buffer = RecordBuffer()
    with pytest.raises(RuntimeError, match="another thread changed an array while it was being written"):
        buffer.append_example([(b"a", INTS, [numbers]), Growing()])
    assert buffer.nbytes == 0


def test_writer_can_be_closed_twice(tmp_path):
    with TFRecordWriter(tmp_path / "f") as writer:
        writer.write({"a": 1})
        writer.close()
        written = (tmp_path / "f").read_bytes()
    writer.close()
    writer.abandon()
    assert (tmp_path / "f").read_bytes() == written


class FailingClose:
    """A file whose close fails, as on a full network disk."""

    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def close(self):
        self.file.close()
        fail()


def fail(*_):
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.parametrize("compression", [None, "gzip", "zlib"])
@pytest.mark.parametrize("what", ["write", "close"])
def test_error_on_close_is_raised_and_keeps_the_older_file(tmp_path, what, compression):
    path = tmp_path / "f"
    path.write_bytes(b"older")
    writer = TFRecordWriter(path, compression=compression)
    writer.write({"a": 1})
    if what == "write":
        writer._file.write = fail
    else:
        writer._file._file = FailingClose(writer._file._file)
    with pytest.raises(OSError, match="Disk quota exceeded"):
        writer.close()
    del writer
    gc.collect()  # errors in a finalizer would be reported here
    assert (path.read_bytes(), [each.name for each in tmp_path.iterdir()]) == (b"older", ["f"])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, list])
def test_lists_of_bytes_of_any_type_are_written_as_bytes(tmp_path, kind):
    values = [b"ab", b"cd"] if kind is list else [kind(b"ab"), kind(b"cd")]
    with TFRecordWriter(tmp_path / "x.tfrecord") as writer:
        writer.write({"x": values})
    (sample,) = TFRecordDataset(tmp_path / "x.tfrecord")
    assert example_features(sample["bytes"])["x"] == [b"ab", b"cd"]
