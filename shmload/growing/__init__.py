"""A local cache that grows while you train: samplers write into it, each epoch reads what has been collected so far.

    samplers ──writer()──▶ g000000000042-64-67109888.tfrecord ───listing──▶ snapshot of epoch e ──schedule──▶ workers ──▶ batches
    (any number of processes)   (the folder, within a budget)      (one file for all ranks)

The folder is the manifest: the name of a file contains its generation, its number of records and its number of bytes, so one
listing shows what there is, and no file is opened. docs/growing.md describes its use.

The first rank that orders the first batch of an epoch freezes its snapshot (a file created exclusively), while the epoch before
is still read. A worker opens the snapshot when an index `epoch << 40 | record` of that epoch arrives, and maps only new files.
Each rank leases the files of its snapshot. A share of the budget stays outside of snapshots (headroom), because otherwise a full
cache could never be renewed. A snapshot that nobody has begun is frozen again if its files went with the rank that froze it.

Rejected: samplers in a thread of the trainer (the GIL, forks); a manifest file (to be repaired after kills); an index beside each
file (the walk costs less).
"""

from shmload.growing.cache_writer import CacheWriter
from shmload.growing.dataset import GrowingDataset
from shmload.growing.sample_cache import SampleCache

__all__ = ["CacheWriter", "GrowingDataset", "SampleCache"]
