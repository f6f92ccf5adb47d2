"""Read every sample of stored shards, and report what is damaged: `shmload inspect --check`."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from typing import Any

from shmload.errors import ShardCorrupt, StoreError
from shmload.formats.braces import shard_paths
from shmload.formats.images.decoder import ImageDecoder
from shmload.formats.images.image_folder import EXTENSIONS
from shmload.formats.index_json import INDEX_NAME
from shmload.formats.plain_files import PlainFiles
from shmload.remote.folder_objects import objects_by_format
from shmload.remote.listing import shards_of_urls
from shmload.remote.manifest import MANIFEST_NAME
from shmload.remote.packing.image_signatures import PEEK, image_extension
from shmload.remote.remote_dataset import RemoteDataset
from shmload.remote.shards import RemoteShard, Shards
from shmload.storage.open_store import open_store
from shmload.storage.store import Store
from shmload.tools.counted import counted

_DECODER = ImageDecoder()


@dataclass
class Checked:
    """What was read, and what is damaged.

    Attributes:
        path: path or URL of the shards.
        num_shards, num_samples: number of shards, and number of samples that were read without an error.
        damaged: a line for each damaged sample, and for each shard that could not be read to its end.
    """

    path: str
    num_shards: int = 0
    num_samples: int = 0
    damaged: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        found = "damage in " + counted(len(self.damaged), "place") if self.damaged else "no damage found"
        return f"{self.path}: {counted(self.num_samples, 'sample')} in {counted(self.num_shards, 'shard')} read, {found}"


def check(url: str, *, client: Any = None, over: Callable[[Sequence[RemoteShard]], Iterable[RemoteShard]] = iter) -> Checked:
    """Read every sample of the shards that a URL or path names, and decode the images among their fields.

    The checksums of a manifest and of TFRecord are compared; of encrypted shards, nothing else is read. After damage to a shard
    itself, the next shard is read; after an image that cannot be decoded, the next sample.

    Args:
        url: URL or path of shards or of a folder, as for `RemoteDataset.from_urls`.
        client: as for `RemoteDataset.from_urls`.
        over: yields the shards that it is given; for progress.
    Raises:
        ObjectMissing: there are no shards.
        ShardCorrupt: the manifest is damaged.
        StoreError: the store does not answer.
    """
    found = Checked(url)

    def opened(place: str) -> Store:
        return open_store(place, client)

    try:
        shards = shards_of_urls(url, opened)
    except ShardCorrupt:  # perhaps of a compressed shard, which is decompressed to know its size
        urls = _urls_of_shards(url, opened)
        if not urls:
            raise
        for each in urls:
            try:
                _read(shards_of_urls(each, opened), found, over)
            except ShardCorrupt as error:
                found.num_shards += 1
                found.damaged.append(str(error))
    else:
        _read(shards, found, over)
    return found


def _urls_of_shards(url: str, opened: Callable[[str], Store]) -> list[str]:
    """Return the URL of each shard that a URL names, or nothing if a manifest or an index lists the shards."""
    urls = shard_paths(url)
    if len(urls) > 1:
        return urls
    try:
        listed = list(opened(url).list_objects())
    except StoreError:  # not a folder
        return urls
    if not listed:
        return urls
    if {MANIFEST_NAME, INDEX_NAME} & {entry.key for entry in listed}:
        return []
    groups = objects_by_format(listed, None)
    return [f"{url.rstrip('/')}/{entry.key}" for entries in groups.values() for entry in entries]


def _read(shards: Shards, found: Checked, over: Callable[[Sequence[RemoteShard]], Iterable[RemoteShard]]) -> None:
    """Read shards, and count their samples and damages."""
    found.num_shards += len(shards.all)
    for shard in over(shards.all):
        try:
            for damage in _damages(shards, shard):
                if damage:
                    found.damaged.append(damage)
                else:
                    found.num_samples += 1
        except ShardCorrupt as error:
            found.damaged.append(str(error))


def _damages(shards: Shards, shard: RemoteShard) -> Iterator[str]:
    """Read a shard. Yield a line for each sample that has a damaged image, and "" for each other sample.

    Raises:
        ShardCorrupt: the shard itself is damaged.
    """
    if isinstance(shard.format, PlainFiles):
        yield _damage({os.path.splitext(shard.key)[1]: shard.read(0, shard.stored_nbytes)}, shard.url)
        return
    options: dict[str, Any] = {"cache_bytes": max(shard.nbytes, 1), "rank": 0, "world_size": 1}
    dataset = RemoteDataset(None, replace(shards, all=(shard,)), shuffle=False, **options)
    try:
        if shards.key:  # encrypted
            dataset._source.local.copy(0)  # which compares its checksum
            yield from repeat("", dataset.num_samples)
        else:
            for sample in dataset:
                yield _damage(sample, f"{shard.url}: sample {sample['__key__']!r}")
    finally:
        dataset.close()


def _damage(sample: Mapping[str, Any], where: str) -> str:
    """Return a line if an image among the values of a sample cannot be decoded, else "".

    A value is an image if its name or its first bytes say so.
    """
    for name, value in sample.items():
        is_image = f".{name.rpartition('.')[2].lower()}" in EXTENSIONS
        if isinstance(value, bytes | memoryview) and (is_image or image_extension(bytes(value[:PEEK]))):
            try:
                _DECODER(value)
            except ValueError as error:
                if not _is_readable(value):
                    return f"{where}: {name}: {error}"
    return ""


def _is_readable(data: bytes | memoryview) -> bool:
    """Return whether Pillow reads an image that the decoder of shmload refuses, such as one of 32 bits a value."""
    from PIL import Image

    try:
        Image.open(io.BytesIO(data)).load()
    except Exception:  # Pillow's plugins raise many types
        return False
    return True
