"""Composable, resumable pipelines, in the words of the Conveyer library: stages in a row over the one engine."""

from shmload.pipeline.async_map import AsyncMap
from shmload.pipeline.buckets import Bucket
from shmload.pipeline.caching import Cache
from shmload.pipeline.conveyer import Conveyer
from shmload.pipeline.join import Join
from shmload.pipeline.methods import Chain, Interleave, Pipeline, Zip
from shmload.pipeline.packing import Pack
from shmload.pipeline.position_stages import Enumerate, Repeat, Shuffle, Skip, Take, Window
from shmload.pipeline.reconcile import reconcile
from shmload.pipeline.scan import Scan
from shmload.pipeline.sources import Generate, Items, Permutation, Range, Stream
from shmload.pipeline.stages import BatchMap, Collate, DistributedBatchedMap, Map, Partition
from shmload.worker.item_stages import Filter, FlatMap

__all__ = [
    "AsyncMap",
    "BatchMap",
    "Bucket",
    "Cache",
    "Chain",
    "Collate",
    "Conveyer",
    "DistributedBatchedMap",
    "Enumerate",
    "Filter",
    "FlatMap",
    "Generate",
    "Interleave",
    "Items",
    "Join",
    "Map",
    "Pack",
    "Partition",
    "Permutation",
    "Pipeline",
    "Range",
    "Repeat",
    "Scan",
    "Shuffle",
    "Skip",
    "Stream",
    "Take",
    "Window",
    "Zip",
    "reconcile",
]
