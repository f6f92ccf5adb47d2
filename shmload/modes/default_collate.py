"""Collate samples into private memory without a `collate_fn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shmload.batch.batch_memory import PrivateBatch
from shmload.batch.collate import difference_note, pack_samples
from shmload.batch.ragged import Ragged
from shmload.batch.registered_functions import registered_functions
from shmload.batch.uneven import Uneven
from shmload.batch.unpacking import unpack


def collated(
    samples: Any,
    ragged: Ragged | None,
    *,
    keys: Callable[[], Sequence[Any] | None] | None = None,
    on_uneven: Callable[[Uneven], None] | None = None,
) -> Any:
    """Return the batch of some samples, in private memory.

    Without a rule, this is torch's default collate. With a rule, samples that torch rejects are also accepted.

    Args:
        samples: a list, or the result of the dataset's `__getitems__`.
        ragged: the rule for samples that differ in shape, or None.
        keys: returns the keys of the samples, for errors.
        on_uneven: called if a field is a list because the samples differ.
    """
    packed = None if ragged is None else pack_samples(samples, ragged, registered_functions())
    if packed is not None:
        return unpack(PrivateBatch(packed), on_uneven)
    try:
        return torch.utils.data.default_collate(samples)
    except Exception as error:
        if note := difference_note(samples, None if keys is None else keys()):
            error.add_note(note)
        raise
