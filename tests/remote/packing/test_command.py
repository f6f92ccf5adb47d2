"""`shmload pack`, and `shmload inspect` of its output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import shmload
from shmload.cli import app
from shmload.cli.pack_command import progress_on
from shmload.cli.terminal import progress_bar
from shmload.formats import TarWriter, TFRecordWriter
from shmload.remote import RemoteDataset
from shmload.remote.manifest import Manifest
from shmload.remote.packing.shard_packing import PackProgress
from shmload.storage.local_store import LocalStore
from shmload.tools.byte_size import size_text
from tests.remote.packing.packing_kit import names_in, names_of, samples_in

PHOTOS = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))
Command = Callable[..., Any]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Returns a function that runs `shmload pack SOURCE FOLDER` in this process."""

    def run(source: object, *options: object, out: str = "out") -> Any:
        return CliRunner().invoke(app, ["pack", str(source), str(tmp_path / out), "--workers", "0", *map(str, options)])

    monkeypatch.chdir(tmp_path)
    return run


def manifest_in(folder: Path) -> Manifest:
    return Manifest.parse((folder / "manifest.json").read_bytes())


def packed_by(done: Any, folder: Path) -> list[dict[str, Any]]:
    assert (done.exit_code, done.stderr) == (0, "")
    found = samples_in(folder, manifest_in(folder), decode=True)
    return sorted(found, key=lambda sample: sample["__key__"].rpartition("-")[2])


def test_folder_of_classes_is_packed(command: Command, tmp_path: Path) -> None:
    for number, name in enumerate(("cat/a.jpg", "cat/b.jpg", "dog/a.jpg")):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(PHOTOS[number].read_bytes())
    done = command(tmp_path / "in", "--maxcount", 2)
    found = packed_by(done, tmp_path / "out")
    assert [(0, PHOTOS[0].read_bytes()), (0, PHOTOS[1].read_bytes()), (1, PHOTOS[2].read_bytes())] == [
        (sample["cls"], sample["jpg"]) for sample in found
    ]
    first, keys, second = done.stdout.splitlines()
    assert keys.startswith("keys are the numbers of the images in the order of their names, from 00000000 on; names are not kept")
    assert first.startswith("3 samples in 2 shards, ")
    assert first.endswith(" s: cls, jpg")
    assert f"read it by shmload.remote.RemoteDataset.from_urls({str(tmp_path / 'out')!r})" == second


def test_command_says_which_dataset_it_replaced(command: Command, tmp_path: Path) -> None:
    first = command(PHOTOS[0].parent).stdout
    assert "replaced" not in first
    assert command(PHOTOS[0].parent).stdout.count("replaced") == 0  # the same dataset
    generation = manifest_in(tmp_path / "out").generation
    refused = command(PHOTOS[0].parent, "--seed", 1)
    assert refused.exit_code == 2
    words = (
        f"contains another dataset, of 8 samples (generation {generation}), or this one packed with other options. Give another "
    )
    assert f"{words}DEST; or --append, which keeps it; or --replace, which removes it" in " ".join(refused.stderr.split())
    assert manifest_in(tmp_path / "out").generation == generation
    done = command(PHOTOS[0].parent, "--seed", 1, "--replace")
    assert (
        f"replaced the dataset of 8 samples that was in {tmp_path / 'out'}, and removed its shards (generation {generation})"
        in done.stdout
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [manifest_in(tmp_path / "out").generation, "manifest.json"]
    )
    assert "replaced" not in command(PHOTOS[0].parent, "--seed", 2, "--append").stdout


def test_folder_of_images_is_packed(command: Command, tmp_path: Path) -> None:
    found = packed_by(command(PHOTOS[0].parent), tmp_path / "out")
    assert [path.read_bytes() for path in PHOTOS] == [sample["jpg"] for sample in found]


def test_tfrecord_files_are_packed(command: Command, tmp_path: Path) -> None:
    for part in range(2):
        with TFRecordWriter(tmp_path / f"{part}.tfrecord") as writer:
            for number in range(3):
                image = {"image/encoded": PHOTOS[number].read_bytes(), "image/class/label": 3 * part + number}
                writer.write({**image, "score": np.float32([0.5, part]), "text": b"caf\xc3\xa9"})
    found = packed_by(command(tmp_path / "*.tfrecord"), tmp_path / "out")
    assert list(range(6)) == [sample["image_class_label.cls"] for sample in found]
    assert PHOTOS[2].read_bytes() == found[5]["image_encoded.jpg"]
    assert found[4]["score.npy"].tolist() == [0.5, 1.0]
    assert found[0]["text"] == "café"


def test_records_that_are_not_examples_are_packed_as_bytes(command: Command, tmp_path: Path) -> None:
    with TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        writer.write(b"\xff\xff")
    assert packed_by(command(tmp_path / "a.tfrecord"), tmp_path / "out") == [{"__key__": "00000000", "bin": b"\xff\xff"}]


def test_tar_shards_are_resharded_with_unique_keys(command: Command, tmp_path: Path) -> None:
    for part in range(2):
        with TarWriter(tmp_path / f"{part}.tar") as writer:
            for number in range(3):
                writer.write({"__key__": f"d/{number}", "cls": 3 * part + number, "seg.png": b"not looked at", "odd": b"x"})
    found = packed_by(command(tmp_path / "{0..1}.tar", "--maxcount", 4), tmp_path / "out")
    assert [f"d/{number % 3}-{number:08d}" for number in range(6)] == [sample["__key__"] for sample in found]
    assert list(range(6)) == [sample["cls"] for sample in found]
    assert {"__key__", "cls", "seg.png", "odd.bin"} == set(found[0])


def test_object_of_a_module_is_packed(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packed_by_name.py").write_text("def make():\n    return [(b'x', n) for n in range(4)]\n\nready = make()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("make", "ready"):
        assert [s["cls"] for s in packed_by(command(f"packed_by_name:{name}", out=name), tmp_path / name)] == [0, 1, 2, 3]


def test_existing_shards_are_reported_in_one_line(command: Command, tmp_path: Path) -> None:
    command(PHOTOS[0].parent, "--maxcount", 3)
    assert command(PHOTOS[0].parent, "--maxcount", 3).stdout.startswith("8 samples in 3 shards (3 already there), ")
    assert names_of(manifest_in(tmp_path / "out")) == names_in(tmp_path / "out")


def test_restart_markers_do_not_change_pixels(command: Command, tmp_path: Path) -> None:
    from shmload.formats import ImageDecoder

    decode = ImageDecoder()
    for sample, path in zip(packed_by(command(PHOTOS[0].parent, "--restart-markers"), tmp_path / "out"), PHOTOS, strict=True):
        assert sample["jpg"] != path.read_bytes()
        np.testing.assert_array_equal(decode(path.read_bytes()), decode(sample["jpg"]))


BROKEN = """
dataset = [(b'x', object())] * 3

class Missing:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return (b'x', {0: 0}[index]) if index == 0 else {}['one']

def torn():
    yield b'x', 0
    raise KeyError('torn')

def caught():
    yield b'x', 0
    raise RuntimeError('Caught in a loop')

def silent():
    yield b'x', 0
    raise ValueError
"""
REFUSED = [
    (("nowhere",), 2, "no sample file has the name 'nowhere', or matches it as a pattern"),
    (("no_such_module:name",), 2, "SOURCE: cannot import 'no_such_module'"),
    (
        ("empty",),
        2,
        "contains no image (.jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp) and no folder, which would be a class. For files",
    ),
    (("digits",), 2, "digits: each folder in it is a class, and 6 of 7 (0, 1, 2, 3, 4, ...) contain no image (.jpg, "),
    (("digits",), 2, ".webp). For files that are no images, --in-order packs each as a sample, and package.module:function names"),
    (
        ("a.dat",),
        2,
        "a.dat is npy: folders of images, TFRecord, Parquet, JSON lines, .npy and tar files are packed as they are. Write a",
    ),
    (("good", "--maxcount", 0), 2, "maxsize is at least 10240 bytes, maxcount 1 and workers 0; got 100000000, 0 and 0"),
    (("good", "--maxsize", "inf"), 2, "--maxsize: needs a size such as 100MB, 64MiB or 2e8 (bytes), got 'inf'"),
    (("broken:Missing",), 2, "KeyError: 'one' (sample 1 of the dataset)"),
    (("broken:torn",), 2, "KeyError: 'torn' (reading sample 1 of the iterable)"),
    (("broken:caught",), 2, "Caught in a loop (reading sample 1 of the iterable)"),
    (("broken:silent",), 2, "ValueError (reading sample 1 of the iterable)"),
    (
        ("broken:dataset",),
        2,
        "field 'label': no format stores values of type object: return an image, array, number, str, bytes, or a list or dict of these (sample 0 of the dataset)",
    ),
]


@pytest.mark.parametrize(("arguments", "status", "text"), REFUSED)
def test_unpackable_source_is_reported_in_one_line(
    arguments: Any, status: int, text: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    for number in range(7):
        (tmp_path / "digits" / str(number)).mkdir(parents=True)
    (tmp_path / "digits" / "6" / "a.jpg").write_bytes(b"")
    (tmp_path / "good").symlink_to(PHOTOS[0].parent)
    with open(tmp_path / "a.dat", "wb") as file:
        np.save(file, np.ones(2))
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = command(*arguments)
    assert (status, "") == (done.exit_code, done.stdout)
    assert done.stderr.startswith("shmload pack: ")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow(reason="starts the packing's workers")
def test_worker_error_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_later.py").write_text("dataset = [(b'x' * 100_000, object() if n == 33 else n) for n in range(90)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(app, ["pack", "broken_later:dataset", str(tmp_path / "out")])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("shmload pack: TypeError: field 'label': no format stores values of type object: ")
    assert done.stderr.endswith("; sample 33 of the dataset\n")


def test_failing_store_exits_with_status_1(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text("a file where the folder should be")
    done = command(PHOTOS[0].parent)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("shmload pack: ")
    assert done.stderr.count("\n") == 1


def test_interrupt_prints_how_to_continue(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "put_file", interrupted)
    done = command(PHOTOS[0].parent)
    assert (done.exit_code, done.stderr) == (130, "shmload pack: interrupted; run the same command again to continue\n")
    monkeypatch.undo()
    assert len(packed_by(command(PHOTOS[0].parent), tmp_path / "out")) == 8


def test_progress_bar_shows_samples_shards_and_bytes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar(True) as bar:
        progress_on(bar)(PackProgress(100, 40, 5 << 20, 3, 1))
    drawn = capsys.readouterr().err
    assert "40/100" in drawn
    assert "3 shards, 5.0 MiB in the store" in drawn


def test_inspect_describes_a_manifest(command: Command, tmp_path: Path) -> None:
    command(PHOTOS[0].parent, "--maxcount", 3, "--seed", 4)
    manifest = manifest_in(tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "out" / "manifest.json"):
        done = CliRunner().invoke(app, ["inspect", str(path), "--samples", "1"])
        assert (done.exit_code, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines[0].startswith(f"{tmp_path / 'out' / 'manifest.json'}: packed shards, 8 samples, ")
        assert lines[1] == "  jpg  bytes"
        largest = max(shard.nbytes for shard in manifest.shards)
        assert f"  3 shards of at most {size_text(largest)}, each with its index beside it" in lines
        assert f"  generation {manifest.generation}, packed in the order of seed 4" in lines
        assert lines[-1].startswith("  0 __key__: ")


def test_inspect_explains_an_invalid_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": "shmload-shards", "version": 9}')
    done = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith("manifest.json: version: 1 is known here, got 9; a newer shmload may read it\n")


def test_compression_and_key_options_are_used(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(32))
    (tmp_path / "key").write_text(key.hex() + "\n")
    monkeypatch.setenv("SCANS_KEY", key.hex())
    done = [
        command(PHOTOS[0].parent, "--compress", "shards", "--compression-level", 1, *options, out=options[0][2:])
        for options in (("--key-file", tmp_path / "key"), ("--key-variable", "SCANS_KEY"))
    ]
    assert [each.exit_code for each in done] == [0, 0]
    first, second = (manifest_in(tmp_path / name) for name in ("key-file", "key-variable"))
    assert first == second
    assert first.shards[0].packed is not None
    read = RemoteDataset.from_urls(str(tmp_path / "key-file"), key=key)
    assert sorted(path.read_bytes() for path in PHOTOS) == sorted(sample["jpg"] for sample in read)
    for text in (str(first), *(each.output for each in done)):
        assert key.hex() not in text


def test_invalid_key_is_reported(command: Command, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hush")
    done = command(PHOTOS[0].parent, "--key-file", tmp_path / "key")
    assert (done.exit_code, "contains no key: 64 hexadecimal digits are needed" in done.stderr, "hush" in done.stderr) == (
        2,
        True,
        False,
    )
    both = command(PHOTOS[0].parent, "--key-file", tmp_path / "key", "--key-variable", "X")
    assert (both.exit_code, "cannot be combined" in both.stderr) == (2, True)
