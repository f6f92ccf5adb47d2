"""Examples are parsed as by protobuf's parser, with and without a schema, also if merged, with repeated fields, or damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tfrecord.example_pb2 import Example, SequenceExample

from shmload._core.crc32c import crc32c, masked
from shmload._core.records import example_features
from shmload.errors import SampleError, ShardCorrupt
from shmload.formats import TFRecordDataset, TFRecordWriter
from shmload.formats.tfrecord.tfrecord_format import TFRecords, features_of
from shmload.remote import RemoteDataset
from shmload.tools.inspect import describe
from shmload.tools.pack_source import dataset_of


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def length_field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def packed(values: list[int]) -> bytes:
    return length_field(1, b"".join(map(varint, values)))


NUMBERS = st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**63 - 1))
FLOATS = st.floats(width=32, allow_nan=False).map(lambda value: np.float32(value).tobytes())
UNKNOWN = st.one_of(
    st.builds(lambda n, v: varint(n << 3) + varint(v), st.integers(4, 40), NUMBERS),
    st.builds(length_field, st.integers(4, 40), st.binary(max_size=5)),
    st.builds(lambda n, v: varint(n << 3 | 5) + v, st.integers(4, 40), FLOATS),
    st.builds(lambda n, v: varint(n << 3 | 1) + v, st.integers(4, 40), st.binary(min_size=8, max_size=8)),
    st.builds(lambda n, v: varint(n << 3 | 3) + varint(32) + varint(v) + varint(n << 3 | 4), st.integers(1, 40), NUMBERS),
    st.builds(lambda n, v: varint(n << 3) + varint(v), st.integers(1, 3), NUMBERS),  # a known field number with another wire type
)


def joined(part: st.SearchStrategy[bytes], most: int = 3) -> st.SearchStrategy[bytes]:
    return st.lists(part, max_size=most).map(b"".join)


INT_LIST = joined(st.one_of(st.lists(NUMBERS, max_size=3).map(packed), NUMBERS.map(lambda v: b"\x08" + varint(v)), UNKNOWN))
FLOAT_LIST = joined(st.one_of(joined(FLOATS).map(lambda v: length_field(1, v)), FLOATS.map(lambda v: b"\x0d" + v), UNKNOWN))
BYTES_LIST = joined(st.one_of(st.binary(max_size=4).map(lambda v: length_field(1, v)), UNKNOWN))
FEATURE = joined(
    st.one_of(
        BYTES_LIST.map(lambda data: length_field(1, data)),
        FLOAT_LIST.map(lambda data: length_field(2, data)),
        INT_LIST.map(lambda data: length_field(3, data)),
        INT_LIST.map(lambda data: length_field(3, data)),
        UNKNOWN,
    )
)
KEY = st.sampled_from(["a", "b", "", "é"]).map(str.encode)
# Unknown fields are left out, because protobuf's Python parser drops an entry that has one; its C++ parser and shmload keep it.
ENTRY = joined(st.one_of(KEY.map(lambda k: length_field(1, k)), FEATURE.map(lambda f: length_field(2, f))))
FEATURES = joined(st.one_of(ENTRY.map(lambda entry: length_field(1, entry)), UNKNOWN))
EXAMPLE = joined(st.one_of(FEATURES.map(lambda data: length_field(1, data)), UNKNOWN))
ONE_FEATURE = FEATURE.map(lambda feature: length_field(1, length_field(1, length_field(1, b"a") + length_field(2, feature))))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.one_of(EXAMPLE, ONE_FEATURE)))
    for _ in range(draw(st.integers(1, 3)) if data else 0):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


def parsed_by_protobuf(record: bytes) -> dict[str, tuple[str, list[Any]]] | None:
    """Returns the kind and values of each feature, or None if the bytes are not an Example."""
    try:
        found = Example.FromString(record)
        if SequenceExample.FromString(record).HasField("feature_lists"):
            return None
    except DecodeError:
        return None
    kinds = {name: feature.WhichOneof("kind") for name, feature in found.features.feature.items()}
    return {
        name: ("", []) if kind is None else (kind, list(getattr(found.features.feature[name], kind).value))
        for name, kind in kinds.items()
    }


def parsed_by_shmload(record: bytes) -> dict[str, tuple[str, list[Any]]] | None:
    try:
        found = example_features(record)
    except ValueError:
        return None
    kinds = {"float32": "float_list", "int64": "int64_list"}
    return {
        name: (kinds[value.dtype.name], value.tolist()) if isinstance(value, np.ndarray) else ("bytes_list" if value else "", value)
        for name, value in found.items()
    }


def without_empty_bytes(features: dict[str, tuple[str, list[Any]]]) -> dict[str, tuple[str, list[Any]]]:
    """Replaces empty lists of bytes by untyped empty lists, because both are the same."""
    return {name: ("", []) if kind == "bytes_list" and not values else (kind, values) for name, (kind, values) in features.items()}


def same(ours: Any, theirs: Any) -> bool:
    return bool(repr(ours) == repr(theirs))  # comparing the bytes makes NaN equal NaN, and -0.0 differ from 0.0


MERGED = length_field(
    1, length_field(1, length_field(1, b"a") + length_field(2, length_field(3, packed([1])) + length_field(3, packed([2]))))
)
IN_TWO_VALUES = length_field(
    1,
    length_field(
        1, length_field(1, b"a") + length_field(2, length_field(3, packed([1]))) + length_field(2, length_field(3, packed([2])))
    ),
)


def test_entry_with_an_unknown_field_is_kept() -> None:
    entry = length_field(1, b"a") + length_field(4, b"unknown") + length_field(2, length_field(3, packed([7])))
    assert example_features(length_field(1, length_field(1, entry)))["a"].tolist() == [7]


@pytest.mark.slow(reason="hundreds of random messages")
@settings(deadline=None, max_examples=400)
@given(st.one_of(EXAMPLE, ONE_FEATURE))
@example(MERGED)
@example(IN_TWO_VALUES)
@example(MERGED + IN_TWO_VALUES)
def test_features_equal_protobufs(record: bytes) -> None:
    theirs = parsed_by_protobuf(record)
    assert theirs is not None
    ours = parsed_by_shmload(record)
    assert ours is not None
    assert same(dict(sorted(ours.items())), dict(sorted(without_empty_bytes(theirs).items())))
    assert same(features_of(record), example_features(record) or None)


FIELD_0_IN_A_GROUP = b"\n\r\n\x0b\n\x01a\x12\x06\x83\x01\x00\x05\x84\x01"


@pytest.mark.slow(reason="hundreds of random messages")
@settings(deadline=None, max_examples=600)
@given(st.one_of(damaged(), st.binary(max_size=40)))
@example(FIELD_0_IN_A_GROUP)
def test_damaged_bytes_are_rejected_where_protobuf_rejects_them(record: bytes) -> None:
    assert (parsed_by_shmload(record) is None) == (parsed_by_protobuf(record) is None)


KINDS = {"int64_list": ("int64", (None,)), "float_list": ("float32", (None,))}


def write_record(path: Path, record: bytes) -> Path:
    head = len(record).to_bytes(8, "little")
    path.write_bytes(head + masked(crc32c(head)).to_bytes(4, "little") + record + masked(crc32c(record)).to_bytes(4, "little"))
    return path


@pytest.mark.slow(reason="writes a file for each of many random messages")
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(EXAMPLE, ONE_FEATURE))
@example(MERGED)
@example(IN_TWO_VALUES)
def test_values_of_a_dataset_with_a_schema_equal_protobufs(tmp_path: Path, record: bytes) -> None:
    path = write_record(tmp_path / "x.tfrecord", record)
    for name, (kind, values) in (parsed_by_protobuf(record) or {}).items():
        if kind in KINDS:
            assert same(TFRecordDataset(path, {name: KINDS[kind]})[0][name].tolist(), values)
        elif len(values) == 1:
            assert TFRecordDataset(path, {name: bytes})[0][name] == values[0]
        else:
            with pytest.raises(SampleError):
                TFRecordDataset(path, {name: bytes})[0]


EDGES = {
    "no bytes": b"",
    "a feature in pieces": MERGED,
    "a feature in two values": IN_TWO_VALUES,
    "both": MERGED + IN_TWO_VALUES,
    "cut": MERGED[:-1],
    "no message": b"\xff" * 9,
    "a name that is not UTF-8": length_field(1, length_field(1, length_field(1, b"\xff") + length_field(2, b""))),
    "an unknown field": MERGED + length_field(9, b"x"),
    "a feature of no kind": length_field(1, length_field(1, length_field(1, b"a") + length_field(2, b""))),
    "a SequenceExample": MERGED + length_field(2, b""),
    "a group without an end": b"\x0b" + MERGED,
}


@pytest.mark.parametrize("record", EDGES.values(), ids=EDGES)
def test_every_reader_gives_the_same_values(tmp_path: Path, record: bytes) -> None:
    """Compare the readers with each other; other tests compare the parser with protobuf's."""
    try:
        wanted: Any = example_features(record)
    except ValueError:
        wanted = None
    path = write_record(tmp_path / "x.tfrecord", record)
    alone = {name: values[0] if len(values) == 1 else values for name, values in (wanted or {}).items()} or {"bin": record}
    assert same(describe(path).samples[0], alone)  # shmload inspect
    assert same(dataset_of(str(path))[0], alone)  # shmload pack
    view = RemoteDataset.from_urls(str(path)).indexed()
    if wanted is None:
        with pytest.raises(ShardCorrupt, match="sample 0, at byte 0: is not an Example"):
            view[0]
    else:
        assert same(view[0], {n: v[0] if isinstance(v, list) and len(v) == 1 else v for n, v in wanted.items()})
    if "a" not in (wanted or {}) or not len(wanted["a"]):
        return
    kind: Any = bytes if isinstance(wanted["a"], list) else (wanted["a"].dtype.name, (None,))
    folder = tmp_path / "cache"
    folder.mkdir()
    write_record(folder / "x.tfrecord", record)
    for dataset in (TFRecordDataset(path, {"a": kind}), TFRecordDataset(folder / "x.tfrecord", {"a": kind})):
        assert same(dataset[0]["a"], wanted["a"])


def test_sequence_example_is_an_error_that_names_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    with TFRecordWriter(path) as writer:
        writer.write_sequence({"label": 7}, {"frames": [[1.0], [2.0]]})
    words = r'the record is a tf\.train\.SequenceExample, whose feature lists TFRecordDataset\(.*records="sequence"\) reads'
    for layout in (TFRecords(), TFRecords({"label": "int64"})):
        with pytest.raises(ShardCorrupt, match=rf"sample 0, at byte 0: .*{words}.*TFRecords\(is_example=False\) gives its bytes"):
            RemoteDataset.from_urls(str(path), layout=layout).indexed()[0]
    for schema in ({"label": "int64"}, {"frames": ("float32", (None, 1))}):  # a missing ragged field would be empty
        with pytest.raises(SampleError, match=f"record 0, which starts at byte 0: {words}"):
            TFRecordDataset(path, schema)[0]
    frames = TFRecordDataset(path, {"frames": ("float32", (None, 1))}, records="sequence")[0]["frames"]
    assert frames.tolist() == [[1], [2]]
    assert any("SequenceExample" in note for note in describe(path).notes)


def test_remote_dataset_merges_pieces_of_a_feature(tmp_path: Path) -> None:
    path = write_record(tmp_path / "x.tfrecord", MERGED)
    dataset = RemoteDataset.from_urls(str(path))
    assert next(iter(dataset))["a"].tolist() == TFRecordDataset(path, {"a": ("int64", (None,))})[0]["a"].tolist() == [1, 2]
    dataset.close()
    write_record(path, MERGED[:-1])
    dataset = RemoteDataset.from_urls(str(path))
    with pytest.raises(ShardCorrupt, match=r"x\.tfrecord: sample 0, at byte 0: is not an Example"):
        list(dataset)
    dataset.close()
