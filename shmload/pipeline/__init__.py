"""Composable, resumable pipelines, in the words of the Conveyer library: stages in a row over the one engine."""

from shmload.pipeline.conveyer import Conveyer
from shmload.pipeline.join import Join
from shmload.pipeline.stages import Collate, DistributedBatchedMap, Map, Partition, Permutation, Range, reconcile

__all__ = ["Collate", "Conveyer", "DistributedBatchedMap", "Join", "Map", "Partition", "Permutation", "Range", "reconcile"]
