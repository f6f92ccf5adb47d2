"""Files beside the data: hidden files and files about a dataset add no samples, in any layout, reader or command."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from shmload.cli import app
from shmload.errors import ObjectMissing
from shmload.formats import (
    HDF5Dataset,
    ImageFolder,
    ParquetDataset,
    SafetensorsDataset,
    TarDataset,
    TarStream,
    TarWriter,
    TFRecordDataset,
    TFRecordWriter,
    ZarrDataset,
)
from shmload.formats.arrays import npy_place
from shmload.growing import SampleCache
from shmload.remote import ObjectStream, RemoteDataset
from shmload.tools.inspect import describe
from shmload.tools.pack_source import dataset_of

HIDDEN = (".ipynb_checkpoints", "_temporary/0", "__MACOSX", "_delta_log", "year=2024/.spark-staging")
ABOUT = ("README.md", "LICENSE", ".gitattributes", "dataset_info.json", "state.json", "_SUCCESS", "_stats.json", "part.crc")


def write_shard(path: Path) -> Path:
    """Writes a shard of two samples in the layout of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text('{"n": 1}\n{"n": 2}\n')
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"n": [1, 2]}), path)
    elif path.suffix == ".tar":
        with TarWriter(path) as tar:
            for number in (1, 2):
                tar.write({"__key__": str(number), "cls": number})
    else:
        with TFRecordWriter(path) as records:
            for number in (1, 2):
                records.write({"n": number})
    return path


def add_hidden_files(folder: Path, of: Path) -> None:
    """Adds files that other programs leave beside data."""
    for hidden in HIDDEN:
        (folder / hidden).mkdir(parents=True)
        shutil.copy(of, folder / hidden / f"x-checkpoint{of.suffix}")
    shutil.copy(of, folder / f"._{of.name}")
    for name in ABOUT:
        (folder / name).write_text("about the data")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.tar", "a.tfrecord"])
@pytest.mark.parametrize("is_asked", [False, True])
def test_hidden_files_add_no_samples_in_any_layout(
    name: str, is_asked: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_hidden_files(tmp_path, write_shard(tmp_path / name))
    write_shard(tmp_path / "year=2024" / name)
    layout = {"layout": name.rpartition(".")[2]} if is_asked else {}
    with caplog.at_level(logging.DEBUG, "shmload"):
        dataset = RemoteDataset.from_urls(str(tmp_path), shuffle=False, **layout)
    assert len(dataset) == 4
    assert len(list(dataset)) == len(dataset.indexed()) == 4
    assert f"{len(HIDDEN) + 1 + len(ABOUT)} objects are not shards and are ignored" in caplog.text


def test_hidden_file_is_read_if_it_or_its_folder_is_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "_temporary" / "_a.jsonl")
    write_shard(tmp_path / "_temporary" / "b.jsonl")
    assert len(RemoteDataset.from_urls(str(tmp_path / "_temporary"))) == 2  # only names below the given folder count
    assert len(RemoteDataset.from_urls(str(tmp_path / "_temporary" / "_a.jsonl"))) == 2


def test_folder_with_only_hidden_files_is_an_error(tmp_path: Path) -> None:
    write_shard(tmp_path / "_temporary" / "0" / "a.jsonl")
    with pytest.raises(ObjectMissing, match="only 1 other objects, of which 1 are ignored because a name in their path begins"):
        RemoteDataset.from_urls(str(tmp_path))
    with pytest.raises(ObjectMissing, match=r"contains no samples: 1 objects are ignored .* such as '_temporary/0/a.jsonl'"):
        list(ObjectStream(str(tmp_path)))
    with pytest.raises(FileNotFoundError, match=r"contains no Parquet file .*only 1 others, such as '_temporary/0/a.jsonl'"):
        ParquetDataset(tmp_path)


def test_given_layout_reads_only_shards_of_that_layout(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00000-of-00001.parquet")
    for name in ("README.md", "preview.png", "notes.bin"):
        (tmp_path / name).touch()
    assert len(RemoteDataset.from_urls(str(tmp_path))) == 2
    assert len(RemoteDataset.from_urls(str(tmp_path), layout="parquet")) == 2


def test_shard_names_of_tensorflow_datasets_are_recognized(tmp_path: Path) -> None:
    write_shard(tmp_path / "mnist-train.tfrecord-00000-of-00002")
    write_shard(tmp_path / "mnist-train.tfrecord-00001-of-00002")
    for name in ("dataset_info.json", "features.json"):
        (tmp_path / name).write_text("{}")
    assert len(RemoteDataset.from_urls(str(tmp_path))) == len(TFRecordDataset(tmp_path)) == 4


def test_images_beside_a_table_that_describes_them_are_reported(tmp_path: Path) -> None:
    (tmp_path / "0.png").touch()
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.png"}\n')
    with pytest.raises(ValueError, match="contains 1 of files, 1 of jsonl: choose the dataset"):
        RemoteDataset.from_urls(str(tmp_path))


def test_object_stream_skips_hidden_objects(tmp_path: Path) -> None:
    for name in ("a.jpg", ".ipynb_checkpoints/a.jpg", "__MACOSX/._a.jpg", "b/c.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\xff\xd8")
    stream = ObjectStream(str(tmp_path))
    assert [sample["__key__"] for sample in stream] == ["a", "b/c"]
    assert [sample["__key__"] for sample in stream.starting_at(1)] == ["b/c"]


def photos(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / name)


def test_pack_skips_hidden_images(tmp_path: Path) -> None:
    photos(tmp_path / "c", "cat/0.png", "dog/0.png", "cat/.ipynb_checkpoints/0.png", ".ipynb_checkpoints/1.png", "__MACOSX/2.png")
    assert [sample["label"] for sample in dataset_of(str(tmp_path / "c"))] == [0, 1]
    photos(tmp_path / "flat", "0.png", ".ipynb_checkpoints/0.png", "_1.png")
    done = CliRunner().invoke(app, ["pack", str(tmp_path / "flat"), str(tmp_path / "out"), "--workers", "0"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert len(RemoteDataset.from_urls(str(tmp_path / "out"))) == 1
    assert describe(tmp_path / "c").num_samples == 2


def test_pack_refuses_images_beside_folders_of_classes(tmp_path: Path) -> None:
    photos(tmp_path / "in", *(f"{n}.png" for n in range(4)), "sub/0.png", "sub/1.png")
    assert len(ImageFolder(tmp_path / "in")) == 2  # as in torchvision
    done = CliRunner().invoke(app, ["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "0"])
    assert done.exit_code != 0
    words = r"4 images \(0\.png, 1\.png, 2\.png, \.\.\.\) beside the folders of classes \(sub\) would be left out"
    with pytest.raises(ValueError, match=words):
        dataset_of(str(tmp_path / "in"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", ["", "cat/", "cat/old/"])
def test_pack_refuses_pictures_of_endings_that_it_would_leave_out(folder: str, tmp_path: Path) -> None:
    photos(tmp_path, f"{folder}0.png")
    for name in ("1.gif", "2.GIF", "3.mp4", "notes.txt", ".4.gif"):
        (tmp_path / folder / name).touch()
    with pytest.raises(ValueError, match=r"3 files would be left out, .* from a folder: 2 \.gif, 1 \.mp4\. Convert them to one of"):
        dataset_of(str(tmp_path))


def test_pack_accepts_other_files_beside_folders_of_classes(tmp_path: Path) -> None:
    photos(tmp_path, "cat/0.png", "dog/0.png", ".0.png")
    (tmp_path / "README.md").touch()
    assert len(dataset_of(str(tmp_path))) == 2


def test_image_folder_counts_hidden_folders_as_torchvision_does(tmp_path: Path) -> None:
    photos(tmp_path, "cat/0.png", "_dog/0.png", ".ipynb_checkpoints/0.png")
    assert ImageFolder(tmp_path).classes == [".ipynb_checkpoints", "_dog", "cat"]


def test_growing_cache_skips_hidden_files(tmp_path: Path) -> None:
    with SampleCache(tmp_path / "cache", 1 << 20) as cache:
        write_shard(cache.path / "a.tfrecord")
        write_shard(cache.path / "_b.tfrecord")
        assert [file.name for file in cache.files()] == ["a.tfrecord"]


READERS: dict[str, Any] = {
    "a.parquet": partial(ParquetDataset, columns=["n"]),
    "a.tfrecord": TFRecordDataset,
    "a.tar": TarDataset,
    "b.tar": TarStream,
}


@pytest.mark.parametrize("name", READERS)
def test_local_readers_read_the_files_of_a_folder(name: str, tmp_path: Path) -> None:
    add_hidden_files(tmp_path, write_shard(tmp_path / name))
    write_shard(tmp_path / "year=2024" / name)
    read = READERS[name]
    assert sum(1 for _ in iter_of(read(tmp_path))) == 4
    if read is not TarDataset and read is not TarStream:
        assert len(read(f"{tmp_path}/**/*{Path(name).suffix}")) == 4
        assert len(read(f"{tmp_path}/**/_temporary/**/*{Path(name).suffix}")) == 2  # the pattern names the hidden folder
        assert len(read(f"{tmp_path}/year=*")) == 2


def iter_of(dataset: Any) -> Any:
    return (dataset[number] for number in range(len(dataset))) if hasattr(dataset, "__len__") else dataset


def test_folder_of_files_without_suffixes_is_read(tmp_path: Path) -> None:
    for number in range(2):
        write_shard(tmp_path / "x.parquet").rename(tmp_path / f"part-0000{number}")
    (tmp_path / "README.md").touch()
    (tmp_path / "LICENSE").touch()
    assert len(ParquetDataset(tmp_path)) == 4


def test_reader_of_one_file_refuses_a_folder_and_names_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(8))
    for read in (HDF5Dataset, SafetensorsDataset, npy_place):
        with pytest.raises(
            ValueError, match=r"Dataset reads one file, and .* is a folder \(it contains a\.bin\): give the path of a file"
        ):
            read(tmp_path)
    pytest.importorskip("zarr")
    with pytest.raises(
        ValueError, match=r"the folder is not a Zarr store, because it has none of zarr\.json, .*give the path of a store"
    ):
        len(ZarrDataset(tmp_path))
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / "zarr.json").touch()
    with pytest.raises(ValueError, match=r"it contains the stores x\.zarr: give the path of one"):
        len(ZarrDataset(tmp_path))
