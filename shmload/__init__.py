"""shmload: a shared-memory, zero-copy data loader for PyTorch.

Workers decode samples directly into the memory of the tensors that the trainer reads. `ShmLoader` replaces
`torch.utils.data.DataLoader`. Names are imported at first use: `import shmload` alone imports neither torch nor numpy.

The pages docs/*.md that docstrings and messages name are in the repository, https://github.com/shmload/shmload. Begin with
docs/index.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if sys.platform != "linux":
    raise ImportError(f"shmload needs Linux (memfd, pidfd, POSIX shared memory); this is {sys.platform}")

from shmload.lazy_imports import lazy_names

if TYPE_CHECKING:
    from shmload.batch.ragged_forms import Jagged, Padded
    from shmload.errors import (
        CacheFull,
        ClusterUnreachable,
        CopyFailed,
        ObjectMissing,
        RankFailed,
        RankLeft,
        RingTooSmall,
        SampleError,
        SampleTimeout,
        ShardCorrupt,
        ShmloadError,
        StateMismatch,
        StoreError,
        WorkerDied,
    )
    from shmload.formats.shared_index.shared_index import SharedIndex
    from shmload.launch.spawning import spawn
    from shmload.loader import ShmLoader
    from shmload.ray_options import Ray
    from shmload.schedule.block_shuffle import BlockShuffle
    from shmload.schedule.length_buckets import LengthBuckets
    from shmload.schedule.mix import Mix
    from shmload.schedule.permutation import Permutation
    from shmload.schedule.schedule import Schedule
    from shmload.schedule.token_budget import TokenBudget
    from shmload.schedule.weighted import Weighted
    from shmload.worker.sample_rng import sample_info, sample_rng

__version__ = "0.1.0"

_PLACES = {
    "BlockShuffle": "shmload.schedule.block_shuffle",
    "Jagged": "shmload.batch.ragged_forms",
    "Mix": "shmload.schedule.mix",
    "LengthBuckets": "shmload.schedule.length_buckets",
    "Padded": "shmload.batch.ragged_forms",
    "Permutation": "shmload.schedule.permutation",
    "Ray": "shmload.ray_options",
    "Schedule": "shmload.schedule.schedule",
    "SharedIndex": "shmload.formats.shared_index.shared_index",
    "ShmLoader": "shmload.loader",
    "TokenBudget": "shmload.schedule.token_budget",
    "Weighted": "shmload.schedule.weighted",
    "sample_info": "shmload.worker.sample_rng",
    "sample_rng": "shmload.worker.sample_rng",
    "spawn": "shmload.launch.spawning",
}
_ERRORS = "shmload.errors"

__all__ = [
    "BlockShuffle",
    "CacheFull",
    "ClusterUnreachable",
    "CopyFailed",
    "Jagged",
    "LengthBuckets",
    "Mix",
    "ObjectMissing",
    "Padded",
    "Permutation",
    "RankFailed",
    "RankLeft",
    "Ray",
    "RingTooSmall",
    "SampleError",
    "SampleTimeout",
    "Schedule",
    "ShardCorrupt",
    "SharedIndex",
    "ShmLoader",
    "ShmloadError",
    "StateMismatch",
    "StoreError",
    "TokenBudget",
    "Weighted",
    "WorkerDied",
    "sample_info",
    "sample_rng",
    "spawn",
]


_MODULES = ("cluster", "debug", "errors", "formats", "growing", "integrations", "metrics", "pipeline", "remote", "storage")

__getattr__, __dir__ = lazy_names(__name__, {name: _PLACES.get(name, _ERRORS) for name in __all__}, _MODULES)
