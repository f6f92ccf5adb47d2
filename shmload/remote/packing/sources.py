"""The dataset to be packed, seen from the packer: how many samples, and the members of any of them.

A dataset that only opens files of a list is packed from these files, byte for byte, and no image is decoded. That it does no
more cannot be told from its code, so some of its samples are compared with what Pillow makes of their files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from shmload.formats.images.folder import ImageFolder
from shmload.formats.tar.columns import KEY
from shmload.remote.packing.members import Members, file_member, members_of, value_member

NUM_PROBED = 4  # samples of a dataset of files that are compared
_TRANSFORMS = ("transform", "transforms", "target_transform")


class Source(Protocol):
    """A dataset as the packer reads it. Picklable."""

    draws: bool  # whether reading a sample may draw random numbers

    def __len__(self) -> int: ...

    def members(self, index: int) -> tuple[str, Members]:
        """What a sample's key begins with, and its members, sorted by extension."""


class Samples:
    """Any dataset, whose samples are encoded."""

    draws = True

    def __init__(self, dataset: Any, quality: int | None) -> None:
        self.dataset, self.quality = dataset, quality

    def __len__(self) -> int:
        return len(self.dataset)

    def members(self, index: int) -> tuple[str, Members]:
        sample = self.dataset[index]
        key = sample.get(KEY) if isinstance(sample, Mapping) else None
        return (f"{key}-" if isinstance(key, str) else ""), members_of(sample, self.quality)


class Files:
    """A dataset of files, which are copied, with labels.

    Args:
        dataset: has `paths`, or `samples` or `imgs` of (path, label).
        has_labels: whether each entry is a path and a label, not only a path.
    """

    draws = False

    def __init__(self, entries: Sequence[Any], *, has_labels: bool) -> None:
        self.entries, self.has_labels = entries, has_labels

    def __len__(self) -> int:
        return len(self.entries)

    def members(self, index: int) -> tuple[str, Members]:
        entry = self.entries[index]
        if not self.has_labels:
            return "", [file_member(entry)]
        path, label = entry
        return "", sorted([file_member(path), value_member(label, None)], key=lambda member: member[0])

    def update(self, digest: Any) -> None:
        """Adds names and labels of all files to a digest of hashlib's."""
        for entry in self.entries:
            path, label = entry if self.has_labels else (entry, None)
            told = "/".join(path.rsplit("/", 2)[-2:])
            digest.update(f"{told}\0{label!r}\0".encode("utf-8", "surrogateescape"))


class Parts:
    """Samples of sources, in an order: what Subset and ConcatDataset of torch stand for.

    Args:
        parts: the sources.
        part, index: int64 arrays; of each sample, which source it is of, and which of its samples.
    """

    def __init__(self, parts: Sequence[Source], part: Any, index: Any) -> None:
        self.parts, self.part, self.index = parts, part, index
        self.draws = any(source.draws for source in parts)

    def __len__(self) -> int:
        return len(self.part)

    def members(self, index: int) -> tuple[str, Members]:
        return self.parts[int(self.part[index])].members(int(self.index[index]))


def source_of(dataset: Any, quality: int | None) -> Source:
    """The source that a dataset is.

    Raises:
        TypeError: it has no length, or no samples by number.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"a dataset with __len__ and __getitem__ is needed, since samples are packed in a random order; got a "
            f"{type(dataset).__name__}. Put what an iterable yields in a list, or write it with shmload.formats.TarWriter"
        )
    from torch.utils.data import ConcatDataset, Subset

    if type(dataset) is Subset:
        inner = source_of(dataset.dataset, quality)
        return Parts([inner], np.zeros(len(dataset), np.int64), np.array(list(dataset.indices), np.int64))
    if type(dataset) is ConcatDataset:
        parts = [source_of(each, quality) for each in dataset.datasets]
        part = np.repeat(np.arange(len(parts)), [len(each) for each in parts])
        return Parts(parts, part, np.concatenate([np.arange(len(each)) for each in parts]))
    if type(dataset) is ImageFolder and dataset.transform is None:
        return Files(dataset.samples, has_labels=dataset._has_labels)
    return _files_of(dataset) or Samples(dataset, quality)


def _files_of(dataset: Any) -> Files | None:
    """The files of a dataset such as torchvision's ImageFolder, if its samples are these and nothing else."""
    if any(getattr(dataset, name, None) is not None for name in _TRANSFORMS):
        return None
    entries = getattr(dataset, "samples", None) or getattr(dataset, "imgs", None)
    if not isinstance(entries, (list, tuple)) or len(entries) != len(dataset):
        return None
    probed = sorted({number * (len(entries) - 1) // max(NUM_PROBED - 1, 1) for number in range(NUM_PROBED)})
    return Files(entries, has_labels=True) if all(_is_file(dataset, entries, index) for index in probed) else None


def _is_file(dataset: Any, entries: Sequence[Any], index: int) -> bool:
    """Whether a sample is the image in its file, as it is or in another mode, and its label."""
    entry = entries[index]
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
        return False
    sample = dataset[index]
    if not (isinstance(sample, tuple) and len(sample) == 2 and type(sample[1]) is int and sample[1] == entry[1]):
        return False
    if not hasattr(sample[0], "getbands"):
        return False
    from PIL import Image

    with Image.open(entry[0]) as opened:
        picture = opened.convert(sample[0].mode)
    same: bool = picture.size == sample[0].size and picture.tobytes() == sample[0].tobytes()
    return same
