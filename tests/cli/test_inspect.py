"""`shmload inspect`."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload.formats import TarDataset, TarWriter
from shmload.formats.summary import shortened
from shmload.formats.tfrecord.tfrecord_format import features_of

Written = Callable[[str], Path]
Command = Callable[..., Any]
PNG = b"\x89PNG\r\n\x1a\n"

EXPECTED: dict[str, tuple[int, dict[str, str], tuple[int, int, int]]] = {  # samples, fields, bytes per sample
    "npy": (10, {"data": "float32 (2,)"}, (8, 8, 8)),
    "Parquet": (10, {"x": "float32", "s": "str"}, (7, 7, 7)),
    "HDF5": (10, {"x": "float32 (2,)"}, (8, 8, 8)),
    "safetensors": (10, {"x": "float32 (2,)"}, (8, 8, 8)),
    "Zarr": (10, {"x": "float32 (2,)"}, (8, 8, 8)),
    "TFRecord": (6, {"s": "bytes", "x": "float32 (2,)", "y": "int64 (0 to 2,)"}, (0, 0, 0)),
    "tokens, Megatron": (2, {"tokens": "uint16 (any,)"}, (8, 9, 10)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_format_is_recognized_by_its_bytes(name: str, written: Written, command: Command) -> None:
    path = written(name)
    count, fields, sizes = EXPECTED[name]
    done = command("inspect", path, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    (found,) = json.loads(done.stdout)
    assert (name, count, fields) == (found["format"], found["num_samples"], found["fields"])
    if sizes[0]:
        assert sizes == tuple(found["sample_nbytes"][key] for key in ("min", "median", "max"))
    assert min(3, count) == len(found["samples"])


@pytest.mark.parametrize("name", ["tar", "tar, gzip", "tar, bzip2", "tar, xz", "tar, zstd"])
def test_compressed_shards_are_recognized(name: str, written: Written, command: Command) -> None:
    done = command("inspect", written(name), "--json", "--samples", 1)
    (found,) = json.loads(done.stdout)
    assert (found["format"], found["num_samples"]) == ("tar", 5)
    assert found["fields"] == {"cls": "int", "jpg": "bytes", "txt": "str, in 2 of 5"}
    assert found["sample_nbytes"]["num_samples"] == 5
    assert list(found["samples"][0]) == ["__key__", "cls", "jpg"]
    assert ("," in name) == any("can only be read in order" in note for note in found["notes"])


def test_compressed_records_are_read(written: Written, command: Command) -> None:
    (found,) = json.loads(command("inspect", written("TFRecord, gzip"), "--json").stdout)
    assert (found["format"], found["num_samples"]) == ("TFRecord", 6)
    assert any(note.startswith("compressed by gzip") for note in found["notes"])


def test_inspect_writes_no_index(written: Written, command: Command, tmp_path: Path) -> None:
    paths = [written(name) for name in ("tar", "TFRecord")]
    before = sorted(os.listdir(tmp_path))
    assert command("inspect", *paths).exit_code == 0
    assert before == sorted(os.listdir(tmp_path))


def test_text_output(written: Written, command: Command) -> None:
    path = written("Parquet")
    lines = command("inspect", path, "--samples", "1").stdout.splitlines()
    assert [
        f"{path}: Parquet, 10 samples, {path.stat().st_size / 1024:.1f} KiB",
        "  x  float32",
        "  s  str",
        "  a sample, min / median / max: 7 bytes / 7 bytes / 7 bytes",
        "  3 row groups of up to 4 rows",
        "  0 x: 0.0, s: 'é0'",
    ] == lines


def described_by_column(path: Path, command: Command) -> dict[str, Any]:
    done = command("inspect", path, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    (found,) = json.loads(done.stdout)
    return dict(found)


def test_parquet_columns_that_need_an_argument_are_described_with_it(command: Command, tmp_path: Path) -> None:
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    columns = {"x": [1, 2], "holes": [1.5, None], "price": [decimal.Decimal("1.25")] * 2, "box": [{"a": 1}, {"a": 2}]}
    pq.write_table(pa.table(columns), path)
    found = described_by_column(path, command)
    assert (found["num_samples"], found["samples"]) == (2, [{"x": "1"}, {"x": "2"}])
    assert found["fields"] == {"x": "int64", **dict.fromkeys(("holes", "price", "box"), "not readable as it is, see below")}
    shown, holes, price, box, groups = found["notes"]
    assert shown == "the samples shown are those of columns=['x']"
    assert "column 'holes' has 1 nulls" in holes
    assert "fill_null={'holes': value}" in holes
    assert price.startswith("column 'price' of decimal128(3, 2) cannot be a field of a batch")
    assert box.startswith("column 'box' of struct<a: int64> cannot be a field of a batch")
    assert groups == "1 row groups of up to 2 rows"


def test_parquet_file_without_a_readable_column_is_described(command: Command, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"box": [{"a": 1}, {"a": 2}]}), path)
    found = described_by_column(path, command)
    assert (found["num_samples"], found["samples"], len(found["notes"])) == (2, [], 2)


def test_hdf5_fields_of_other_kinds_and_lengths_are_described_with_the_argument(command: Command, tmp_path: Path) -> None:
    import h5py

    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((4, 2), np.float32)
        file["y"] = np.arange(4)
        file["mean"] = np.zeros(3)
        file["both"] = np.zeros(4, [("a", "i4"), ("b", "f8")])
    found = described_by_column(path, command)
    assert found["num_samples"] == 4
    assert found["fields"] == {
        "both": "not readable as it is, see below, 4 rows",
        "mean": "float64, 3 rows",
        "x": "float32 (2,), 4 rows",
        "y": "int64, 4 rows",
    }
    shown, both, lengths = found["notes"]
    assert shown == "the samples shown are those of fields=['x', 'y']"
    assert "'/both': rows of [('a', '<i4'), ('b', '<f8')]" in both
    assert lengths.endswith("give fields= with fields of one length")


def test_safetensors_and_zarr_of_several_lengths_are_described(command: Command, tmp_path: Path) -> None:
    import zarr
    from safetensors.numpy import save_file

    arrays = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32), "c": np.zeros((3, 1), np.float32)}
    save_file(arrays, tmp_path / "a.safetensors")
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    for name, array in arrays.items():
        group[name] = array
    for path in (tmp_path / "a.safetensors", tmp_path / "a.zarr"):
        found = described_by_column(path, command)
        assert found["num_samples"] == 3
        assert found["fields"] == {"a": "float32, 2 rows", "b": "float32, 3 rows", "c": "float32 (1,), 3 rows"}


def test_folder_of_images_has_classes(written: Written, command: Command) -> None:
    (found,) = json.loads(command("inspect", written("images"), "--json").stdout)
    assert (found["format"], found["num_samples"]) == ("images", 3)
    assert found["fields"]["label"] == "int64: 2 folders, cat, dog"
    assert found["notes"] == ["3 JPEG", "widths 16 to 18, heights 12 to 12, RGB (3)"]
    assert found["samples"][0]["name"] == "'cat/1.bin'"


def error_line(done: Any) -> str:
    """Returns the single line of output of a failed command."""
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return str(line)


@pytest.mark.parametrize("name", ["inspect", "index"])
def test_empty_path_is_an_error_and_not_the_current_folder(name: str, command: Command) -> None:
    assert "a PATH is empty: give a file" in error_line(command(name, ""))


def test_url_is_described_as_the_shards_that_a_remote_dataset_reads(written: Written, command: Command) -> None:
    path = written("tar")
    local, remote = (json.loads(command("inspect", place, "--json").stdout)[0] for place in (path, path.as_uri()))
    assert remote["format"] == "shards read by RemoteDataset (tar)"
    assert [remote[name] for name in ("path", "num_samples", "nbytes")] == [path.as_uri(), local["num_samples"], local["nbytes"]]
    assert remote["fields"] == {"__key__": "str", **local["fields"]}
    assert "there is no such folder, or it is empty" in error_line(command("inspect", f"{path.as_uri()}x"))


def test_raw_tokens_are_not_recognized(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(2000, dtype=np.uint16).tofile(path)
    assert f"{path}: it has no known format (npy, Parquet" in error_line(command("inspect", path))


def test_csv_file_is_refused_with_the_remedy(command: Command, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("path,label\na.jpg,3\n")
    assert "Convert it to Parquet, or read a list of paths by SharedIndex" in error_line(
        command("inspect", tmp_path / "labels.csv")
    )


def test_bin_file_is_recognized_by_the_index_next_to_it(written: Written, command: Command) -> None:
    path = written("tokens, Megatron").with_suffix(".bin")
    (found,) = json.loads(command("inspect", path, "--json").stdout)
    assert (found["format"], found["num_samples"]) == ("tokens, Megatron", 2)
    assert found["notes"] == ["9 tokens in 2 documents, which are the samples here"]
    assert found["samples"][0]["tokens"] == "uint16 (4,): 0 1 2 3"
    path.write_bytes(path.read_bytes()[:-2])
    assert "its 9 tokens of uint16 do not make the 16 bytes of" in error_line(command("inspect", path))
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-1])
    assert "2 sequences and 3 boundaries need" in error_line(command("inspect", index))


@pytest.mark.parametrize(
    "name",
    ["npy", "Parquet", "HDF5", "safetensors", "tar", "tar, gzip", "tar, xz", "TFRecord", "TFRecord, gzip", "tokens, Megatron"],
)
@pytest.mark.parametrize("command_name", ["inspect", "index"])
def test_error_for_a_truncated_file_is_one_line(name: str, command_name: str, written: Written, command: Command) -> None:
    path = written(name)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 6 // 10])
    done = command(command_name, path)
    if command_name == "index" and not name.startswith(("tar", "TFRecord")):
        assert "no index was written" in done.stdout  # this format needs no index, so nothing was read
        return
    assert str(path.with_suffix("")) in error_line(done)


@pytest.mark.parametrize("command_name", ["inspect", "index"])
def test_error_for_a_file_without_samples_is_one_line(command_name: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("once upon a time")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/text").write_text("once upon a time")
    for name, words in (
        ("nothing", "nothing: No such file or directory"),
        ("empty", "empty: the file is empty"),
        ("pipe", "pipe: is a pipe, a device or a socket, and not a file"),
        ("folder", "folder: the folder is empty"),
        (
            "text",
            "text: it has no known format (npy, Parquet, HDF5, safetensors, Zarr, tar, TFRecord, JSON lines, MDS, LitData, images, tokens)",
        ),
        ("other", "other: contains no shards" if command_name == "index" else "other: it has no known format"),
    ):
        line = error_line(command(command_name, tmp_path / name))
        assert line.startswith(f"shmload {command_name}: {tmp_path}")
        assert words in line


def test_other_paths_are_described_beside_a_bad_one(written: Written, command: Command, tmp_path: Path) -> None:
    alone, both = command("inspect", path := written("npy")), command("inspect", tmp_path / "nothing", path)
    assert (both.exit_code, both.stdout) == (2, alone.stdout)
    assert both.stderr == f"shmload inspect: {tmp_path}/nothing: No such file or directory\n"
    as_json = command("inspect", path, tmp_path / "nothing", "--json")
    assert as_json.exit_code == 2
    assert [found["path"] for found in json.loads(as_json.stdout)] == [str(path)]
    assert "nothing: No such file" in error_line(command("inspect", tmp_path / "nothing", "--json"))


def test_damaged_or_truncated_zstd_shard_is_reported(written: Written, command: Command) -> None:
    path = written("tar, zstd")
    data = path.read_bytes()
    for damaged in (data[:4] + bytes(50), data[: len(data) // 2], data[:-2]):
        path.write_bytes(damaged)
        assert "the zst" in error_line(command("inspect", path))


def test_damaged_stream_and_damaged_image_are_reported(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b" + bytes(50))
    assert "the gz stream is damaged or cut" in error_line(command("inspect", tmp_path / "a.gz"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").write_bytes(b"\xff\xd8\xff" + bytes(50))
    assert "a.jpg: the picture is damaged" in error_line(command("inspect", tmp_path / "photos"))


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_json_lines_are_described_and_indexed_compressed_or_not(ending: str, command: Command, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    text = b'{"n": 1, "t": "a"}\n\n{"n": 2, "t": "bb"}\n7'
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[ending](text))
    (found,) = json.loads(command("inspect", path, "--json").stdout)
    assert (found["format"], found["num_samples"]) == ("JSON lines", 3)
    assert found["fields"] == {"n": "int, in 2 of 3", "t": "str, in 2 of 3", "value": "int, in 1 of 3"}
    assert found["samples"][1] == {"n": "2", "t": "'bb'"}
    assert f"{path}: 3 samples, index of" in command("index", path).stdout
    assert f"{path}: has its index beside it" in command("index", path).stdout


def test_line_that_is_not_json_is_reported(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n":')
    assert "a.jsonl: line 2 with a sample, at byte 9: Expecting value" in error_line(command("inspect", tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 9)[:-3])
    assert "does not end with the file's" in error_line(command("inspect", tmp_path / "b.jsonl.gz"))


def test_record_with_damaged_data_is_reported(written: Written, command: Command) -> None:
    path = written("TFRecord")
    data = bytearray(path.read_bytes())
    data[14] ^= 1
    path.write_bytes(data)
    assert "record 0, which starts at byte 0: the checksum of its data differs" in error_line(command("inspect", path))


@pytest.mark.parametrize(
    ("hexadecimal", "expected"),
    [
        ("0a180a160a016112111a0f0a0d01ffffffffffffffffff01ac02", {"a": [1, -1, 300]}),
        ("0a130a110a0162120c120a0a080000803f000020c0", {"b": [1.0, -2.5]}),
        ("0a0f0a0d0a016312080a060a0278790a00", {"c": [b"xy", b""]}),
        ("0a070a050a016e1200", {"n": []}),
        ("0a0d0a0b0a016112061a0408010802", {"a": [1, 2]}),
        ("0a130a110a0161120c120a0d0000c03f0d00002040", {"a": [1.5, 2.5]}),
        ("00ff", None),
        ("0a18", None),
        ("", None),
    ],
)
def test_features_are_described_without_a_schema(hexadecimal: str, expected: Any) -> None:
    found = features_of(bytes.fromhex(hexadecimal))
    assert expected == (None if found is None else {name: list(values) for name, values in found.items()})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.arange(8), "int64 (8,): 0 1 2 3 4 5 ..."),
        (np.float32(0.5), "0.5"),
        (b"abc", "3 bytes: 61 62 63"),
        (bytes(9), "9 bytes: 00 00 00 00 00 00 00 00 ..."),
        ("x" * 100, "'" + "x" * 57 + "...'"),
        ([1, 2], "[1, 2]"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16..."),
    ],
)
def test_values_are_shortened(value: Any, text: str) -> None:
    assert text == shortened(value)


@pytest.mark.slow(reason="runs the command in another process, which imports pyarrow")
def test_command_does_not_import_torch_for_arrays(written: Written) -> None:
    code = "import sys; from shmload.cli import main\ntry: main()\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(written("Parquet"))],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "Parquet, 10 samples" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_plain_shard_is_described_by_its_index_and_a_few_samples(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        for number in range(1200):
            extra = {"txt": "x" * number} if number >= 1000 else {}
            writer.write({"__key__": f"{number:06d}", "bin": bytes(10), **extra})
    read: list[int] = []
    get = TarDataset.__getitem__
    monkeypatch.setattr(TarDataset, "__getitem__", lambda dataset, index: read.append(index) or get(dataset, index))
    (found,) = json.loads(command("inspect", tmp_path / "a.tar", "--json", "--samples", 1).stdout)
    assert (found["num_samples"], found["fields"]) == (1200, {"bin": "bytes", "txt": "?, in 200 of 1,200"})
    assert found["sample_nbytes"] == {"min": 10, "median": 10, "max": 1209, "num_samples": 1200}
    assert len(read) <= 8


def test_folder_that_a_remote_dataset_reads_is_described(tmp_path: Path, command: Command) -> None:
    for number, name in enumerate(("lines/a.jsonl", "lines/below/b.jsonl", "sounds/a.wav", "sounds/b.wav")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"RIFF" if name.endswith("wav") else b'{"x": %d}\n{"x": 7}\n' % number)
    before = sorted(tmp_path.rglob("*"))
    lines, sounds = command("inspect", tmp_path / "lines").stdout, command("inspect", tmp_path / "sounds").stdout
    assert f"{tmp_path / 'lines'}: shards read by RemoteDataset (jsonl), 4 samples, 36 bytes\n  x  int\n" in lines
    assert "2 files of at most 18 bytes; the fields are those of 4 samples" in lines
    assert [f"{number} x: {value}" for number, value in enumerate((0, 7, 1))] == [line.strip() for line in lines.splitlines()[-3:]]
    assert "shards read by RemoteDataset (files), 2 samples, 8 bytes\n  wav  bytes\n" in sounds
    assert before == sorted(tmp_path.rglob("*"))
