"""An image opened from a file and not changed is packed as that file; an image changed in any way is encoded."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from torch.utils.data import ConcatDataset, Subset

import shmload
from shmload.formats import ImageFolder
from shmload.remote.packing.encoded_samples import Files, PackedSamples, source_of
from shmload.remote.packing.members import members_of
from shmload.storage.local_store import LocalStore
from tests.remote.packing.packing_kit import Folder, encoded, packed, samples_in

PHOTOS = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))
PHOTO = PHOTOS[2]


def packed_as(image: Any) -> tuple[str, Any]:
    ((extension, data),) = members_of(image, None)
    return extension, data


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize(
    "opened", [lambda: Image.open(PHOTO), lambda: Image.open(str(PHOTO)), lambda: Image.open(io.BytesIO(PHOTO.read_bytes()))]
)
def test_unchanged_image_is_packed_as_its_file(opened: Callable[[], Any], is_read: bool) -> None:
    with opened() as image:
        if is_read and isinstance(image.filename, str) and image.filename:
            image.load()
        assert ("jpg", PHOTO.read_bytes()) == packed_as(image)


@pytest.mark.parametrize("format", ["PNG", "GIF", "TIFF", "WEBP", "BMP"])
def test_every_format_is_copied(format: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(encoded(Image.open(PHOTO).resize((20, 10)), format))
    with Image.open(path) as image:
        assert path.read_bytes() == packed_as(image)[1]


def paste(image: Any) -> None:
    image.paste((1, 2, 3), (0, 0, 1, 1))


def set_pixel(image: Any) -> None:
    image.putpixel((5, 5), (255, 0, 255))


def draw(image: Any) -> None:
    ImageDraw.Draw(image).line((0, 0, 9, 9))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "paste": paste,
    "putpixel": set_pixel,
    "draw": draw,
    "thumbnail": lambda image: image.thumbnail((50, 50)),
    "draft": lambda image: image.draft("L", (100, 100)),
    "crop": lambda image: image.crop((0, 0, 10, 10)),
    "convert": lambda image: image.convert("L"),
    "resize": lambda image: image.resize((10, 10)),
    "transpose": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "alpha": lambda image: image.putalpha(7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_image_is_encoded(change: str) -> None:
    with Image.open(PHOTO) as image:
        changed = CHANGES[change](image)
        changed = changed if isinstance(changed, Image.Image) else image
        extension, data = packed_as(changed)
        assert extension == "png"
        again = Image.open(io.BytesIO(data))
        assert (changed.size, changed.tobytes()) == (again.size, again.tobytes())


def test_later_frame_of_an_image_is_encoded(tmp_path: Path) -> None:
    frames = [Image.fromarray(np.full((4, 4), shade, np.uint8)) for shade in (0, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "a.gif") as image:
        image.seek(1)
        extension, data = packed_as(image)
        assert extension == "png"
        assert image.convert("RGB").tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_image_whose_file_is_gone_or_replaced_is_encoded(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(PHOTO.read_bytes())
    image = Image.open(path)
    image.load()
    path.write_bytes(PHOTOS[0].read_bytes())
    assert packed_as(image)[0] == "png"
    path.unlink()
    assert packed_as(image)[0] == "png"


def files_of(folder: Path, dataset: Any) -> dict[int, bytes]:
    return {sample["cls"]: sample["jpg"] for sample in samples_in(folder, packed(dataset, LocalStore(folder), maxsize=10**6))}


def test_files_of_a_torchvision_image_folder_are_copied(tmp_path: Path) -> None:
    dataset = Folder(PHOTOS)
    dataset.samples = [(path, number) for number, (path, _) in enumerate(dataset.samples)]
    assert isinstance(source_of(dataset, None), Files)
    assert {number: path.read_bytes() for number, path in enumerate(PHOTOS)} == files_of(tmp_path, dataset)


@pytest.mark.parametrize("mode", ["L", "1", "P"])
def test_pictures_that_the_dataset_converts_are_not_copied_as_files(mode: str, tmp_path: Path) -> None:
    class Converted(Folder):
        def loader(self, path: str) -> Any:
            return super().loader(path).convert(mode)

    dataset = Converted(PHOTOS[:2])
    assert not isinstance(source_of(dataset, None), Files)
    for sample in samples_in(tmp_path, packed(dataset, LocalStore(tmp_path))):
        with Image.open(io.BytesIO(sample["png"])) as image:
            assert image.mode == mode


def test_files_of_shmloads_image_folder_are_copied(tmp_path: Path) -> None:
    for number, path in enumerate(PHOTOS[:3]):
        (tmp_path / "in" / f"c{number}").mkdir(parents=True)
        (tmp_path / "in" / f"c{number}" / "a.jpg").write_bytes(path.read_bytes())
    wanted = {number: path.read_bytes() for number, path in enumerate(PHOTOS[:3])}
    assert wanted == files_of(tmp_path / "out", ImageFolder(tmp_path / "in"))


def test_files_of_subsets_and_chains_of_image_folders_are_copied(tmp_path: Path) -> None:
    first, second = Folder(PHOTOS[:2]), ImageFolder(PHOTOS[2:5], labels=[10, 11, 12])
    dataset = ConcatDataset([first, Subset(second, [2, 0])])
    assert [first.samples[0], first.samples[1]] == [(str(PHOTOS[0]), 0), (str(PHOTOS[1]), 1)]
    wanted = {0: PHOTOS[0], 1: PHOTOS[1], 12: PHOTOS[4], 10: PHOTOS[2]}
    assert {label: path.read_bytes() for label, path in wanted.items()} == files_of(tmp_path, dataset)


def test_another_subset_of_an_image_folder_is_packed_anew(tmp_path: Path) -> None:
    """Only eight samples are compared, and this difference is between them."""
    paths = []
    for number in range(20):
        paths.append(tmp_path / f"{number:02d}.jpg")
        Image.new("RGB", (8, 8), (number, 0, 0)).save(paths[-1])
    folder = ImageFolder(paths, labels=list(range(20)))

    def labels_of(*indices: int) -> set[int]:
        return set(files_of(tmp_path / "packed", Subset(folder, list(indices))))

    assert labels_of(*range(16)) == set(range(16))
    assert labels_of(*range(7), 19, *range(8, 16)) == {*range(16), 19} - {7}


class Cropped(Folder):
    def loader(self, path: str) -> Any:
        return super().loader(path).crop((0, 0, 8, 8))


class Relabeled(Folder):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        return super().__getitem__(index)[0], 9


class WithPaths(Folder):
    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), self.samples[index][0])


@pytest.mark.parametrize(
    "dataset", [Cropped(PHOTOS), Relabeled(PHOTOS), WithPaths(PHOTOS), Folder(PHOTOS, transform=lambda image: image)]
)
def test_samples_are_read_from_datasets_that_do_more_than_open_files(dataset: Any) -> None:
    assert isinstance(source_of(dataset, None), PackedSamples)


def test_dataset_without_indices_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^a dataset with __len__ and __getitem__ is needed, or an iterable of samples, .*; got generator$"
    ):
        source_of((n for n in range(3)), None)
