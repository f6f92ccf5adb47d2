"""`EncodedSamples`: the dataset that the packing's loader reads. Its samples are the records of a shard, by position in the order.

Workers do all of the encoding, including headers and padding, in their slot of the ring; the packing process only writes the result
to shards. The position of a sample depends only on the order, so the number of workers changes no byte.

If a dataset only opens the files of a list, these files are copied byte for byte, and no image is decoded. This cannot be
determined from the dataset's code, so some of its samples are compared with what Pillow decodes from their files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from shmload.formats.encryption import ENCRYPTED, SampleCipher
from shmload.formats.images.image_folder import ImageFolder
from shmload.formats.tar.extensions import INTEGERS
from shmload.formats.tar.member_compression import zstd
from shmload.formats.tar.shard_index import BLOCK, KEY
from shmload.formats.tar.writer import member_header, member_name
from shmload.introspect.abilities import ability_of
from shmload.remote.packing.image_members import FloatImages
from shmload.remote.packing.members import Members, Serializers, file_member, members_of, serialized, serializer_of, value_member
from shmload.schedule.permutation import Permutation
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import generators_kept, sample_of

NUM_PROBED_FILES = 4  # number of samples that are compared with their files
_TRANSFORMS = ("transform", "transforms", "target_transform")


@dataclass
class PackedSamples:
    """A source of packing: any dataset, whose samples are encoded.

    Attributes:
        dataset: the dataset.
        quality: JPEG quality for images that are encoded; None encodes without loss.
        serializers: the user's serializers by type.
    """

    dataset: Any
    quality: int | None
    serializers: Serializers = field(default_factory=dict)
    draws: bool = True  # whether reading a sample may use random numbers

    def __len__(self) -> int:
        return len(self.dataset)

    def members(self, index: int, float_images: FloatImages) -> tuple[str, Members]:
        """Return the prefix of a sample's key, and its members, sorted by extension."""
        return prefix_and_members(self.dataset[index], self.quality, self.serializers, float_images)


def prefix_and_members(
    sample: Any, quality: int | None, serializers: Serializers, float_images: FloatImages
) -> tuple[str, Members]:
    """Return the prefix of a sample's key (its own key and "-", or ""), and its members, sorted by extension.

    The other arguments are as for `members_of`.
    """
    key = sample.get(KEY) if isinstance(sample, Mapping) else None
    return (f"{key}-" if isinstance(key, str) else ""), members_of(sample, quality, serializers, float_images)


@dataclass
class Files:
    """A source of packing: files, which are copied unchanged, and their labels.

    Args:
        entries: paths, or pairs of path and label.
        has_labels: whether each entry is a pair of path and label.
        serializers: serializers for labels.
    """

    entries: Sequence[Any]
    has_labels: bool = True
    serializers: Serializers = field(default_factory=dict)
    draws: bool = False

    def __len__(self) -> int:
        return len(self.entries)

    def members(self, index: int, float_images: FloatImages) -> tuple[str, Members]:
        entry = self.entries[index]
        if not self.has_labels:
            return "", [file_member(entry)]
        path, label = entry
        own = self.serializers
        labelled = value_member(label, None) if serializer_of(label, own) is None else serialized(label, own)
        return "", sorted([file_member(path), labelled], key=lambda member: member[0])

    def update(self, digest: Any) -> None:
        """Add the names and labels of all files to a hashlib digest. A name is the last two parts of the path."""
        for entry in self.entries:
            path, label = entry if self.has_labels else (entry, None)
            name = "/".join(path.rsplit("/", 2)[-2:])
            digest.update(f"{name}\0{label!r}\0".encode("utf-8", "surrogateescape"))


class PackedParts:
    """A source of packing: samples of other sources in a given order, for torch's Subset and ConcatDataset.

    Args:
        parts: the sources.
        part, index: int64 arrays: for each sample, the number of its source and its index there.
    """

    def __init__(self, parts: Sequence[PackSource], part: Any, index: Any) -> None:
        self.parts, self.part, self.index = parts, part, index
        self.draws: bool = any(source.draws for source in parts)

    def __len__(self) -> int:
        return len(self.part)

    def members(self, index: int, float_images: FloatImages) -> tuple[str, Members]:
        return self.parts[int(self.part[index])].members(int(self.index[index]), float_images)

    def update(self, digest: Any) -> None:
        """Add which samples these are to a hashlib digest, and the names and labels of the files among their sources."""
        for numbers in (self.part, self.index):
            digest.update(np.ascontiguousarray(numbers, "<i8"))
        for source in self.parts:
            if isinstance(source, Files | PackedParts):
                source.update(digest)


PackSource = PackedSamples | Files | PackedParts  # a dataset as the packer reads it; picklable


def source_of(dataset: Any, quality: int | None, serializers: Serializers | None = None) -> PackSource:
    """Return how the packer reads a dataset.

    Args:
        dataset: a map-style dataset.
        quality, serializers: as for `PackedSamples`.
    Raises:
        TypeError: it has no length, or no samples by index.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"a dataset with __len__ and __getitem__ is needed, or an iterable of samples, which are packed in its order; got "
            f"{type(dataset).__name__}"
        )
    from torch.utils.data import ConcatDataset, Subset

    own = dict(serializers or {})
    if type(dataset) is Subset:
        inner = source_of(dataset.dataset, quality, serializers)
        return PackedParts([inner], np.zeros(len(dataset), np.int64), np.array(list(dataset.indices), np.int64))
    if type(dataset) is ConcatDataset:
        parts = [source_of(each, quality, serializers) for each in dataset.datasets]
        part = np.repeat(np.arange(len(parts)), [len(each) for each in parts])
        return PackedParts(parts, part, np.concatenate([np.arange(len(each)) for each in parts]))
    if type(dataset) is ImageFolder and dataset.transform is None:
        return Files(dataset.samples, dataset._has_labels, own)
    return _files_of(dataset, own) or PackedSamples(dataset, quality, own)


def _files_of(dataset: Any, own: Serializers) -> Files | None:
    """Return the files of a dataset such as torchvision's ImageFolder, if its samples contain nothing else; otherwise None."""
    if any(ability_of(dataset, name) is not None for name in _TRANSFORMS):
        return None
    lists = [found for name in ("samples", "imgs") if isinstance(found := ability_of(dataset, name), (list, tuple)) and found]
    entries = lists[0] if lists else []
    if not entries or len(entries) != len(dataset):
        return None
    probed = sorted({number * (len(entries) - 1) // max(NUM_PROBED_FILES - 1, 1) for number in range(NUM_PROBED_FILES)})
    return Files(entries, serializers=own) if all(_is_file(dataset, entries, index) for index in probed) else None


def _is_file(dataset: Any, entries: Sequence[Any], index: int) -> bool:
    """Return whether a sample consists of the image in its file, possibly converted to RGB as torchvision does, and its label."""
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
        if sample[0].mode not in (opened.mode, "RGB"):
            return False
        picture = opened.convert(sample[0].mode)
    same: bool = picture.size == sample[0].size and picture.tobytes() == sample[0].tobytes()
    return same


# formats whose contents are already compressed: images, sound, films, archives
_DENSE = """
aac apng avi bz2 flac gif gz j2k jfif jp2 jpe jpeg jpg m4a mkv mov mp3 mp4 mpeg mpg ogg opus png webm webp xz zip zst
"""
NEVER_SMALLER = INTEGERS | frozenset(_DENSE.split())


@dataclass(frozen=True)
class MemberCoding:
    """Transforms members on their way into a shard. The name of a member shows how: "txt" becomes "txt.zst.enc".

    Attributes:
        restart_markers: add restart markers to JPEG files, without loss.
        level: zstd level for compressing members, except formats that would not become smaller; None does not compress.
        cipher: encrypts all members; `generation` is the generation that they are part of.
    """

    restart_markers: bool = False
    level: int | None = None
    cipher: SampleCipher | None = None
    generation: str = ""

    def record(self, number: str, prefix: str, members: Members) -> list[bytes]:
        """Return the record of a sample in pieces: headers, payloads and padding.

        Args:
            number: number of the sample, as it ends the key.
            prefix: what precedes the number in the key.
            members: (extension, bytes) of each member.
        Raises:
            ValueError: two members would have the same name.
        """
        pieces: list[bytes] = []
        for extension, data in members:
            last = extension.rpartition(".")[2]
            if self.restart_markers and last in ("jpg", "jpeg"):
                from shmload.formats.images.restart_markers import with_restart_markers

                data = with_restart_markers(data)
            if self.level is not None and last not in NEVER_SMALLER:
                extension, data = f"{extension}.zst", zstd(data, self.level)
                if any(extension == other for other, _ in members):
                    raise ValueError(f"two fields of the sample would both be its member {extension!r}: give one another name")
            if self.cipher is not None:
                extension += ENCRYPTED
            name = member_name(prefix + number, extension) if prefix else number.encode() + _name_ending(extension)
            if self.cipher is not None:
                data = self.cipher.encrypt(data, name, self.generation)
            pieces += [member_header(name, len(data)), data, bytes(-len(data) % BLOCK)]
        return pieces


RECORD = "record"


class EncodedSamples:
    """A dataset of the records of samples, for a ShmLoader. A record is the members one after the other, each padded to a block.

    The random numbers of a dataset (augmentations) are seeded by (seed, index of the sample), so that a packing that is continued
    after a kill, or with another number of workers, writes the same bytes.

    Args:
        source: the samples.
        seed: seed of the order and of the dataset's random numbers.
        coding: transformation of the members.
    Attributes:
        float_images: how images of floats are stored.
    """

    float_images: FloatImages = None
    schema = {RECORD: ("uint8", (None,))}  # noqa: RUF012  # as users write it

    def __init__(self, source: PackSource, *, seed: int, coding: MemberCoding) -> None:
        self.source, self.seed = source, seed
        self.begin(coding, 0)
        self.order = Permutation(len(source), seed=seed)

    def begin(self, coding: MemberCoding, first: int) -> None:
        """Set the transformation of members and the number of the first sample, which is part of its key."""
        self.coding, self._first = coding, first
        self._width = max(8, len(str(first + len(self.source) - 1)))

    def __len__(self) -> int:
        return len(self.source)

    def read_batch_into(self, positions: Any, out: Any) -> None:
        """Write the records at these positions of the order to the field `RECORD`, one after the other."""
        indices = self.order.take(np.asarray(positions, np.int64)).tolist()
        if self.source.draws:
            own = OwnGenerators(self.source)
            with generators_kept():
                records = [self.pieces(index, own) for index in indices]
        else:
            records = [self.pieces(index) for index in indices]
        view, at = memoryview(out.reserve(RECORD, [sum(map(len, pieces)) for pieces in records])), 0
        for pieces in records:
            for piece in pieces:
                view[at : at + len(piece)] = piece
                at += len(piece)

    def pieces(self, index: int, own: OwnGenerators | None = None) -> list[bytes]:
        """Return the record of a sample: headers, payloads and padding.

        Args:
            index: index of the sample.
            own: the source's own generators, which are seeded for the sample together with the global ones.
        Raises:
            Exception: reading the sample failed; a note names it.
        """
        try:
            with sample_of(self.seed, 0, index, 0, own=own) if self.source.draws else nullcontext():
                prefix, members = self.source.members(index, self.float_images)
                return self.coding.record(f"{self._first + index:0{self._width}d}", prefix, members)
        except Exception as error:
            error.add_note(f"sample {index} of the dataset")
            raise


@lru_cache(maxsize=1024)
def _name_ending(extension: str) -> bytes:
    """Return the part of a member's name after a key that is a number. It is cached, because it is validated."""
    return member_name("0", extension)[1:]
