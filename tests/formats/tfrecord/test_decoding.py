"""Encoded fields: images in TFRecord files are decoded as those in folders, and custom decoders."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shmload
from shmload import SampleError, ShardCorrupt, ShmLoader
from shmload.formats import CenterCrop, ImageDecoder, ImageFolder, RandomResizedCrop, Resize, TFRecordDataset, TFRecordWriter

PHOTOS = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))[:4]
CROP = ImageDecoder(RandomResizedCrop(32), flip=0.5)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Returns paths of small photographs, one of them a PNG."""
    found = []
    for number, photo in enumerate(PHOTOS):
        path = tmp_path / f"{number}.{'png' if number == 2 else 'jpg'}"
        with Image.open(photo) as opened:
            opened.crop((50, 40, 150 + 10 * number, 130)).save(path)
        found.append(path)
    return found


@pytest.fixture
def shard(files: list[Path], tmp_path: Path) -> Path:
    """Writes the files' bytes and numbers as Examples."""
    path = tmp_path / "images.tfrecord"
    with TFRecordWriter(path) as writer:
        for label, file in enumerate(files):
            writer.write({"image": file.read_bytes(), "label": label})
    return path


def images_of(shard: Path, image: ImageDecoder, **options: Any) -> TFRecordDataset:
    return TFRecordDataset(shard, {"image": image.spec, "label": "int64"}, decode={"image": image}, **options)


@pytest.mark.parametrize("image", [ImageDecoder(CenterCrop(32)), ImageDecoder(Resize(20), layout="HWC")])
def test_image_of_a_record_equals_that_of_the_same_file_in_a_folder(files, shard, image):
    records, folder = images_of(shard, image), ImageFolder(files, image, labels=range(len(files)))
    for number in range(len(files)):
        np.testing.assert_equal(dict(records[number]), dict(folder[number]))
    assert list(records[0]) == ["image", "label"]


@pytest.mark.slow(reason="decodes the images with two loaders, also in workers")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_crops_equal_those_of_a_folder(files, shard, num_workers):
    batches = []
    for dataset in (images_of(shard, CROP), ImageFolder(files, CROP, labels=range(len(files)))):
        with ShmLoader(dataset, batch_size=2, shuffle=True, seed=3, num_workers=num_workers) as loader:
            batches.append([{name: value.numpy().copy() for name, value in batch.items()} for batch in loader])
    np.testing.assert_equal(*batches)


@pytest.mark.slow(reason="starts a worker for each of two loaders")
def test_images_of_different_shapes_are_ragged_fields(files, shard):
    image = ImageDecoder(Resize(20))
    batches = []
    for dataset in (images_of(shard, image), ImageFolder(files, image, labels=range(len(files)))):
        with ShmLoader(dataset, batch_size=4, seed=0, num_workers=1, ragged="list") as loader:
            (batch,) = loader
            batches.append([row.numpy().copy() for row in batch["image"]])
    np.testing.assert_equal(*batches)


def test_raw_records_can_be_images(files, tmp_path):
    with TFRecordWriter(tmp_path / "raw.tfrecord") as writer:
        for file in files:
            writer.write(file.read_bytes())
    image = ImageDecoder(CenterCrop(16))
    records = TFRecordDataset(tmp_path / "raw.tfrecord", {"x": image.spec}, records="raw", decode={"x": image})
    np.testing.assert_equal(records[-1]["x"], image(files[-1].read_bytes()))


def test_error_for_a_bad_image_names_file_record_and_offset(files, tmp_path):
    path = tmp_path / "bad.tfrecord"
    with TFRecordWriter(path, index=True) as writer:
        writer.write({"image": files[0].read_bytes(), "label": 0})
        writer.write({"image": files[1].read_bytes()[:300], "label": 1})
    start = 12 + int.from_bytes(path.read_bytes()[:8], "little") + 4
    records = images_of(path, ImageDecoder(CenterCrop(16)))
    assert records[0]["label"] == 0
    with pytest.raises(ShardCorrupt, match=f"bad.tfrecord: record 1, which starts at byte {start}: field 'image': a .*JPEG"):
        records[1]
    with (
        ShmLoader(records, batch_size=2, num_workers=0) as loader,
        pytest.raises(ShardCorrupt, match=f"record 1, which starts at byte {start}"),
    ):
        next(iter(loader))


def test_default_of_a_missing_image_is_decoded(files, tmp_path):
    with TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        writer.write({"label": 1})
    image, gray = ImageDecoder(CenterCrop(16)), io.BytesIO()
    with pytest.raises(SampleError, match="field 'image' is missing"):
        images_of(tmp_path / "a.tfrecord", image)[0]
    Image.new("RGB", (16, 16), (7, 7, 7)).save(gray, "PNG")
    records = images_of(tmp_path / "a.tfrecord", image, defaults={"image": gray.getvalue()})
    assert (records[0]["image"] == 7).all()


def numbers(data: bytes) -> Any:
    """Decodes two-byte integers and drop the first."""
    return np.frombuffer(data, "<i2")[1:]


def test_any_function_of_bytes_can_decode(tmp_path):
    with TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        for count in (3, 4):
            writer.write({"x": np.arange(count, dtype="<i2").tobytes(), "n": np.int32(count).tobytes()})
    schema = {"x": ("int16", (None,)), "n": "int32"}
    decode = {"x": numbers, "n": lambda data: np.frombuffer(data, "<i4")[0]}
    records = TFRecordDataset(tmp_path / "a.tfrecord", schema, decode=decode)
    assert records[0]["x"].tolist() == [1, 2]
    with ShmLoader(records, batch_size=2, num_workers=0, ragged="list") as loader:
        (batch,) = loader
    assert [row.tolist() for row in batch["x"]] == [[1, 2], [1, 2, 3]]
    assert batch["n"].tolist() == [3, 4]
    fixed = TFRecordDataset(tmp_path / "a.tfrecord", {"x": ("int16", (2,))}, decode={"x": numbers})
    assert pickle.loads(pickle.dumps(fixed))[0]["x"].tolist() == [1, 2]
    with pytest.raises(ShardCorrupt, match=r"int16 of shape \(2,\), and its decoder made int16 of shape \(3,\)"):
        fixed[1]


def test_dataset_without_decoders_reads_whole_batches(shard):
    assert TFRecordDataset(shard, {"label": "int64"}).read_batch_into is not None
    assert images_of(shard, CROP).read_batch_into is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"schema": {"label": "int64"}, "decode": {"image": CROP}},
            r"decode names \['image'\], but the schema has only \['label'\]",
        ),
        ({"schema": {"image": ("uint8", (3, 9, 9))}, "decode": {"image": CROP}}, r"give \{'image': decoder.spec\}"),
        ({"schema": {"x": str}, "decode": {"x": numbers}}, "decoders make arrays of numpy's types"),
        ({"schema": {"x": "bfloat16"}, "decode": {"x": numbers}}, "decoders make arrays of numpy's types"),
        (
            {"schema": {"x": "int16"}, "decode": {"x": numbers}, "defaults": {"x": 3}},
            r"defaults\['x'\] needs the bytes that its decoder takes; got int",
        ),
    ],
)
def test_error_explains_why_a_decoder_is_invalid(tmp_path, options, words):
    (tmp_path / "a.tfrecord").touch()
    with pytest.raises(ValueError, match=words):
        TFRecordDataset(tmp_path / "a.tfrecord", **options)


def test_missing_library_is_not_reported_as_damage(shard):
    def lacking(data: bytes) -> Any:
        raise ImportError("no such library")

    records = TFRecordDataset(shard, {"image": "uint8"}, decode={"image": lacking})
    with pytest.raises(ImportError, match="no such library"):
        records[0]
