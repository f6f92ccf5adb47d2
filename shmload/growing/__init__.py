"""A local cache that grows while you train: samplers write into it, each epoch reads what has been collected so far.

    samplers ──writer()──▶ g000000000042-64-67109888.tfrecord ───listing──▶ snapshot of epoch e ──schedule──▶ workers ──▶ batches
    (any number of processes)   (the folder, within a budget)      (one file for all ranks)

The folder is the manifest: a file's name contains its generation, number of records and size, so one listing describes the cache
without opening a file. docs/growing.md describes its use.
"""

from shmload.growing.cache_writer import CacheWriter
from shmload.growing.dataset import GrowingDataset
from shmload.growing.sample_cache import SampleCache

__all__ = ["CacheWriter", "GrowingDataset", "SampleCache"]
