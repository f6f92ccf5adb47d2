"""upload_cv_dataset: any dataset of images and labels, as shards in a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from shmload.remote.manifest import Manifest
from shmload.remote.packing.pack import Options, Packing, Progress
from shmload.storage.store import Store


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
    multiprocessing_context: Any = None,
    spool_folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Packs a dataset into tar shards, which webdataset reads too, and writes them to a store.

    Samples are packed in a random order that the seed chooses. Worker processes encode them into the ring; this one writes
    shards, and threads send them meanwhile. Shards are the same, byte for byte, for any number of workers and any start method.

    A packing that was killed goes on when it is run again with the same arguments and dataset: shards that are whole in the
    store are neither encoded nor sent again. Readers see the dataset that was there before until the new one is whole; then the
    old shards are removed. Of two packings of different datasets into one folder, the one that began first stops with an error.

    What becomes of images and labels is in docs/packing.md: files are copied as they are, other images are PNG, nothing is
    pickled.

    Args:
        ds: map-style; samples are (image, label), an image, or dicts.
        client: of `make_client`, or boto3's; None: `bucket` is a folder of this machine, or a URL.
        bucket, base_folder: where the dataset goes; one folder for each dataset.
        maxsize: bytes of a shard's file, exceeded only by a sample that is larger alone.
        maxcount: samples of a shard.
        workers: processes that encode, at most as many as there are processors; 0: this one.
        seed: of the order, and of what the dataset draws (random augmentations).
        quality: JPEG with this quality, 1 to 100, for images that are not encoded yet; None: PNG, without loss.
        restart_markers: JPEG files get restart markers, without loss: readers then decode only what a crop needs.
        multiprocessing_context: how workers start: "fork", "spawn", "forkserver" or a context.
        spool_folder: where up to three shards lie until they are sent, in files without names. None: in memory if three of
            `maxsize` are at most an eighth of what is free, else where temporary files do.
        on_progress: called now and then with a `Progress`.
    Returns:
        what was written: `manifest.json` in the folder, which is read back by `RemoteDataset(client, bucket, base_folder)`.
    Raises:
        StoreError: the store cannot be written, or another packing into the folder was begun.
        TypeError, ValueError: an argument, or a sample that nothing keeps; the text names its field.
    Cost: CPU of about one copy and one checksum of each file; nothing is decoded where files are copied.
    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from shmload.remote import upload_cv_dataset
        >>> images = [(np.full((8, 8, 3), number, np.uint8), number) for number in range(10)]
        >>> manifest = upload_cv_dataset(images, bucket=tempfile.mkdtemp(), base_folder="grey", maxcount=4, workers=0)
        >>> manifest.num_samples, len(manifest.shards), manifest.extensions
        (10, 3, ('cls', 'png'))
    """
    options = Options(
        int(maxsize),
        int(maxcount),
        int(workers),
        seed,
        quality,
        restart_markers,
        multiprocessing_context,
        None if spool_folder is None else os.fspath(spool_folder),
    )
    return Packing(ds, store_of(client, bucket, base_folder), options, on_progress).run()


def store_of(client: Any, bucket: str, base_folder: str) -> Store:
    """The store of a dataset's folder.

    Raises:
        ValueError: nothing says where it is.
    """
    if not bucket:
        raise ValueError("bucket is needed: its name, or without a client a folder or a URL")
    if client is None:
        from shmload.storage.urls import open_store

        return open_store("/".join(part.rstrip("/") for part in (os.fspath(bucket), base_folder) if part))
    from shmload.storage.client import client_of

    return client_of(client).store(bucket, base_folder)
