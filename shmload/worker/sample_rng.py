"""Randomness that belongs to the sample, not to the worker that happens to decode it.

In seed mode (seed, epoch, index) keys every draw. `sample_rng()` gives the sample's own numpy Generator; with `seed_samples` the
global generators of random, numpy and torch are reseeded from the same key before each sample, so that ordinary augmentations
come out the same for any number of workers, any start method, and after any crash or resume.
"""

from __future__ import annotations

import random
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.permutation import sample_key, sample_key_pair

__all__ = [
    "SampleInfo",
    "begin_many",
    "begin_sample",
    "drew_for_many",
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


class _Watch:
    """What a reading of several samples at once draws: that is no sample's own, and depends on who reads how many of them."""

    def __init__(self, states: tuple[Any, ...] | None, *, can_repeat: bool) -> None:
        self.states = states  # of the global generators before it; None: nobody compares them
        self.can_repeat = can_repeat
        self.has_drawn = False


class _Now(threading.local):
    """The sample that this thread is decoding: (seed, epoch, index, worker), and its generator once it was asked for.

    `watch` is there while several samples are read at once, of which `sample` is the first.
    """

    sample: tuple[int | None, int, int, int] | None = None
    watch: _Watch | None = None
    rng: np.random.Generator | None = None
    last: np.random.Generator | None = None  # of a sample before, to be used again


_now = _Now()


def begin_sample(seed: int | None, epoch: int, index: int, worker: int, *, reseed: bool) -> None:
    """Says which sample comes next; with `reseed` also seeds random, numpy and (if imported) torch from its key."""
    _now.sample = (seed, epoch, index, worker)
    _now.rng = _now.watch = None
    if reseed and seed is not None:
        key = sample_key(seed, epoch, index & 0xFFFFFFFFFFFFFFFF, _GLOBALS_STREAM)
        random.seed(key)
        np.random.seed(
            key & 0xFFFFFFFF
        )  # also forgets half a pair of gaussians, which a bit generator's own seeding does not
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.default_generator.manual_seed(key)


def begin_many(*, can_repeat: bool, compares: bool = False) -> None:
    """Says that with the sample begun last others are read, in one call.

    Args:
        can_repeat: whether they can be read one by one instead, if `drew_for_many` says so.
        compares: whether the global generators count for that, too.
    """
    if _now.sample is not None and _now.sample[0] is not None:
        _now.watch = _Watch(_global_states() if compares else None, can_repeat=can_repeat)


def drew_for_many() -> bool:
    """Whether what was read since `begin_many` has drawn random numbers: then it is to be read again, one by one."""
    watch = _now.watch
    if watch is None:
        return False
    return watch.has_drawn or (watch.states is not None and watch.states != _global_states())


def _global_states() -> tuple[Any, ...]:
    """Where the global generators stand, as what can be compared."""
    numpys: dict[str, Any] = np.random.get_state(legacy=False)
    torch = sys.modules.get("torch")
    torchs = b"" if torch is None else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), numpys["state"]["key"].tobytes(), numpys["state"]["pos"], numpys["has_gauss"], torchs


def end_samples() -> None:
    """Says that no sample is being decoded."""
    _now.sample = _now.rng = _now.watch = None


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


def sample_rng(index: int | None = None) -> np.random.Generator:
    """The generator of the sample being decoded, keyed by (seed, epoch, index).

    The same sample draws the same numbers for any number of workers, start method, crash or resume, and other numbers in other
    epochs. Valid until the next sample. In torch mode (`seed=None`) there is no key: it is seeded from torch's per-worker stream.

    Args:
        index: of the sample to draw for, in a `read_batch_into` or `__getitems__`, which read several: a generator of its own.
            None: the one being decoded. In seed mode a `__getitems__` that asks without an index is asked again, sample by sample.
    Returns:
        the same generator for every call within one sample.
    Raises:
        RuntimeError: called outside a dataset's reading of a sample, or in seed mode by `read_batch_into` without an index.
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
    if index is not None and _now.sample is not None and _now.sample[0] is not None:
        own = sample_key_pair(_now.sample[0], info.epoch, index & 0xFFFFFFFFFFFFFFFF, _OWN_STREAM)
        return np.random.Generator(np.random.Philox(key=np.array(own, np.uint64)))
    if _now.watch is not None:
        if not _now.watch.can_repeat:
            raise RuntimeError(
                "sample_rng() belongs to one sample, and read_batch_into reads several at once: ask for each one's, "
                "sample_rng(index)"
            )
        _now.watch.has_drawn = True
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
