"""upload_cv_dataset: pack any dataset of images and labels into shards in a store.

Worker processes encode the samples, and this process writes them to shards (shard_packing.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from shmload.formats.encryption import SampleCipher
from shmload.formats.tar.member_compression import ZSTD_LEVEL
from shmload.introspect.tables import is_table
from shmload.remote.manifest import Manifest
from shmload.remote.packing.dataset_packing import DatasetPacking
from shmload.remote.packing.members import Serializers
from shmload.remote.packing.pack_options import Compress, PackOptions
from shmload.remote.packing.shard_packing import Packing, PackProgress
from shmload.remote.packing.stream_packing import StreamPacking
from shmload.storage.client import client_of
from shmload.storage.open_store import open_store
from shmload.storage.store import Store


def packing_of(
    dataset: Any, store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None = None
) -> Packing:
    """Return the packing of a dataset or of an iterable of samples, to be run. Arguments are those of `DatasetPacking`.

    Raises:
        TypeError: it is neither of these.
        ValueError: it is empty.
    """
    from torch.utils.data import IterableDataset

    if is_table(dataset) or (isinstance(dataset, Mapping) and dataset and 0 not in dataset):
        raise TypeError(
            f"a dataset gives a sample for each number, and this {type(dataset).__name__} gives its columns by name: give its "
            "rows, such as frame.to_dict('records') of a DataFrame, or [dict(zip(columns, row)) for row in "
            "zip(*columns.values())] of a dict"
        )
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_stream = hasattr(dataset, "__iter__") and not is_map_style and not isinstance(dataset, (str, bytes, Mapping))
    is_stream |= isinstance(dataset, IterableDataset)  # torch's IterableDataset has a __getitem__ that only raises
    return (StreamPacking if is_stream else DatasetPacking)(dataset, store, options, on_progress)


def upload_cv_dataset(
    ds: Any,
    client: Any = None,
    bucket: str = "",
    base_folder: str = "",
    maxsize: float = 1e8,
    maxcount: int = 100_000,
    workers: int = 30,
    *,
    seed: int = 0,
    quality: int | None = None,
    restart_markers: bool = False,
    compress: Compress = None,
    compression_level: int = ZSTD_LEVEL,
    key: bytes | None = None,
    append: bool = False,
    part: tuple[int, int] = (1, 1),
    serializers: Serializers | None = None,
    multiprocessing_context: Any = None,
    spool_folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
) -> Manifest:
    """Pack a dataset into tar shards, which webdataset can also read, and write them to a store.

    Samples are packed in a random order determined by the seed. Worker processes encode them into the ring, this process writes
    shards, and threads send them in parallel. The shards are identical, byte for byte, for any number of workers and any start
    method.

    To continue a packing that was killed, run it again with the same arguments and dataset: shards that are complete in the store,
    which is verified by reading them back, are neither encoded nor sent again. Readers see the previous dataset until the new one
    is complete; then the old shards are removed. If two different datasets are packed into the same folder, the packing that began
    first stops with an error.

    docs/packing.md describes how images and labels are stored: files are copied unchanged, other images become PNG, and nothing is
    pickled.

    Args:
        ds: a map-style dataset whose samples are (image, label), an image, or dicts. An iterable of such samples (a generator, a
            fluent RemoteDataset, torch's IterableDataset) is packed in its own order: this process reads it, and workers encode. To
            continue after a kill, it must yield the same samples again.
        client: from `make_client`, or boto3's; None if `bucket` is a local folder or a URL; a dict of options for a URL of another
            cloud (`open_store`).
        bucket, base_folder: where to write the dataset; one folder per dataset.
        maxsize: greatest size of a shard's tar file in bytes, before compression; only a larger single sample exceeds it.
        maxcount: greatest number of samples per shard.
        workers: processes that encode, at most one per processor; 0 encodes in this process.
        seed: seed of the order, and of the dataset's random numbers (augmentations).
        quality: encode images that are not encoded yet as JPEG of this quality, 1 to 100. If None, as PNG, without loss.
        restart_markers: add restart markers to JPEG files, without loss, so that readers decode only what a crop needs.
        compress: "samples" compresses each member with zstd, "txt" as "txt.zst", except integers and formats that are compressed
            themselves (JPEG, PNG, FLAC, ...); "shards" compresses each shard, as .tar.zst. Both need the extra `zstd`.
        compression_level: zstd level, 1 to 22.
        key: 32-byte key to encrypt each member, "txt" as "txt.enc" (extra `encryption`); it is not stored anywhere.
        append: keep the existing samples, and add these after them as a new generation. Repeating the same call right afterward
            adds nothing.
        part: (number, count), counted from (1, count): this machine packs one of `count` parts of the dataset, and others pack the
            rest with the same arguments, at any time. Each one that finds all parts complete writes the manifest. Samples and order
            are the same as on one machine; the boundaries of shards also depend on `count`.
        serializers: for values of your own types, `{Graph: ("graph", dumps)}`: type -> (extension, function that returns bytes).
        multiprocessing_context: start method of the workers: "fork", "spawn", "forkserver" or a context.
        spool_folder: folder for up to three shards until they are sent, five if they are compressed, in unnamed files. If None, in
            memory if that many shards of `maxsize` take at most an eighth of free memory, otherwise in the system's temporary
            folder.
        on_progress: called from time to time with a `PackProgress`.
    Returns:
        The manifest that was written: `manifest.json` in the folder, which `RemoteDataset(client, bucket, base_folder)` reads. If
        other parts are missing, nothing is written, and the manifest describes only this part.
    Raises:
        StoreError: the store cannot be written, or another packing into the folder was begun.
        TypeError, ValueError: an argument is invalid, or a sample cannot be encoded; the message names its field.
    Cost: CPU time of about two copies and one checksum of each file; files that are copied are not decoded.
    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from shmload.remote import upload_cv_dataset
        >>> images = [(np.full((8, 8, 3), number, np.uint8), number) for number in range(10)]
        >>> manifest = upload_cv_dataset(
        ...     images, bucket=tempfile.mkdtemp(), base_folder="grey", maxcount=4, workers=0
        ... )
        >>> manifest.num_samples, len(manifest.shards), manifest.extensions
        (10, 3, ('cls', 'png'))
    """
    options = PackOptions(
        maxsize=int(maxsize),
        maxcount=int(maxcount),
        workers=int(workers),
        seed=seed,
        quality=quality,
        restart_markers=restart_markers,
        multiprocessing_context=multiprocessing_context,
        spool_folder=None if spool_folder is None else os.fspath(spool_folder),
        compress=compress,
        compression_level=compression_level,
        cipher=None if key is None else SampleCipher(key),
        serializers=dict(serializers or {}),
        append=append,
        part=part,
    )
    return packing_of(ds, store_of(client, bucket, base_folder), options, on_progress).run()


def store_of(client: Any, bucket: str, base_folder: str) -> Store:
    """Return the store for a dataset's folder. Arguments are those of `upload_cv_dataset`.

    Raises:
        ValueError: no location is given.
    """
    if not bucket:
        raise ValueError("bucket is needed: its name, or without a client a folder or a URL")
    if client is None or isinstance(client, Mapping):
        return open_store("/".join(part.rstrip("/") for part in (os.fspath(bucket), base_folder) if part), client)
    return client_of(client).store(bucket, base_folder)
