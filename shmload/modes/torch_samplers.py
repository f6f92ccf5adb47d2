"""torch's own samplers, read as arrays.

Indices that are Python ints cost more than the rest of a batch of tiny rows. A permutation is drawn whole, by the same calls at the
same moments as in torch, so global generators and `generator` end where torch leaves them; this includes the extra permutation that
an exhausted RandomSampler draws. A sequential sampler's indices are never built, and any position in it is reached at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler

from shmload.torch_names import InfiniteConstantSampler
from shmload.worker.one_thread import randperm


def innermost(index_sampler: Any) -> Any:
    """Return the sampler inside a batch sampler, or the index sampler itself if there is none."""
    return getattr(index_sampler, "sampler", index_sampler)


def own_generator(index_sampler: Any, generator: torch.Generator | None) -> torch.Generator | None:
    """Return the `generator` that a sampler keeps, as torch's samplers do, unless it is the loader's; None if it keeps none.

    Args:
        index_sampler: the loader's index sampler.
        generator: the loader's own generator, if it has one.
    """
    for sampler in (index_sampler, innermost(index_sampler)):
        found = getattr(sampler, "generator", None)
        if isinstance(found, torch.Generator) and found is not generator:
            return found
    return None


def is_endless(index_sampler: Any) -> bool:
    """Return whether this is the sampler that torch uses for an iterable dataset."""
    return isinstance(innermost(index_sampler), InfiniteConstantSampler)


def is_torchs_own(index_sampler: Any) -> bool:
    """Return whether the sampler's indices depend on torch's generators alone."""
    kinds = (type(index_sampler), type(innermost(index_sampler)))
    return all(kind.__module__.startswith("torch.utils.data") for kind in kinds)


def described(index_sampler: Any) -> str | None:
    """Return the kind and the settings of one of torch's own samplers, by which a state recognizes it; None for another sampler."""
    kind = type(index_sampler)
    if kind is BatchSampler:
        return f"BatchSampler({index_sampler.batch_size}, {index_sampler.drop_last}) of {described(index_sampler.sampler)}"
    names = _SETTINGS.get(kind)
    if names is None:
        return None
    settings = {name: getattr(index_sampler, name) for name in names}
    return f"{kind.__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


_SETTINGS: dict[type, tuple[str, ...]] = {
    SequentialSampler: (),
    RandomSampler: ("num_samples", "replacement"),
    WeightedRandomSampler: ("num_samples", "replacement"),
    SubsetRandomSampler: (),
    DistributedSampler: ("num_replicas", "shuffle", "seed", "drop_last"),
}


def batches_of(index_sampler: Any, num_skipped: int = 0) -> Iterator[Any] | None:
    """Return an iterator over the batches of one of torch's own samplers, as arrays; None for another sampler.

    Args:
        index_sampler: the loader's index sampler.
        num_skipped: number of batches to leave out at the beginning.
    """
    if type(index_sampler) is SequentialSampler:  # samples come one by one
        return iter(range(len(index_sampler))[num_skipped:])
    if type(index_sampler) is not BatchSampler:
        return None
    sampler = index_sampler.sampler
    if type(sampler) is SequentialSampler:
        return _slices(index_sampler, None, num_skipped)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return _slices(index_sampler, sampler, num_skipped)
    return None


def _slices(batch_sampler: BatchSampler, random: RandomSampler | None, num_skipped: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches of all indices: in sequence, or in a permutation of `random`, drawn with the first batch as in torch."""
    n, batch_size = len(batch_sampler.sampler), batch_sampler.batch_size  # type: ignore[arg-type]  # both have a length
    generator, permutation = None, None
    if random is not None:
        generator = random.generator
        if generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator()
            generator.manual_seed(seed)
        permutation = randperm(n, generator).numpy()

    def indices(first: int, end: int) -> NDArray[np.int64]:
        return np.arange(first, end) if permutation is None else permutation[first:end]

    for first in range(num_skipped * batch_size, n - batch_size + 1, batch_size):
        yield indices(first, first + batch_size)
    if random is not None and random.generator is not None:
        # torch's sampler draws one more permutation and does not use it, which moves the user's generator
        randperm(n, generator)
    rest = n % batch_size
    if rest and not batch_sampler.drop_last and num_skipped * batch_size < n:
        yield indices(n - rest, n)
