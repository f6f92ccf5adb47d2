"""The substitute for a bad sample when a sampler chooses the samples."""

from __future__ import annotations

import numpy as np

from shmload._core.trainer import Order
from shmload.engine.config import LoaderConfig


def next_of_dataset(config: LoaderConfig, order: Order, row: int) -> int:
    """Return the index that follows a bad sample's in the dataset.

    Args:
        config: the loader's arguments.
        order: the order of the batch.
        row: the row of the bad sample.

    Raises:
        TypeError: the sampler yields keys that are not integers.
    """
    index = order.indices[row]
    if not isinstance(index, int | np.integer):
        raise TypeError(f'on_error="substitute" needs integer indices: the sampler gave {index!r}. Use "skip"')
    return (int(index) + 1) % len(config.dataset)
