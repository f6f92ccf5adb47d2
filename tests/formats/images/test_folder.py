from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shmload
from shmload import ShardCorrupt, SharedIndex, ShmLoader
from shmload.formats import (
    ImageDecoder,
    ImageFolder,
    RandomResizedCrop,
    Resize,
    TarDataset,
    TarStream,
    TarWriter,
    TFRecordDataset,
    TFRecordWriter,
)
from shmload.formats.images import image_folder as folder_module
from shmload.remote import RemoteDataset

Encode = Callable[..., bytes]
SMALL = ImageDecoder(Resize((12, 10)))


@pytest.fixture
def root(tmp_path: Path, photo: Image.Image, encode: Encode) -> Path:
    """Creates seven images of two classes, one in a subfolder, and a file that is not an image."""
    for number, name in enumerate(("dog/b.png", "cat/2.jpg", "cat/10.JPEG", "cat/a/0.jpg", "dog/A.jpg", "cat/1.jpg", "dog/c.bmp")):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(photo.rotate(5 * number), {"png": "PNG", "bmp": "BMP"}.get(name[-3:], "JPEG")))
    (tmp_path / "images" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "images" / "LICENCE").write_text("beside the classes")
    return tmp_path / "images"


def test_folders_are_read_as_torchvision_reads_them(root: Path) -> None:
    dataset = ImageFolder(root)
    names = ["cat/1.jpg", "cat/10.JPEG", "cat/2.jpg", "cat/a/0.jpg", "dog/A.jpg", "dog/b.png", "dog/c.bmp"]
    assert dataset.classes == ["cat", "dog"]
    assert dataset.class_to_idx == {"cat": 0, "dog": 1}
    assert [(f"{root}/{name}", int(name[0] == "d")) for name in names] == list(dataset.samples)
    assert dataset.targets.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert repr(dataset) == "<ImageFolder of 7 images, 2 classes>"


def test_folder_without_classes_or_images_is_an_error(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty: it needs one subfolder for each class, and has none"):
        ImageFolder(tmp_path / "empty")
    (root / "bird").mkdir()
    (root / "ant").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"images: each folder in it is a class, and 2 of 4 \(ant, bird\) contain no image \(\.jpg"
    ):
        ImageFolder(root)


def test_indices_behave_like_those_of_a_list(root: Path) -> None:
    dataset = ImageFolder(root, SMALL)
    assert np.array_equal(dataset[6]["image"], dataset[-1]["image"])
    assert dataset[-1]["label"] == 1
    for index in (7, -8):
        with pytest.raises(IndexError, match=f"index {index} is out of range: the dataset has 7 samples"):
            dataset[index]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow(reason="starts two workers"))])
def test_batch_equals_its_samples(root: Path, num_workers: int) -> None:
    dataset = ImageFolder(root, SMALL)
    with ShmLoader(dataset, batch_size=4, num_workers=num_workers) as loader:
        found = [{name: values.clone() for name, values in batch.items()} for batch in loader]
    assert torch.equal(torch.cat([b["image"] for b in found]), torch.from_numpy(np.stack([dataset[i]["image"] for i in range(7)])))
    assert dataset.targets.tolist() == torch.cat([b["label"] for b in found]).tolist()


def test_images_of_different_sizes_make_ragged_batches(root: Path) -> None:
    for layout in ("CHW", "HWC"):
        dataset = ImageFolder(root, ImageDecoder(layout=layout))
        with ShmLoader(dataset, batch_size=7) as loader:
            (batch,) = loader
        for index, image in enumerate(batch["image"]):
            assert torch.equal(torch.from_numpy(dataset[index]["image"]), image)


def images_of(dataset: Any, num_workers: int, seed: int, epochs: int = 1) -> list[torch.Tensor]:
    with ShmLoader(dataset, batch_size=3, num_workers=num_workers, seed=seed, shuffle=False) as loader:
        return [torch.cat([next(iter(batch.values())).clone() for batch in loader]) for _ in range(epochs)]


@pytest.mark.slow(reason="decodes the images by six loaders, four of them with workers")
def test_random_crops_depend_on_the_sample_and_not_on_the_dataset_or_worker(root: Path, tmp_path: Path) -> None:
    decoder = ImageDecoder(RandomResizedCrop(9), flip=0.5)
    dataset = ImageFolder(root, decoder)
    with TarWriter(tmp_path / "a.tar") as writer:
        for number, (path, _) in enumerate(dataset.samples):
            writer.write({"__key__": f"{number:04d}", "jpg": Path(path).read_bytes(), "cls": number})
    shards = TarDataset(tmp_path / "a.tar", decode={"jpg": decoder}, schema={"jpg": decoder.spec, "cls": "int64"})
    first, second = images_of(dataset, 0, 1, epochs=2)
    assert not torch.equal(first, second)
    assert not torch.equal(first, images_of(dataset, 0, 2)[0])
    for num_workers in (1, 2):
        assert torch.equal(first, images_of(dataset, num_workers, 1)[0])
    for num_workers in (0, 2):
        assert torch.equal(first, images_of(shards, num_workers, 1)[0])


def test_ragged_images_from_tar_shards(root: Path, tmp_path: Path) -> None:
    decoder = ImageDecoder(Resize(20))
    dataset = ImageFolder(root, decoder)
    with TarWriter(tmp_path / "a.tar") as writer:
        for number, (path, label) in enumerate(dataset.samples):
            writer.write({"__key__": f"{number:04d}", "jpg": Path(path).read_bytes(), "cls": label})
    schema = {"jpg": decoder.spec, "cls": "int64", "__key__": str}
    with ShmLoader(TarDataset(tmp_path / "a.tar", decode={"jpg": decoder}, schema=schema), batch_size=7) as loader:
        (batch,) = loader
    assert dataset.targets.tolist() == batch["cls"].tolist()
    assert [f"{n:04d}" for n in range(7)] == batch["__key__"]
    assert all(torch.equal(torch.from_numpy(dataset[i]["image"]), image) for i, image in enumerate(batch["jpg"]))


def test_error_for_a_damaged_image_in_a_shard_names_its_position(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "x", "jpg": b"\xff\xd8\xff\xe0"})
    dataset = TarDataset(tmp_path / "a.tar", decode={"jpg": SMALL}, schema={"jpg": SMALL.spec})
    with pytest.raises(ShardCorrupt, match=r"a.tar: field 'jpg' of sample 'x' at byte 512: a JPEG that ends at byte 4"):
        dataset[0]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "an empty file"),
        (b"\xff\xd8\xff\xe0\xff\xff", "a damaged JPEG: the segment at byte 2"),
        (b"text", "Pillow does not recognize this image"),
    ],
)
@pytest.mark.parametrize("options", [{"image": SMALL}, {"transform": np.asarray}])
def test_error_names_the_file_that_is_not_an_image(root: Path, content: bytes, cause: str, options: dict[str, Any]) -> None:
    (root / "cat" / "2.jpg").write_bytes(content)
    with pytest.raises(ShardCorrupt, match=f"cat/2.jpg: {cause}"):
        ImageFolder(root, **options)[2]


def test_bad_images_can_be_skipped(root: Path) -> None:
    (root / "cat" / "2.jpg").write_bytes(b"")
    dataset = ImageFolder(root, SMALL)
    with ShmLoader(dataset, batch_size=7, seed=0, num_workers=1, on_error="skip") as loader:
        (batch,) = loader
    assert batch["label"].tolist() == [0, 0, 0, 1, 1, 1]


def test_transform_gets_a_pillow_image_in_rgb(root: Path) -> None:
    def gray(picture: Image.Image) -> np.ndarray[Any, Any]:
        assert picture.mode == "RGB"
        return np.array(picture.convert("L").resize((6, 5)))

    dataset = ImageFolder(root, transform=gray)
    with ShmLoader(dataset, batch_size=7) as loader:
        (batch,) = loader
    assert batch["image"].shape == (7, 5, 6)
    assert torch.equal(torch.from_numpy(dataset[3]["image"]), batch["image"][3])


def test_list_of_paths_has_the_given_labels(root: Path) -> None:
    paths = [root / "dog" / "b.png", root / "cat" / "1.jpg"]
    dataset = ImageFolder(paths, SMALL, labels=[7, 3])
    assert [7, 3] == dataset.targets.tolist() == [sample["label"] for sample in (dataset[0], dataset[1])]
    without = ImageFolder(paths, SMALL)
    assert list(without[1]) == ["image"]
    with ShmLoader(without, batch_size=2) as loader:
        (batch,) = loader
    assert list(batch) == ["image"]
    assert torch.equal(torch.from_numpy(without[1]["image"]), batch["image"][1])


@pytest.mark.parametrize("shared_from", [1, 1000])
def test_pickled_dataset_reads_the_same(root: Path, monkeypatch: pytest.MonkeyPatch, shared_from: int) -> None:
    monkeypatch.setattr(folder_module, "SHARED_FROM", shared_from)
    dataset = ImageFolder(root, SMALL)
    assert (shared_from == 1) == isinstance(dataset.samples, SharedIndex)
    again = pickle.loads(pickle.dumps(dataset))
    assert dataset.targets.tolist() == again.targets.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert np.array_equal(dataset[4]["image"], again[-3]["image"])
    listed = ImageFolder([path for path, _ in dataset.samples], SMALL)
    assert np.array_equal(listed[4]["image"], again[4]["image"])


def test_labels_that_are_words_are_an_error() -> None:
    with pytest.raises(TypeError, match="labels are integers; got 'cat': number the classes"):
        ImageFolder(["a", "b"], labels=["cat", "dog"])  # type: ignore[list-item]  # the mistake


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: ImageFolder(root, SMALL, transform=np.asarray), "image= and transform= both decode images: pass one of them"),
        (lambda root: ImageFolder(root, labels=[1]), "labels= needs a list of paths; in a folder, the subfolders are the classes"),
        (lambda root: ImageFolder(["a", "b"], labels=[1]), "one label for each path is needed; got 1 for 2"),
    ],
)
def test_contradictory_arguments_are_errors(root: Path, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(root)


def test_targets_need_labels(root: Path) -> None:
    with pytest.raises(ValueError, match="these images have no labels; give labels="):
        _ = ImageFolder([root / "dog" / "b.png"]).targets


def test_names_are_public() -> None:
    for name in ("CenterCrop", "ImageDecoder", "ImageFolder", "RandomResizedCrop", "Resize"):
        assert name == getattr(shmload.formats, name).__name__


class Inverted(ImageDecoder):
    """A decoder that changes what it decodes."""

    def __call__(self, data: Any) -> Any:
        return 255 - super().__call__(data)


def shapes_and_sums(dataset: Any, loader: Any) -> list[Any]:
    (batch,) = loader(dataset, batch_size=len(dataset))
    return [tuple(batch["image"].shape), int(batch["image"].sum())]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: setattr(data, "transform", lambda image: np.array(image.resize((2, 3)))),
        lambda data: setattr(data, "image", ImageDecoder(Resize((2, 3)))),
        lambda data: setattr(data, "image", Inverted(Resize((12, 10)))),
    ],
    ids=["transform", "decoder", "decoder that overrides the call"],
)
def test_changed_decoding_is_used_as_by_torch(root: Path, change: Callable[[Any], None]) -> None:
    dataset = ImageFolder(root, SMALL)
    unchanged = shapes_and_sums(dataset, ShmLoader)
    change(dataset)
    found = shapes_and_sums(dataset, ShmLoader)
    assert found == shapes_and_sums(dataset, torch.utils.data.DataLoader)
    assert found != unchanged


def test_decoder_that_overrides_the_call_is_used_by_every_format(tmp_path: Path, photo: Image.Image, encode: Encode) -> None:
    data, decoder = encode(photo, "PNG"), Inverted(Resize((12, 10)))
    with TarWriter(tmp_path / "x.tar") as tar:
        tar.write({"__key__": "0", "png": data})
    with TFRecordWriter(tmp_path / "x.tfrecord") as records:
        records.write({"png": data})
    (tmp_path / "x.png").write_bytes(data)
    found = [
        TarDataset(tmp_path / "x.tar", decode={"png": decoder}, schema={"png": decoder.spec}),
        TFRecordDataset(tmp_path / "x.tfrecord", {"png": decoder.spec}, decode={"png": decoder}),
        ImageFolder([tmp_path / "x.png"], decoder),
    ]
    for dataset in found:
        (batch,) = ShmLoader(dataset, batch_size=1)
        assert np.array_equal(next(iter(batch.values()))[0], decoder(data)), type(dataset)


def test_crop_in_place_of_a_decoder_is_refused_at_once_with_the_remedy(root: Path, tmp_path: Path) -> None:
    crop: Any = RandomResizedCrop(48)
    with TarWriter(tmp_path / "shard.tar") as tar, TFRecordWriter(tmp_path / "records.tfrecord") as records:
        tar.write({"__key__": "0", "jpg": b"\xff\xd8\xff"})
        records.write({"jpg": b"\xff\xd8\xff"})
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text('{"jpg": "0"}\n')
    makers: list[tuple[str, Callable[[], Any]]] = [
        ("image", lambda: ImageFolder(root, crop)),
        ("decode['jpg']", lambda: TarDataset(tmp_path / "shard.tar", decode={"jpg": crop})),
        ("decode['jpg']", lambda: TarStream(tmp_path / "shard.tar", decode={"jpg": crop})),
        (
            "decode['jpg']",
            lambda: TFRecordDataset(tmp_path / "records.tfrecord", {"jpg": ("uint8", (3, 48, 48))}, decode={"jpg": crop}),
        ),
        ("decode['jpg']", lambda: RemoteDataset.from_urls(str(tmp_path / "lines")).indexed(decode={"jpg": crop})),
        ("decode['jpg']", lambda: RemoteDataset.from_urls(str(tmp_path / "shard.tar")).indexed(decode={"jpg": crop})),
    ]
    for name, make in makers:
        with pytest.raises(TypeError) as caught:
            make()
        assert f"{name} must be a function, such as an ImageDecoder; got {crop!r}: wrap it, ImageDecoder({crop!r})" == str(
            caught.value
        )
    with pytest.raises(TypeError, match="transform must be a function of a Pillow image"):
        ImageFolder(root, transform=crop)
    with pytest.raises(TypeError, match=r"^image must be a function, such as an ImageDecoder; got 48$"):
        ImageFolder(root, 48)  # type: ignore[arg-type]  # refused
