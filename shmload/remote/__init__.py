"""Shards on an object store: pack a dataset into shards, and read it back. Names are imported at first use.

    listing.py           finds the shards, once; the list is pickled with the dataset
    shards.py            `Shards`, this list; manifest.py: the manifest of a packed dataset, with sizes and checksums
    fetch.py             fetches bytes and indexes of shards from the store
    local_shards.py      keeps copies of shards in a folder, which a thread fetches in advance
    remote_source.py     samples by index, read from the copies or from the store
    remote_dataset.py    `RemoteDataset`, the iterable dataset: order, ranks, workers and passes (pass_counter.py)
    fluent_methods.py    its methods as in webdataset, which add stages: program.py, stage_functions.py, sample_decoder.py
    indexed.py           map-style datasets over the same shards
    following.py         epochs of a dataset that is appended to while it is read
    object_stream.py     `ObjectStream`: every object is a sample, read while the store is being listed
    packing/             `upload_cv_dataset`

A format defines where the blocks of a shard are (formats/block_index.py) and what the bytes of a sample mean. Order, cache, ranges
and resume do not depend on the format. Bytes are checksummed while they are received, in pieces of 64 KiB that are still in the
processor's cache (src/receive.pyx).

Rejected: a reader for each format (it would need its own cache and order); reading compressed shards as streams (no resume, no
shuffle); splitting by shard (unequal counts); a sliding shuffle buffer (a pass could not begin in its middle); dealing samples to
workers (a short batch for each).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmload.lazy_imports import lazy_names

if TYPE_CHECKING:
    from shmload.remote.error_handlers import (
        ignore_and_continue,
        ignore_and_stop,
        reraise_exception,
        warn_and_continue,
        warn_and_stop,
    )
    from shmload.remote.indexed import RemoteSamples
    from shmload.remote.manifest import Manifest
    from shmload.remote.object_stream import ObjectStream
    from shmload.remote.packing.upload import upload_cv_dataset
    from shmload.remote.remote_dataset import RemoteDataset
    from shmload.remote.sample_decoder import Continue
    from shmload.remote.stage_functions import default_collation_fn
    from shmload.schedule.node_shuffle import NodeShuffle
    from shmload.schedule.shard_shuffle import ShardShuffle
    from shmload.storage.client import Client, make_client
    from shmload.storage.open_store import open_store

_HANDLERS = "shmload.remote.error_handlers"
_PLACES = {
    "Client": "shmload.storage.client",
    "Continue": "shmload.remote.sample_decoder",
    "Manifest": "shmload.remote.manifest",
    "ObjectStream": "shmload.remote.object_stream",
    "RemoteDataset": "shmload.remote.remote_dataset",
    "RemoteSamples": "shmload.remote.indexed",
    "NodeShuffle": "shmload.schedule.node_shuffle",
    "ShardShuffle": "shmload.schedule.shard_shuffle",
    "default_collation_fn": "shmload.remote.stage_functions",
    "make_client": "shmload.storage.client",
    "open_store": "shmload.storage.open_store",
    "upload_cv_dataset": "shmload.remote.packing.upload",
}

__all__ = [
    "Client",
    "Continue",
    "Manifest",
    "NodeShuffle",
    "ObjectStream",
    "RemoteDataset",
    "RemoteSamples",
    "ShardShuffle",
    "default_collation_fn",
    "ignore_and_continue",
    "ignore_and_stop",
    "make_client",
    "open_store",
    "reraise_exception",
    "upload_cv_dataset",
    "warn_and_continue",
    "warn_and_stop",
]


__getattr__, __dir__ = lazy_names(__name__, {name: _PLACES.get(name, _HANDLERS) for name in __all__})
