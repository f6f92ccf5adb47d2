"""Folders whose index.json names the shards: MosaicML Streaming and LitData."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shmload.errors import ShardCorrupt, StoreError
from shmload.formats.index_json import UnsupportedIndex
from shmload.formats.known_formats import recognize_path
from shmload.remote import RemoteDataset
from shmload.tools.inspect import describe, index
from tests.remote.layout_kit import DATA, NUM_SAMPLES


@pytest.mark.parametrize(
    ("folder", "title"), [("litdata", "LitData"), ("litdata_zstd", "LitData"), ("mds", "MDS"), ("mds_gz", "MDS")]
)
def test_inspect_describes_a_folder_by_its_index_json(folder: str, title: str) -> None:
    found = describe(DATA / folder, num_samples=2)
    assert (found.format, found.num_samples, len(found.samples)) == (title, NUM_SAMPLES, 2)
    assert found.fields["label"] == "int"
    assert "which index.json names" in found.notes[0]


def test_inspect_describes_a_chunk_of_litdata_by_the_index_json_beside_it(tmp_path: Path) -> None:
    found = describe(DATA / "litdata" / "chunk-0-0.bin", num_samples=1)
    assert (found.format, found.num_samples) == ("LitData", 7)
    shutil.copy(DATA / "litdata" / "chunk-0-0.bin", tmp_path)
    with pytest.raises(ValueError, match="has no known format"):
        describe(tmp_path / "chunk-0-0.bin")


def test_index_says_that_litdata_needs_no_index() -> None:
    assert index(DATA / "litdata" / "chunk-0-0.bin") == (
        f"{DATA / 'litdata' / 'chunk-0-0.bin'}: no index was written: LitData needs no index: its samples are found without",
        False,
    )


def test_litdata_is_a_layout_by_name() -> None:
    assert len(RemoteDataset.from_urls(str(DATA / "litdata"), layout="litdata")) == NUM_SAMPLES


def test_chunk_without_its_index_json_names_the_remedy() -> None:
    chunk = str(DATA / "litdata" / "chunk-0-0.bin")
    with pytest.raises(ShardCorrupt, match=r"sample 0, .*: LitData's index.json defines .*: give the URL of the folder"):
        list(RemoteDataset.from_urls(chunk, layout="litdata", shuffle=False))


@pytest.mark.parametrize("text", ["[]", "{", '{"chunks": 3}', '{"chunks": [], "config": []}', '{"files": []}'])
def test_index_json_of_another_program_is_not_recognized(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    (tmp_path / "x.bin").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "x.bin"):
        with pytest.raises(ValueError, match="has no known format"):
            recognize_path(path)


def test_inspect_refuses_an_index_json_that_names_a_file_outside_its_folder(tmp_path: Path) -> None:
    found = json.loads((DATA / "litdata" / "index.json").read_text())
    found["chunks"][0]["filename"] = "../x.bin"
    (tmp_path / "index.json").write_text(json.dumps(found))
    with pytest.raises(StoreError, match="is not a valid key"):
        describe(tmp_path)


def test_inspect_of_encrypted_chunks_says_that_they_are_encrypted() -> None:
    with pytest.raises(UnsupportedIndex, match="its chunks are encrypted by fernet"):
        describe(DATA / "litdata_sealed")


def test_index_json_whose_formats_and_values_differ_in_number_is_refused(tmp_path: Path) -> None:
    """Values would be left out; with more values than formats, every pass would be empty."""
    found = json.loads((DATA / "litdata" / "index.json").read_text())
    found["config"]["data_format"] = found["config"]["data_format"][:-1]
    (tmp_path / "index.json").write_text(json.dumps(found))
    with pytest.raises(UnsupportedIndex, match=r"index.json: has \d+ formats for \d+ values of an item: is the file damaged"):
        describe(tmp_path)
