"""A local cache that grows while you train: samplers write into it, each epoch reads what has been collected so far.

    samplers ──writer()──▶ g000000000042-64-67109888.tfrecord ───listing──▶ snapshot of epoch e ──schedule──▶ workers ──▶ batches
    (any number of processes)   (the folder, within a budget)      (one file for all ranks)

The folder is the manifest: the name of a file contains its generation, its number of records and its number of bytes, so one
listing shows what there is, and no file is opened (cache_file.py, cache_view.py). docs/growing.md describes its use.

The first rank that orders the first batch of an epoch settles its snapshot (schedule/epoch_snapshots.py): it writes the list of
files that the epoch reads to a file that is created exclusively (growing_run.py), while the epoch before is still read. A worker
opens the snapshot when an index `epoch << 40 | record` of that epoch arrives, and maps only new files (growing_dataset.py). Each
rank leases the files of its snapshot (growing_epochs.py). A share of the budget stays outside of snapshots (headroom), because
otherwise a full cache could never be renewed. If the rank that settled a snapshot is killed and files of it are evicted, the
epoch is settled again, unless a rank has begun to read it.

Samplers are processes that write into the cache: samplers.py starts their supervisor (sampler_supervisor.py), which runs each in a
process of its own (sampler_process.py).

Users begin with `SampleCache` (sample_cache.py). Files that other programs add are examined by intake.py; damage that an epoch
finds is reported by damage.py; gone_files.py replaces the samples of evicted files in a resume. Writers and supervisors report
about themselves to other processes (process_report.py), which cache_statistics.py reads.

Rejected: samplers in a thread of the trainer (the GIL, forks); a manifest file (to be repaired after kills); an index beside each
file (finding the records again costs less).
"""

from shmload.growing.cache_writer import CacheWriter
from shmload.growing.growing_dataset import GrowingDataset
from shmload.growing.sample_cache import SampleCache

__all__ = ["CacheWriter", "GrowingDataset", "SampleCache"]
