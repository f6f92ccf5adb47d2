"""torch's two usual orders as whole batches of int64, without a Python object per index.

torch's samplers yield one index at a time and its BatchSampler gathers them into lists: 100 us for a batch of 1,024, more
than all else the trainer does. For exactly torch's own RandomSampler (without replacement) or SequentialSampler, in exactly
its own BatchSampler, the same batches are slices of one array. Every draw from a generator comes at the moment at which
torch's code makes it, the one more permutation that RandomSampler draws when it is exhausted included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler


def batches_of(index_sampler: Any) -> Iterator[Any] | None:
    """The sampler's batches as arrays, if it is one of those above; else None."""
    if type(index_sampler) is not BatchSampler:
        return None
    sampler = index_sampler.sampler
    if type(sampler) is SequentialSampler:
        return _slices(index_sampler, None)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return _slices(index_sampler, sampler)
    return None


def _slices(batch_sampler: BatchSampler, random: RandomSampler | None) -> Iterator[NDArray[np.int64]]:
    n, batch_size = len(batch_sampler.sampler), batch_sampler.batch_size  # type: ignore[arg-type]  # both have a length
    generator = None
    if random is None:
        order = np.arange(n)
    else:
        generator = random.generator
        if generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator()
            generator.manual_seed(seed)
        order = torch.randperm(n, generator=generator).numpy()
    for first in range(0, n - batch_size + 1, batch_size):
        yield order[first : first + batch_size]
    if random is not None:
        torch.randperm(n, generator=generator)
    rest = n % batch_size
    if rest and not batch_sampler.drop_last:
        yield order[n - rest :]
