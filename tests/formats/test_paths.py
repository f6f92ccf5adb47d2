"""Path arguments of all readers and writers of files."""

from __future__ import annotations

import errno
import os
import pickle
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shmload.errors import ShardCorrupt
from shmload.formats import (
    ArrayDataset,
    HDF5Dataset,
    ImageFolder,
    ParquetDataset,
    SafetensorsDataset,
    TarDataset,
    TarStream,
    TarWriter,
    TFRecordDataset,
    TFRecordWriter,
    TokenDataset,
    ZarrDataset,
)
from shmload.formats.head import head_of
from shmload.formats.paths import expanded
from shmload.formats.plain_files import PlainFiles
from shmload.remote import RemoteDataset
from shmload.storage.folder_walk import walk_following_links

URLS = ["s3://bucket/folder/a-{0..3}.tar", "https://host/a.bin", "gs://bucket/a.npy", "file:///data/a.npy"]
READERS: list[Any] = [
    ArrayDataset,
    HDF5Dataset,
    ImageFolder,
    lambda url: ImageFolder([url]),
    ParquetDataset,
    SafetensorsDataset,
    TarDataset,
    TarStream,
    TFRecordDataset,
    lambda url: TFRecordDataset([url]),
    lambda url: TokenDataset(url, 5, dtype="uint16"),
    lambda url: TokenDataset([1, 2], 1, document_index=f"{url}.idx"),
    ZarrDataset,
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("reader", READERS)
def test_error_for_a_url_in_a_local_reader_names_a_remedy(reader: Any, url: str) -> None:
    with pytest.raises(ValueError, match=r"reads files of this machine; got the URL '.*://.*: copy .*RemoteDataset"):
        reader(url)


OF_FILES: list[Any] = [
    HDF5Dataset,
    ImageFolder,
    ParquetDataset,
    SafetensorsDataset,
    TarDataset,
    TarStream,
    TFRecordDataset,
    ZarrDataset,
    RemoteDataset.from_urls,
]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"/data/a", r"takes a path as a str or an os.PathLike; got b'/data/a': os.fsdecode\(\) makes a str of bytes"),
        (None, "takes a path as a str or an os.PathLike; got None"),
        (5, "takes a path as a str or an os.PathLike; got 5"),
    ],
    ids=str,
)
@pytest.mark.parametrize("reader", OF_FILES)
def test_error_for_an_argument_that_is_no_path_says_what_a_path_is(reader: Any, given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        reader(given)


@pytest.mark.parametrize("reader", [HDF5Dataset, SafetensorsDataset, ZarrDataset])
def test_error_for_several_files_in_a_reader_of_one_names_a_remedy(reader: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"got \['a', 'b'\]: .* several are joined by torch.utils.data.ConcatDataset"):
        reader(["a", "b"])
    if reader is not ZarrDataset:
        with pytest.raises(FileNotFoundError, match=r"reads one file, and there is no file with the name '.*\*': .*ConcatDataset"):
            reader(f"{tmp_path}/*")


def test_tokens_are_read_through_any_path_object(tmp_path: Path) -> None:
    np.arange(20, dtype="<u2").tofile(tmp_path / "a.bin")

    class Named:
        def __fspath__(self) -> str:
            return str(tmp_path / "a.bin")

    assert TokenDataset(Named(), 10, stride=10, dtype="uint16")[1]["tokens"].tolist() == list(range(10, 20))


def test_files_are_found_once_although_links_lead_to_folders_above(tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 4))
    for name in ("cat", "dog"):
        (tmp_path / "images" / name / "more").mkdir(parents=True)
        image.save(tmp_path / "images" / name / "a.png")
    (tmp_path / "images/cat/more/up").symlink_to(tmp_path / "images/cat")
    (tmp_path / "images/dog/more/cats").symlink_to(tmp_path / "images/cat")
    found = ImageFolder(tmp_path / "images")
    assert [found[index]["label"] for index in range(len(found))] == [0, 1, 1]  # a link to another folder is followed
    (tmp_path / "records").mkdir()
    with TFRecordWriter(tmp_path / "records/a.tfrecord") as writer:
        writer.write(b"one")
    (tmp_path / "records/self").symlink_to(".")
    assert len(TFRecordDataset(tmp_path / "records")) == 1


def test_relative_path_refers_to_the_working_directory_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, number in ((tmp_path, 1), (tmp_path / "elsewhere", 2)):
        folder.mkdir(exist_ok=True)
        np.save(folder / "a.npy", np.full(4, number))
        with TarWriter(folder / "a.tar") as writer:
            writer.write({"__key__": "k", "cls": number})
        (folder / "images/class").mkdir(parents=True)
        Image.new("L", (1, 1), number).save(folder / "images/class/a.png")
    monkeypatch.chdir(tmp_path)
    images = ImageFolder("images"), ImageFolder(["images/class/a.png"])
    made = ArrayDataset("a.npy"), TokenDataset("a.npy", 4), TarDataset("a.tar"), TarStream("a.{tar,tar}"), *images
    monkeypatch.chdir("elsewhere")
    arrays, tokens, samples, stream, *images_again = pickle.loads(pickle.dumps(made))
    assert (int(arrays[0]), tokens[0]["tokens"].tolist()) == (1, [1] * 4)
    assert (samples[0]["cls"], [each["cls"] for each in stream]) == (1, [1, 1])
    assert [each[0]["image"].flatten().tolist() for each in images_again] == [[1, 1, 1]] * 2


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a link to a pipe"])
def test_writer_does_not_replace_folders_and_pipes(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.mkdir() if kind == "a folder" else os.mkfifo(path)
    if kind == "a link to a pipe":
        path.rename(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    before = path.lstat()
    with pytest.raises(ValueError, match="there is not a file, so it is not replaced"), TarWriter(path) as tar:
        tar.write({"__key__": "a", "txt": "b"})
    with pytest.raises(ValueError, match="there is not a file"):
        TFRecordWriter(path)
    assert path.lstat() == before
    assert {each.name for each in tmp_path.iterdir()} <= {"there", "pipe"}


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with files of several formats, and more in its folder `class/private`, which cannot be listed."""
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if os.fspath(path).endswith("private"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    for place in ("class", "class/private"):
        (tmp_path / place).mkdir()
        Image.new("RGB", (2, 2)).save(tmp_path / place / "a.png")
        for ending in ("parquet", "tar", "tfrecord"):
            (tmp_path / place / f"a.{ending}").touch()
    monkeypatch.setattr(os, "scandir", refusing)  # root may list every folder
    return tmp_path


@pytest.mark.parametrize("reader", [ImageFolder, ParquetDataset, TarDataset, TFRecordDataset])
def test_folder_that_cannot_be_listed_is_an_error(reader: Any, private: Path) -> None:
    with pytest.raises(PermissionError, match="private"):
        reader(private)


@pytest.mark.parametrize("pattern", ["**", "**/*.tfrecord", "**/class/**/a.tfrecord", "*/*/*.tfrecord", "class/p*/*", "class/p*"])
def test_folder_of_a_pattern_that_cannot_be_listed_is_an_error(pattern: str, private: Path) -> None:
    with pytest.raises(PermissionError, match="private"):
        TFRecordDataset(f"{private}/{pattern}")


def test_description_of_a_folder_that_cannot_be_listed_is_an_error(private: Path) -> None:
    with pytest.raises(PermissionError, match="private"):
        PlainFiles().describe(head_of(private), 1)
    with pytest.raises(PermissionError, match="private"):
        head_of(private).nbytes_in_all()


PATTERNS = ("*", "*/*", "**", "**/*", "**/b", "*/**/*", "**/**/b", "a?/b*", "[ab]*/*", ".*/*", "**/.h/*", "a1/*", "x*")


def test_patterns_match_what_glob_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a1/b", "a1/c/b", "a2/.h/b", "a2/b[1]", ".h/b", "b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("a1")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    for pattern in (*PATTERNS, *(f"{tmp_path}/{each}" for each in PATTERNS), "a2/b[[]1]", "./*", "a1/../*/b", "*/"):
        wanted = sorted({os.path.abspath(each) for each in glob(pattern, recursive=True)})
        assert (expanded(pattern, "any") if wanted else []) == wanted, pattern


def test_every_reader_names_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "k", "cls": 1})
    for name in ("b.tar", ".#a.tar", "README"):
        (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"b\.tar"):
        len(TarDataset(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"b\.tar"):
        list(TarStream(tmp_path))
    dataset = RemoteDataset.from_urls(str(tmp_path))
    with pytest.raises(ShardCorrupt, match=r"b\.tar: it is a link to nowhere, which does not exist"):
        len(dataset)
    (tmp_path / "b.tar").unlink()
    assert len(RemoteDataset.from_urls(str(tmp_path))) == len(TarDataset(tmp_path)) == 1


def test_folder_removed_while_it_is_searched_is_left_out(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    walk = walk_following_links(str(tmp_path))
    assert sorted(next(walk)[1]) == ["a", "b"]
    (tmp_path / "b").rmdir()
    assert list(walk) == [(str(tmp_path / "a"), [], [])]


@pytest.mark.parametrize("pattern", ["", "*", "*/*.tfrecord", "**/*.tfrecord"])
def test_partition_whose_name_begins_with_an_underscore_is_data(pattern: str, tmp_path: Path) -> None:
    for folder in ("year=2023", "_year=2024", "_temporary"):
        (tmp_path / folder).mkdir()
        with TFRecordWriter(tmp_path / folder / "x.tfrecord") as writer:
            writer.write(folder.encode())
    dataset = TFRecordDataset(str(tmp_path / pattern) if pattern else tmp_path)
    assert sorted(bytes(sample["bytes"]) for sample in dataset) == [b"_year=2024", b"year=2023"]
