"""The named points of `shmload.faults`, by the process that reaches them."""

from __future__ import annotations

WORKER_POINTS = (
    "start",
    "opening_memory",
    "before_claim",
    "after_claim",
    "mid_decode",
    "before_layout",
    "while_asking_layout",
    "waiting_layout",
    "waiting_grant",
    "before_finish",
    "after_finish",
    "before_post",
    "leaving",
)
HELPER_POINTS = ("visiting",)  # in a worker that has claimed a chunk of another rank's ring
TRAINER_POINTS = (
    "starting",
    "making_memory",
    "publishing",
    "ringing",
    "mapping",
    "releasing",  # in C, when the last alias of a batch dies; armed by `_core.trainer.harm_at_release`
    "replacing",
    "abandoning",
    "epoch_change",
    "closing",
)
STORAGE_POINTS = (  # in any process that uses a cache's folder
    "holding_lock",
    "after_reserve",
    "after_fetch",
    "mid_evict",
    "before_publish",
    "after_publish",
)
PACKER_POINTS = ("claimed", "sending", "shard_sent", "index_sent", "shard_noted", "before_manifest", "after_manifest", "cleaning")
