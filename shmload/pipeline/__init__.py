"""Composable, resumable pipelines, in the terms of the Conveyer library: a list of stages, run by one engine.

    stages (plain values) ──compose.py──▶ Plan ──engines.py──▶ KeyedEngine or BlockEngine ──▶ batches

A `Plan` (plan.py) has a source, which maps positions to keys (item_sequence.py), a program, which maps a key to an item
(programs.py), and a worker pool. A source is one sequence of keys over all epochs: key = item + epoch * n. A Join multiplies the
key by its number of members and adds the number of the member (join_source.py). `StreamSchedule` (item_schedule.py) deals
positions to ranks. A step is identified by its first position, which is also the state, so any number of ranks can continue.

`KeyedEngine` runs one ShmLoader in seed mode over that schedule. The number of items that are fetched together affects when they
arrive, never which items arrive. If a stage makes more or fewer items than it gets, blocks of items are passed instead
(block_sequence.py; as columns, if the items are all alike: block_columns.py), and `BlockEngine` cuts them into batches. Its blocks
come from a `KeyedEngine` (block_sources.py), except in two cases: the blocks of a `Stream`, which the trainer reads
(stream_feed.py), and blocks that are delivered as they are finished. The sampler of a `ShmLoader` orders these (fed_blocks.py).
Both engines have the same kind of place and state (pipeline_engine.py).

To add a stage, write its class (stages.py for a function of items or batches, position_stages.py for a choice of items, `Expanding`
in worker/stage_engine.py for more or fewer items), accept it in compose.py, and give it a method in methods.py.

`in_place.py` lets a dataset decode in place through stages that only choose items. `explain.py` names the bottleneck.
"""

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
