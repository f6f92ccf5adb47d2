"""TFRecord: exact bytes, parser requirements, files written by TensorFlow, and all kinds of damage."""

from __future__ import annotations

import os
import pickle
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload import SampleError, ShardCorrupt, ShmLoader
from shmload._core.crc32c import copy_crc32c, crc32c, masked
from shmload.formats import TFRecordDataset, TFRecordWriter
from shmload.remote.layouts import TFRecords
from tests.formats.tfrecord.fuzz import framed

BY_TENSORFLOW = Path(__file__).parent / "written_by_tensorflow"
A = bytes.fromhex("0a180a160a016112111a0f0a0d01ffffffffffffffffff01ac02")


def block(tag: int, data: bytes) -> bytes:
    assert len(data) < 128
    return bytes([tag, len(data)]) + data


def entry(name: str, value: bytes) -> bytes:
    return block(0x0A, block(0x0A, name.encode()) + block(0x12, value))


def parsed(tmp_path: Path, data: bytes, schema: dict, **options: object) -> dict:
    path = tmp_path / "one.tfrecord"
    path.write_bytes(framed(data))
    return {k: getattr(v, "tolist", lambda v=v: v)() for k, v in TFRecordDataset(path, schema, **options)[0].items()}


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)],
)
def test_crc32c_has_its_published_values(data, expected):
    assert expected == crc32c(data) == crc32c(data, by_tables=True)
    assert (masked(0), masked(0xE3069283)) == (0xA282EAD8, 0xC78AB0E5)


@given(st.integers(0, 40_000), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_all_implementations_of_crc32c_agree(nbytes, skipped, seed):
    data = np.random.default_rng(seed).integers(0, 256, nbytes + skipped, np.uint8)[skipped:]
    room = np.zeros(nbytes, np.uint8)
    assert crc32c(data) == crc32c(data, by_tables=True) == copy_crc32c(room, data)
    assert bytes(room) == bytes(data)
    room[:] = 0
    assert crc32c(data) == copy_crc32c(room, data, by_tables=True)
    assert bytes(room) == bytes(data)
    room[:] = 0
    assert crc32c(data) == copy_crc32c(room, data, streams=True)
    assert crc32c(data[nbytes // 3 :], crc32c(data[: nbytes // 3])) == crc32c(data)
    assert bytes(room) == bytes(data)


def test_copy_into_a_buffer_of_another_size_is_an_error():
    with pytest.raises(ValueError, match="the destination of 2 bytes is too small for 3 bytes"):
        copy_crc32c(bytearray(2), b"abc")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (b"", "000000000000000029039807d8ea82a2"),
        (b"hello", "0500000000000000eab2043e68656c6c6fbb1f1c19"),
        (bytes(range(16)), "100000000000000095fbfe18000102030405060708090a0b0c0d0e0f6a9e5ab4"),
        (
            {"a": [1, -1, 300], "b": [1.0, -2.5], "c": b"xy"},
            "3a000000000000001295eae20a380a160a016112111a0f0a0d01ffffffffffffffffff01ac020a0b0a016312060a040a0278790a110a0162120c"
            "120a0a080000803f000020c0df540712",
        ),
    ],
)
def test_files_have_the_golden_bytes(tmp_path, record, expected):
    path = tmp_path / "golden"
    if isinstance(record, bytes):
        with TFRecordWriter(path) as writer:
            writer.write(record)
        assert expected == path.read_bytes().hex()
        assert [{"bytes": record}] == [TFRecordDataset(path)[0]]
    else:
        path.write_bytes(bytes.fromhex(expected))
        schema = {"a": ("int64", (3,)), "b": ("float32", (2,)), "c": bytes}
        sample = TFRecordDataset(path, schema)[0]
        assert (sample["a"].tolist(), sample["b"].tolist(), sample["c"]) == ([1, -1, 300], [1.0, -2.5], b"xy")


@pytest.mark.parametrize(
    ("data", "schema", "expected"),
    [
        (A, {"a": ("int64", (None,))}, {"a": [1, -1, 300]}),
        (bytes.fromhex("0a130a110a0162120c120a0a080000803f000020c0"), {"b": ("float32", (2,))}, {"b": [1.0, -2.5]}),
        (bytes.fromhex("0a090a070a016512021a00"), {"e": ("int64", (None,))}, {"e": []}),
        (bytes.fromhex("0a070a050a016e1200"), {"n": ("int64", (None,))}, {"n": []}),
        (block(0x0A, entry("e", block(0x12, b"\x0a\x00"))), {"e": ("int64", (None,))}, {"e": []}),
        (bytes.fromhex("0a0d0a0b0a016112061a0408010802"), {"a": ("int32", (2,))}, {"a": [1, 2]}),
        (bytes.fromhex("0a130a110a0161120c120a0d0000c03f0d00002040"), {"a": ("float64", (2,))}, {"a": [1.5, 2.5]}),
        (block(0x0A, entry("a", block(0x1A, b"\x0a\x02\x01\x02\x08\x03"))), {"a": ("int64", (3,))}, {"a": [1, 2, 3]}),
        (block(0x0A, entry("a", block(0x1A, b"\x08\x01")) + entry("a", block(0x1A, b"\x08\x02"))), {"a": "int64"}, {"a": 2}),
        (block(0x0A, entry("a", block(0x1A, b"\x08\x01"))) + block(0x0A, entry("b", block(0x1A, b"\x08\x02"))), {"a": "int8", "b": "uint8"}, {"a": 1, "b": 2}),
        (block(0x0A, entry("a", block(0x1A, b"\x08\x01") * 2)), {"a": ("int64", (2,))}, {"a": [1, 1]}),
        (block(0x0A, entry("a", block(0x0A, b"\x0a\x01x") + block(0x1A, b"\x08\x07"))), {"a": "int64"}, {"a": 7}),
        (block(0x0A, block(0x0A, block(0x12, block(0x1A, b"\x08\x05")))), {"": "int64"}, {"": 5}),
        (b"\x10\x01\x19" + bytes(8) + b"\x25" + bytes(4) + b"\x2a\x01x" + b"\x33\x3b\x3c\x34" + A, {"a": ("int64", (3,))}, {"a": [1, -1, 300]}),
        (block(0x0A, entry("a", block(0x0A, block(0x0A, bytes([1, 0, 2, 0]))))), {"a": ("uint16", (2,))}, {"a": [1, 2]}),
    ],
)  # fmt: skip
def test_parser_accepts_the_encodings_that_protobuf_accepts(tmp_path, data, schema, expected):
    assert expected == parsed(tmp_path, data, schema)


def test_sequence_example_has_context_and_feature_lists(tmp_path):
    frames = block(0x0A, block(0x12, b"\x0d\0\0\x90\x40")) + block(0x0A, block(0x12, b"\x0d\0\0\xa0\x40"))
    data = block(0x0A, entry("k", block(0x1A, b"\x08\x07"))) + block(0x12, block(0x0A, block(0x0A, b"r") + block(0x12, frames)))
    schema = {"k": "int64", "r": ("float32", (None,))}
    assert parsed(tmp_path, data, schema, records="sequence") == {"k": 7, "r": [4.5, 5.0]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"z": "int64"}, "field 'z' is missing; give TFRecordDataset"),
        ({"a": ("float32", (3,))}, "needs float32 of shape .* an int64_list of 3 values"),
        ({"a": ("int64", (2,))}, "needs int64 of shape .* of 3 values"),
        ({"a": ("uint8", (3,))}, "outside of that type's range"),
        ({"a": str}, "needs one value of str"),
    ],
)
def test_record_that_does_not_fit_the_schema_is_a_sample_error(tmp_path, schema, message):
    with pytest.raises(SampleError, match=f"one.tfrecord: record 0, which starts at byte 0: .*{message}"):
        parsed(tmp_path, A, schema)


def test_default_replaces_a_missing_field(tmp_path):
    schema = {"z": ("int16", (2,)), "t": str}
    assert parsed(tmp_path, A, schema, defaults={"z": 4, "t": "no"}) == {"z": [4, 4], "t": "no"}


SCHEMA = {"floats": ("float32", (3,)), "ints": ("int64", (2,)), "ragged": ("int64", (None,)), "text": str}


@pytest.mark.parametrize("name", ["plain", "gzip", "zlib"])
def test_examples_written_by_tensorflow_are_read(name, tmp_path):
    path = tmp_path / name
    path.write_bytes((BY_TENSORFLOW / f"{name}.tfrecord").read_bytes())
    dataset = TFRecordDataset(path, SCHEMA)
    assert len(dataset) == 5
    for i in range(5):
        sample = dataset[i - 5]
        assert ([i + 0.5, -i, 3.25], [-i, 300 * i]) == (sample["floats"].tolist(), sample["ints"].tolist())
        assert (list(range(i)), f"text {i}") == (sample["ragged"].tolist(), sample["text"])


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "some.tfrecord"
    with TFRecordWriter(path, raw=["x"]) as writer:
        for i in range(6):
            writer.write({"x": np.arange(5000, dtype=np.float64) + i, "n": i, "r": np.arange(i, dtype=np.float32), "t": "é" * i})
    return path


def test_loader_reads_batches_in_place(written):
    dataset = TFRecordDataset(written, {"x": ("float64", (50, 100)), "n": "int32"})
    with ShmLoader(dataset, batch_size=4) as loader:
        first, second = loader
    assert second["n"].tolist() == [4, 5]
    assert (np.arange(5000).reshape(50, 100) + 2 == first["x"][2].numpy()).all()
    ragged = TFRecordDataset(str(written) + "*", {"r": ("float32", (None,)), "t": str, "n": "int64"})
    with ShmLoader(pickle.loads(pickle.dumps(ragged)), batch_size=6, ragged="jagged") as loader:
        (batch,) = loader
    assert batch["r"].offsets.tolist() == [0, 0, 1, 3, 6, 10, 15]
    assert ["é" * i for i in range(6)] == list(batch["t"])


@pytest.mark.slow(reason="damages and reads 150 files")
@pytest.mark.parametrize("verify", ["all", "length", "none"])
def test_damage_covered_by_verify_is_detected(written, verify):
    good, draw = written.read_bytes(), random.Random(5)
    schema = {"x": ("float64", (5000,)), "n": "int64", "r": ("float32", (None,)), "t": bytes}
    for trial in range(150):
        bad = bytearray(good)
        if trial % 3:
            bad[draw.choice([draw.randrange(len(bad)), draw.randrange(120)])] ^= 1 << draw.randrange(8)
        else:
            del bad[draw.randrange(1, len(bad)) :]
        written.write_bytes(bad)
        Path(f"{written}.shmload-index").unlink(missing_ok=True)
        try:
            dataset = TFRecordDataset(written, schema, verify=verify)
            for i in range(len(dataset)):
                dataset[i]
        except (ShardCorrupt, SampleError) as error:
            named = str(written) in str(error)
        else:
            named = verify != "all" or len(dataset) < 6  # truncated between two records, which is a valid file
        assert named, trial
    os.unlink(written)


def test_truncated_or_damaged_or_exploding_compressed_stream_is_an_error(tmp_path):
    path = tmp_path / "z"
    whole = zlib.compress(framed(bytes(100_000)))
    for data, message in ((whole[:-9], "truncated"), (whole[:40] + b"\xff" * 9 + whole[49:], "corrupted")):
        path.write_bytes(data)
        with pytest.raises(ShardCorrupt, match=f"zlib stream is {message}"):
            len(TFRecordDataset(path))
    path.write_bytes(whole)
    with pytest.raises(ShardCorrupt, match="inflates to more than 1000 bytes; raise max_inflated_bytes"):
        len(TFRecordDataset(path, max_inflated_bytes=1000))
    assert bytes(100_000) == TFRecordDataset(path)[0]["bytes"]


def test_index_is_reused_and_a_stale_one_rebuilt(written):
    assert len(TFRecordDataset(written)) == 6
    index = Path(f"{written}.shmload-index")
    first = index.read_bytes()
    with TFRecordWriter(written) as writer:
        writer.write(b"other")
    assert len(TFRecordDataset(written)) == 1
    assert first != index.read_bytes()
    index.write_bytes(index.read_bytes()[:-1] + b"\x7f")
    assert len(TFRecordDataset(written)) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: TFRecordDataset(p, verify="some"), "verify is one of 'none', 'length', 'all'; got 'some'"),
        (lambda p: TFRecordDataset(p, {"a": ("int64", (None, None))}), "at most one extent may be None"),
        (lambda p: TFRecordDataset(p, {"a": "int64"}, defaults={"b": 1}), "defaults are for fields of the schema"),
        (lambda p: TFRecordDataset(p, {"a": str}, defaults={"a": 5}), r"defaults\['a'\] needs str or bytes; got int"),
        (lambda p: TFRecordDataset(p, {"a": "int8", "b": "int8"}, records="raw"), "needs a schema of one field"),
        (lambda p: TFRecordWriter(p, compression="lz4"), 'compression is None, "gzip" or "zlib"'),
        (lambda p: TFRecordDataset([]), "at least one path"),
        (lambda p: TFRecordDataset(p, records="proto"), "records is one of 'raw', 'example', 'sequence'; got 'proto'"),
        (lambda p: TFRecordDataset(p, records="example"), "records='example' needs a schema, which names the fields to read"),
        (lambda p: TFRecordDataset(p, records="sequence"), "records='sequence' needs a schema"),
        (lambda p: TFRecordDataset(p, compression="bz2"), "compression is one of 'auto', 'none', 'gzip', 'zlib'; got 'bz2'"),
        (lambda p: TFRecordDataset(p, defaults={"bytes": b""}), "takes no defaults, because the record itself is never missing"),
        *(
            (lambda p, a=a: TFRecordDataset(p, {"a": a[0]}, defaults={"a": a[1]}), rf"defaults\['a'\] is .*; the field is {a[0]}")
            for a in (("int64", 2.5), ("int8", 300), ("int64", float("nan")), ("float32", 1e300), ("bool", 2), ("int64", "5"))
        ),
        (
            lambda p: TFRecordDataset(p, {"a": ("int64", (2,))}, defaults={"a": [1, 2, 3]}),
            r"defaults\['a'\] is \[1, 2, 3\]; the field is int64 of shape \(2,\), which cannot hold it",
        ),
        (
            lambda p: TFRecordDataset(p, {"a": ("int8", (None,))}, defaults={"a": 1}),
            r"defaults\['a'\]: only text and fields of a fixed shape and numpy's types have defaults",
        ),
    ],
)
def test_invalid_arguments_are_errors(written, make, message):
    with pytest.raises(ValueError, match=message):
        make(written)


def test_entry_of_a_schema_that_no_record_can_have_is_an_error(written):
    for shape, error, message in (
        (8, TypeError, r"schema field 'a' is \('float32', 8\): give \(dtype, shape\)"),
        ((-1,), ValueError, r"schema field 'a' has shape \(-1,\): extents are at least 0, or None"),
    ):
        with pytest.raises(error, match=message):
            TFRecordDataset(written, {"a": ("float32", shape)})
    with pytest.raises(ValueError, match=r"schema field 'a' is text of shape \(None,\): a record has one value of it"):
        TFRecordDataset(written, {"a": (str, (None,))})


def test_schema_that_is_not_a_mapping_is_an_error(written):
    for schema in ({}, ["a"]):
        with pytest.raises(TypeError, match=r"a schema is a mapping name -> .* with at least one field; got"):
            TFRecordDataset(written, schema)


@pytest.mark.parametrize(
    ("data", "records", "message"),
    [
        (b"\x0a\x05", "example", "not a valid message: the record's 2 bytes do not parse"),
        (
            block(0x0A, entry("a", block(0x1A, b"\x08\x07"))) + block(0x12, entry("a", b"")),
            "sequence",
            "field 'a' is both in the context and in the feature lists",
        ),
    ],
)
def test_record_that_is_not_a_message_is_corrupt(tmp_path, data, records, message):
    with pytest.raises(ShardCorrupt, match=f"one.tfrecord: record 0, which starts at byte 0: {message}"):
        parsed(tmp_path, data, {"a": "int64"}, records=records)


def test_bytes_of_another_length_or_not_utf8_are_a_sample_error(tmp_path):
    data = block(0x0A, entry("a", block(0x0A, block(0x0A, b"\xff23"))))
    for spec, message in (
        (("int16", (2,)), r"field 'a' needs int16 of shape \(2,\); the record has one value of 3 bytes"),
        (("int16", (None,)), r"field 'a' needs int16 of shape \(None,\); the record has one value of 3 bytes"),
        (str, "field 'a' needs UTF-8, as its type is str: .*invalid start byte; give the schema bytes instead"),
    ):
        with pytest.raises(SampleError, match=f"one.tfrecord: record 0, which starts at byte 0: {message}"):
            parsed(tmp_path, data, {"a": spec})


def test_length_beyond_int64_ends_beyond_the_object():
    length = (1 << 63).to_bytes(8, "little")
    data = length + masked(crc32c(length)).to_bytes(4, "little") + bytes(20)
    with pytest.raises(ShardCorrupt, match="x: record 0, at byte 0: goes beyond the end of the object"):
        TFRecords().index("x", len(data), lambda at, nbytes: data[at : at + nbytes])


def test_error_of_a_scan_names_the_damaged_record(tmp_path):
    path = tmp_path / "broken"
    head = (99).to_bytes(8, "little")
    for tail, cause in (
        (b"12345678901", "truncated: fewer than 12 bytes are left for a record's header"),
        (head + b"1234" + bytes(200), "corrupted: the checksum of the record's length differs, or this is not a TFRecord file"),
        (framed(b"hello")[:-1], "truncated: the record goes beyond the end of the file"),
        (bytes(12), "corrupted: the checksum of the record's length differs"),
    ):
        path.write_bytes(framed(b"one") + tail)
        with pytest.raises(ShardCorrupt, match=f"broken: record 1, which starts at byte 19: {cause}"):
            len(TFRecordDataset(path))


def test_rows_too_small_for_a_batch_are_an_error(tmp_path):
    path = tmp_path / "one"
    path.write_bytes(framed(A))
    with pytest.raises(ValueError, match="field 0: the buffer of 16 bytes is too small for 24"):
        TFRecordDataset(path, {"a": ("int64", (3,))}).read_batch_into([0], {"a": np.empty(2, np.int64)})


def test_rows_written_in_one_pass_equal_those_of_a_survey(tmp_path):
    path = tmp_path / "a"
    with TFRecordWriter(path, raw=["image"]) as writer:
        for number in range(9):
            record = {"image": np.full(5000, number, np.uint8), "x": np.arange(3) + number, "label": number}
            writer.write({name: value for name, value in record.items() if name != "label" or number % 2})
    schema = {"image": ("uint8", (5000,)), "x": ("int16", (3,)), "label": "int64"}
    order = np.array([8, 0, 3, 3, -1])
    found = []
    for more in ({}, {"lacking": ("int64", (None,))}):
        dataset = TFRecordDataset(path, {**schema, **more}, defaults={"label": -1})
        with ShmLoader(dataset, batch_size=5, sampler=order.tolist(), num_workers=0, ragged="list") as loader:
            (batch,) = loader
        found.append({name: batch[name].numpy().copy() for name in schema})
    np.testing.assert_equal(*found)
    assert found[0]["label"].tolist() == [-1, -1, 3, 3, -1]
    assert found[0]["image"][:, -1].tolist() == [8, 0, 3, 3, 8]


def test_rows_of_variable_size_cannot_be_written_in_one_pass(tmp_path):
    (tmp_path / "a").write_bytes(framed(A))
    dataset = TFRecordDataset(tmp_path / "a", {"a": ("int64", (None,)), "b": bytes}, defaults={"b": b""})
    reader, _ = dataset._opened()
    indices, room = np.zeros(1, np.int64), np.empty(9, np.int64)
    with pytest.raises(ValueError, match="field 0 has no rows of a fixed size, which writing several at once requires"):
        reader.survey(indices, [room, None])
    with pytest.raises(ValueError, match="there must be 2 buffers, one for each field, got 1"):
        reader.survey(indices).write([room])
