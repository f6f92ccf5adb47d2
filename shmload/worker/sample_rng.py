"""Randomness that belongs to the sample, not to the worker that happens to decode it.

In seed mode (seed, epoch, index) keys every draw. `sample_rng()` gives the sample's own numpy Generator; with `seed_samples` the
global generators of random, numpy and torch are reseeded from the same key before each sample, so that ordinary augmentations
come out the same for any number of workers, any start method, and after any crash or resume.
"""

from __future__ import annotations

import random
import sys
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.permutation import sample_key, sample_key_pair

__all__ = [
    "SampleInfo",
    "begin_sample",
    "end_samples",
    "kept_generators",
    "sample_info",
    "sample_rng",
    "seed_and_epoch",
]

_OWN_STREAM = 0  # keys sample_rng()
_GLOBALS_STREAM = 1  # keys the reseeded global generators
_ZEROS = np.zeros(4, np.uint64)
_UNKEPT = 3  # references to a generator that only this module has: _now.last, a local variable, an argument


class SampleInfo(NamedTuple):
    """Which sample is being decoded: its epoch, its index (-1 if the sampler's key is no integer), and by which worker."""

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
    worker: int


class _Now(threading.local):
    """The sample that this thread is decoding: (seed, epoch, index, worker), and its generator once it was asked for."""

    sample: tuple[int | None, int, int, int] | None = None
    rng: np.random.Generator | None = None
    last: np.random.Generator | None = None  # of a sample before, to be used again


_now = _Now()


def begin_sample(seed: int | None, epoch: int, index: int, worker: int, *, reseed: bool) -> None:
    """Says which sample comes next; with `reseed` also seeds random, numpy and (if imported) torch from its key."""
    _now.sample = (seed, epoch, index, worker)
    _now.rng = None
    if reseed and seed is not None:
        key = sample_key(seed, epoch, index & 0xFFFFFFFFFFFFFFFF, _GLOBALS_STREAM)
        random.seed(key)
        np.random.seed(
            key & 0xFFFFFFFF
        )  # also forgets half a pair of gaussians, which a bit generator's own seeding does not
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.default_generator.manual_seed(key)


def end_samples() -> None:
    """Says that no sample is being decoded."""
    _now.sample = _now.rng = None


def sample_info() -> SampleInfo:
    """The sample being decoded, for datasets that want to know.

    Returns:
        (epoch, index, worker): index is -1 if the sampler's key is no integer, worker 0 where the trainer reads itself.
    Raises:
        RuntimeError: called outside a dataset's reading of a sample.
    """
    if _now.sample is None:
        raise RuntimeError("sample_info() and sample_rng() answer only while a ShmLoader reads a sample of its dataset")
    return SampleInfo(*_now.sample[1:])


def seed_and_epoch() -> tuple[int | None, int] | None:
    """Seed and epoch of the sample that this thread is decoding, or of the batch; None: no loader of ours is reading."""
    return None if _now.sample is None else _now.sample[:2]


def sample_rng() -> np.random.Generator:
    """The generator of the sample being decoded, keyed by (seed, epoch, index).

    The same sample draws the same numbers for any number of workers, start method, crash or resume, and other numbers in other
    epochs. Valid until the next sample. In torch mode (`seed=None`) there is no key: it is seeded from torch's per-worker stream.

    Returns:
        the same generator for every call within one sample.
    Raises:
        RuntimeError: called outside a dataset's reading of a sample.
    Example:
        >>> from shmload import ShmLoader, sample_rng
        >>> class Noise:
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return sample_rng().standard_normal(2)
        >>> first, again = (next(iter(ShmLoader(Noise(), batch_size=4, seed=7, num_workers=0))) for _ in range(2))
        >>> (first == again).all().item()
        True
    """
    info = sample_info()
    if _now.rng is None:
        assert _now.sample is not None
        seed = _now.sample[0]
        if seed is None:
            key = random.getrandbits(64), random.getrandbits(64)
        else:
            key = sample_key_pair(seed, info.epoch, info.index & 0xFFFFFFFFFFFFFFFF, _OWN_STREAM)
        _now.rng = _now.last = _generator(np.array(key, np.uint64))
    return _now.rng


def _generator(key: NDArray[np.uint64]) -> np.random.Generator:
    """A generator at the start of a key's stream: the thread's last one unless someone has kept it, as a new one costs 8 us."""
    last = _now.last
    if last is None or sys.getrefcount(last) > _UNKEPT:
        return np.random.Generator(np.random.Philox(key=key))
    last.bit_generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": _ZEROS, "key": key},
        "buffer": _ZEROS,
        "buffer_pos": len(_ZEROS),  # nothing in it
        "has_uint32": 0,
        "uinteger": 0,
    }
    return last


class kept_generators:  # noqa: N801  # a context manager, used like a function
    """Restores the trainer's own global generators: reading in the trainer (`num_workers=0`) must not disturb them."""

    def __enter__(self) -> None:
        torch = sys.modules.get("torch")
        self._states = (random.getstate(), np.random.get_state(), torch.get_rng_state() if torch else None)

    def __exit__(self, *exc: object) -> None:
        state, numpy_state, torch_state = self._states
        random.setstate(state)
        np.random.set_state(numpy_state)
        if torch_state is not None:
            sys.modules["torch"].set_rng_state(torch_state)
