"""ImageFolder: local image files, in one folder per class or as a list of paths.

Classes and files are found as in torchvision's ImageFolder, in the same order.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt
from shmload.formats.images.crops import check_decoder
from shmload.formats.images.decoder import ImageDecoder, decodes_in_place
from shmload.formats.images.open_image import checked, open_image
from shmload.formats.images.pillow_image import open_picture, rgb_picture
from shmload.formats.paths import check_local, each_path
from shmload.formats.shared_index.shared_index import SharedIndex
from shmload.metrics import irregular_files
from shmload.storage.folder_walk import walk_following_links

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
SHARED_FROM = 10_000  # number of files from which the list is stored in shared memory, once for all workers
StrPath = str | os.PathLike[str]


def _label(label: Any) -> int:
    """Return a label as an integer.

    Raises:
        TypeError: it is not an integer.
    """
    try:
        return operator.index(label)
    except TypeError:
        raise TypeError(f"labels are integers; got {label!r}: number the classes, for example in sorted order") from None


def find_images(root: str, classes: list[str]) -> Iterator[tuple[str, int]]:
    """Yield (path, number of its class), class by class, and sorted folder by folder within a class.

    Args:
        root: the folder that contains a folder for each class.
        classes: names of these folders, in the order of their numbers.
    Raises:
        FileNotFoundError: a class has no image.
    """
    empty = []
    for number, name in enumerate(classes):
        count = 0
        for folder, _, files in sorted(walk_following_links(os.path.join(root, name))):
            for file in sorted(files):
                if file.lower().endswith(EXTENSIONS):
                    count += 1
                    yield os.path.join(folder, file), number
        if not count:
            empty.append(name)
    if empty:
        some = f"{', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}"
        raise FileNotFoundError(
            f"{root}: each folder in it is a class, and {len(empty)} of {len(classes)} ({some}) contain no image "
            f"({', '.join(EXTENSIONS)})"
        )


class ImageFolder:
    """Image files and the numbers of their classes: {"image": array, "label": int}, decoded directly into the batch.

    Folders are read like torchvision's ImageFolder: `classes`, `class_to_idx`, `samples` and `targets` are equal, except that paths
    are made absolute. A pickled dataset contains the names, or the location of their shared list.

    Args:
        source: a folder with one folder per class; or paths of files, in any order.
        image: how a file is decoded. By default the image does not change, so that shapes differ (see `ragged` of ShmLoader).
        labels: labels of the paths, if `source` is a list; without them, samples have no label.
        transform: used instead of `image`: a function that converts a Pillow image in RGB to an array or tensor.
    Raises:
        FileNotFoundError: there is no class, or a class has no image.
        TypeError: `image` or `transform` is not callable.
        ValueError: arguments contradict each other, or the numbers of labels and paths differ.
        ShardCorrupt: (on reading) a file is not a valid image; the message names it and the cause.
    Thread/process safety: any number of readers.
    Example:
        >>> from pathlib import Path
        >>> import shmload
        >>> from shmload.formats import CenterCrop, ImageDecoder, ImageFolder
        >>> photos = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))
        >>> decoder = ImageDecoder(CenterCrop(96))
        >>> dataset = ImageFolder(photos, decoder, labels=range(len(photos)))
        >>> dataset[3]["image"].shape, dataset[3]["label"]
        ((3, 96, 96), 3)
    """

    def __init__(
        self,
        source: StrPath | Sequence[StrPath],
        image: ImageDecoder | None = None,
        *,
        labels: Sequence[int] | None = None,
        transform: Callable[[Picture], Any] | None = None,
    ) -> None:
        if image is not None and transform is not None:
            raise ValueError("image= and transform= both decode images: pass one of them")
        if image is not None:
            check_decoder("image", image)
        if transform is not None and not callable(transform):
            raise TypeError(
                f"transform must be a function of a Pillow image; got {transform!r}: give crops as image=ImageDecoder(crop)"
            )
        self.image = ImageDecoder() if image is None else image
        self.transform = transform
        self.classes: list[str] = []
        self.root: str | None = None
        entries: list[Any]
        if isinstance(source, (str, os.PathLike)):
            if labels is not None:
                raise ValueError("labels= needs a list of paths; in a folder, the subfolders are the classes")
            check_local(source, "ImageFolder")
            self.root = os.path.abspath(source)
            self.classes = sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
            if not self.classes:
                raise FileNotFoundError(f"{self.root}: it needs one subfolder for each class, and has none")
            entries = list(find_images(self.root, self.classes))
        else:
            given = each_path(source)
            for path in given:
                check_local(path, "ImageFolder")
            entries = [os.path.abspath(path) for path in given]
            if labels is not None:
                if len(labels) != len(entries):
                    raise ValueError(f"one label for each path is needed; got {len(labels)} for {len(entries)}")
                entries = list(zip(entries, map(_label, labels), strict=True))
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self._has_labels = self.root is not None or labels is not None
        self.samples: Sequence[Any] = SharedIndex(entries) if len(entries) >= SHARED_FROM else entries

    @property
    def schema(self) -> dict[str, Any] | None:
        """Return the fields that `read_into` writes. Return None if a function makes the images; the loader then collates them."""
        if self.transform is not None or not decodes_in_place(self.image):
            return None
        return {"image": self.image.spec, "label": "int64"} if self._has_labels else {"image": self.image.spec}

    @property
    def targets(self) -> NDArray[np.int64]:
        """Return every sample's label; int64, shape `(len(self),)`.

        Raises:
            ValueError: the samples have no labels.
        """
        if not self._has_labels:
            raise ValueError("these images have no labels; give labels= with their paths")
        if isinstance(self.samples, SharedIndex):
            labels: NDArray[np.int64] = self.samples.column(1)
            return labels
        return np.array([label for _, label in self.samples], np.int64)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self._sample(index)
        found = self._decode(path, None)
        image = found if self.transform is None else self.transform(found)
        return {"image": image, "label": label} if self._has_labels else {"image": image}

    def read_into(self, index: int, out: Any) -> None:
        """Decode a sample into its row.

        Args:
            index: index of the sample.
            out: the row: "image" and, if samples have labels, "label".
        Raises:
            ShardCorrupt: the file is not a valid image.
        """
        path, label = self._sample(index)
        self._decode(path, out)
        if self._has_labels:
            out["label"] = label

    def _sample(self, index: int) -> tuple[str, int]:
        try:
            found = self.samples[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range: the dataset has {len(self)} samples") from None
        return found if self._has_labels else (found, -1)

    def _decode(self, path: str, out: Any) -> Any:
        """Return the decoded image, written to its row if `out` is given; with a transform, Pillow's image in RGB."""
        image = self.image
        with open(path, "rb", buffering=0) as file:
            data = file.read()
        try:
            if self.transform is not None:
                opened = checked(lambda: open_image(data, "pillow", image.max_pixels, is_strict=image.strict, is_fast=False))
                picture = checked(lambda: rgb_picture(open_picture(data)))
                if opened.is_irregular:
                    irregular_files.add()
                return picture
            if out is None:
                return image(data)
            extents = [number for number, n in enumerate(image.spec[1]) if n is None]
            if not extents:
                return image.decode(data, lambda shape: out["image"])
            return image.decode(data, lambda shape: out.reserve("image", tuple(shape[n] for n in extents)))
        except ValueError as error:
            raise ShardCorrupt(f"{path}: {error}") from error

    def __repr__(self) -> str:
        return f"<ImageFolder of {len(self)} images, {len(self.classes)} classes>"
