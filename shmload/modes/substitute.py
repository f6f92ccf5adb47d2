"""The substitute for a bad sample when a sampler decides the order."""

from __future__ import annotations

import numpy as np

from shmload._core.trainer import Order
from shmload.engine.config import LoaderConfig


def next_of_dataset(config: LoaderConfig, order: Order, row: int) -> int:
    """The index that takes a bad sample's place where a sampler orders: the dataset's next.

    Raises:
        TypeError: the sampler gives keys.
    """
    ordered = order.indices[row]
    if not isinstance(ordered, int | np.integer):
        raise TypeError(f'on_error="substitute" needs integer indices: the sampler gave {ordered!r}. Use "skip"')
    return (int(ordered) + 1) % len(config.dataset)
