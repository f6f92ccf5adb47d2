"""Collate samples into private memory without a `collate_fn`."""

from __future__ import annotations

from typing import Any

import torch

from shmload.batch.batch_memory import PrivateBatch
from shmload.batch.collate import pack_samples
from shmload.batch.ragged import Ragged
from shmload.batch.registered_functions import registered_functions
from shmload.batch.unpacking import unpack


def collated(samples: Any, ragged: Ragged | None) -> Any:
    """Return the batch of some samples, in private memory.

    Without a rule, this is torch's default collate. With a rule, samples that torch rejects are also accepted.

    Args:
        samples: a list, or the result of the dataset's `__getitems__`.
        ragged: the rule for samples that differ in shape, or None.
    """
    packed = None if ragged is None else pack_samples(samples, ragged, registered_functions())
    return torch.utils.data.default_collate(samples) if packed is None else unpack(PrivateBatch(packed))
