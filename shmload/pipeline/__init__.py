"""Composable, resumable pipelines, in the words of the Conveyer library: stages in a row over the one engine."""

from shmload.pipeline.blocks import AsyncMap, Bucket, Filter, FlatMap, Pack, Scan
from shmload.pipeline.caching import Cache
from shmload.pipeline.conveyer import Conveyer
from shmload.pipeline.join import Chain, Interleave, Join, Zip
from shmload.pipeline.methods import Pipeline
from shmload.pipeline.sources import Enumerate, Generate, Items, Permutation, Range, Repeat, Shuffle, Skip, Take, Window
from shmload.pipeline.stages import BatchMap, Collate, DistributedBatchedMap, Map, Partition, reconcile
from shmload.pipeline.streams import Stream

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
