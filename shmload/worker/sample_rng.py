"""Give each sample its own random numbers, independent of the worker that decodes it.

In seed mode every draw is keyed by (seed, epoch, index). `sample_rng()` returns the sample's own numpy Generator. With
`seed_samples` the global generators of random, numpy and torch are reseeded before each sample (reseeding.py), and so are the
generators inside the dataset (own_generators.py). So ordinary augmentations give the same result with any number of workers, any
start method, and after any crash or resume.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from shmload._core.permutation import sample_key_pair
from shmload._core.twister import LEAST_INDEX, index_of, rekey_philox
from shmload.worker.generator_set import GeneratorSet, use_set
from shmload.worker.own_generators import OwnGenerators, philox_place
from shmload.worker.reseeding import GlobalGenerators

_OWN_STREAM = 0  # stream of sample_rng(); 1 is the stream of the global generators (reseeding.py)
_ZEROS = np.zeros(4, np.uint64)
# getrefcount of a generator that only this module holds: `_ThreadState.rng` and the argument; Python 3.14 counts no locals
_UNKEPT = 2


class NoSampleError(RuntimeError):
    """`sample_info()` or `sample_rng()` was called while no sample is being read."""


def _unread() -> NoSampleError:
    return NoSampleError(
        "sample_info() and sample_rng() can be called only while a ShmLoader reads a sample; "
        "shmload.debug.read(dataset, index) reads one alone"
    )


class SampleInfo(NamedTuple):
    """The identity of the sample that is being decoded.

    Attributes:
        epoch: epoch of the pass.
        index: index of the sample, -1 if the sampler's key is not an integer.
        worker: number of the worker that decodes it.
    """

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    worker: int


Sample: TypeAlias = tuple[int | None, int, int, int]  # seed, epoch, index (as `index_of` returns it), worker


class CurrentReading(Protocol):
    """A reader of samples, which computes the identity of the current sample only on request."""

    @property
    def begun(self) -> object:
        """Return an object that differs for each sample, or group of samples, that is started; false if none is."""

    def sample(self) -> Sample: ...

    def own_key(self) -> tuple[int, int] | None:
        """Return the key of the sample's generator in torch mode; None if it is drawn from the worker's stream."""


@dataclass
class _DrawWatch:
    """A watch for draws while several samples are read at once. Such draws belong to no sample, and depend on the batch size."""

    begun: object  # identifies the reading, as `CurrentReading.begun`
    # states of the global generators and the dataset's own, before the reading; None if they are not compared
    states: tuple[Any, ...] | None
    can_repeat: bool
    own: OwnGenerators | None
    has_drawn: bool = False


class _SingleReading:
    """A reading of one sample."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    @property
    def begun(self) -> object:
        return self

    def sample(self) -> Sample:
        return self._sample

    def own_key(self) -> None:
        return None


class _KeyMap:
    """A map from the indices by which a dataset asks for generators to the keys of the samples."""

    def __init__(self, indices: Any, keys: Any) -> None:
        self._made_of = indices, keys
        self._key_of: dict[int, int] | None = None  # most datasets never ask

    def key(self, index: int) -> int:
        if self._key_of is None:
            indices, keys = (np.asarray(each).tolist() for each in self._made_of)
            self._key_of = dict(zip(indices, keys, strict=True))
        return self._key_of.get(index, index)


@dataclass(slots=True)
class _ThreadState:
    """The state of one thread: its current reading, and the sample's generator if it was requested.

    While several samples are read at once, `watch` exists, and `reading` has the identity of the first of them.
    """

    reading: CurrentReading | None = None
    watch: _DrawWatch | None = None
    rng: np.random.Generator | None = None
    rng_of: object = None  # the sample of the generator, as `CurrentReading.begun`
    rng_at: int | None = None  # address of the generator's memory; 0 if it cannot be known, None before the search
    keyed: _KeyMap | None = None
    generators: GlobalGenerators | None = None  # seeds those that this thread's plain calls draw from; None for the process's


class _Threads(threading.local):
    """The state of this thread. Looking it up costs more than anything else here, so each function does it once."""

    def __init__(self) -> None:
        self.now = _ThreadState()


_threads = _Threads()


@dataclass
class _TaskPart:
    """A part of a sample that one of several tasks makes while others wait."""

    begun: object  # identifies the sample, as `CurrentReading.begun`
    key: Any
    rng: np.random.Generator | None = None


_part: ContextVar[_TaskPart | None] = ContextVar("shmload_part", default=None)


def begin_part(key: Any) -> None:
    """Let `sample_rng()` return a generator of its own in this asyncio task and those that it starts, until the sample ends.

    Args:
        key: identifies the part within the sample; numbers, text and tuples of them are the same in every process.
    """
    reading = _threads.now.reading
    if reading is not None and reading.begun and reading.sample()[0] is not None:
        _part.set(_TaskPart(reading.begun, key))


_of_process = GlobalGenerators()


def global_generators() -> GlobalGenerators:
    """Return the seeder of the generators that this thread's plain calls draw from."""
    return _threads.now.generators or _of_process


def use_generators(generators: GeneratorSet) -> None:
    """Let this thread draw from a set, and seed it before each sample.

    Args:
        generators: the set.
    """
    use_set(generators)
    _threads.now.generators = GlobalGenerators(generators)


def begin_reading(reading: CurrentReading) -> None:
    """Set the reader of the samples that follow.

    Args:
        reading: the reader.
    """
    _threads.now.reading = reading


class reading_of:  # noqa: N801  # used like contextlib.suppress; a generator would take 0.5 us longer
    """A context that sets the reader of a batch's samples, and restores the previous one.

    There may be a previous one because samples may read batches of other loaders.
    """

    __slots__ = ("_keyed", "_now", "_outer", "_reading")

    def __init__(self, reading: CurrentReading) -> None:
        self._reading = reading

    def __enter__(self) -> None:
        now = self._now = _threads.now
        self._outer = None if now.reading is None else (now.reading, now.watch, now.rng, now.rng_of, now.rng_at)
        self._keyed = now.keyed
        now.reading, now.watch, now.keyed = self._reading, None, None

    def __exit__(self, *_: object) -> None:
        now = self._now
        now.keyed = self._keyed
        if self._outer is None:
            now.reading = now.watch = None
        else:
            now.reading, now.watch, now.rng, now.rng_of, now.rng_at = self._outer


def begin_sample(
    seed: int | None,
    epoch: int,
    index: int,
    worker: int,
    *,
    reseed: bool,
    keys: list[Any] | None = None,
    row: int = 0,
    own: OwnGenerators | None = None,
) -> None:
    """Start a sample. With `reseed`, also seed random, numpy and torch, if imported, from its key.

    Args:
        seed: seed of the loader; None in torch mode.
        epoch: epoch of the pass.
        index: index of the sample.
        worker: number of the worker.
        reseed: whether to seed the global generators.
        keys: keys of the samples that are read together, so that the following ones can be prepared.
        row: row of this sample among them.
        own: the dataset's own generators, which are keyed along with the global ones.
    """
    _threads.now.reading = _SingleReading((seed, epoch, index, worker))
    if reseed and seed is not None:
        global_generators().begin(seed, epoch, index, keys, row)
        if own is not None:
            own.begin(seed, epoch, index)


def begin_many(*, can_repeat: bool, compares: bool = False, own: OwnGenerators | None = None) -> None:
    """Record that further samples are read in one call together with the sample that was started last.

    Args:
        can_repeat: whether they can be read again one by one, if `drew_between_samples` returns True.
        compares: whether draws from the global generators and from `own` count, and not only those of `sample_rng()`.
        own: the dataset's own generators.
    """
    now = _threads.now
    reading = now.reading
    if reading is not None and reading.sample()[0] is not None:
        now.watch = _DrawWatch(reading.begun, _states(own) if compares else None, can_repeat, own)


@contextmanager
def keyed_by(indices: Any, keys: Any) -> Iterator[None]:
    """Make `sample_rng(index)` use the sample's key in place of the index, for a dataset that is read by indices of its own.

    Args:
        indices: indices of the samples that are read.
        keys: their keys, in the same order.
    """
    now = _threads.now
    outer, now.keyed = now.keyed, _KeyMap(indices, keys)
    try:
        yield
    finally:
        now.keyed = outer


def drew_between_samples() -> bool:
    """Return whether reading since `begin_many` has drawn random numbers, so that the samples must be read again one by one."""
    watch = _watch(_threads.now)
    if watch is None:
        return False
    return watch.has_drawn or (watch.states is not None and watch.states != _states(watch.own))


def _watch(now: _ThreadState) -> _DrawWatch | None:
    """Return the watch of the current reading."""
    watch, reading = now.watch, now.reading
    return watch if watch is not None and reading is not None and watch.begun == reading.begun else None


def _states(own: OwnGenerators | None) -> tuple[Any, ...]:
    """Return comparable states of the global generators and the dataset's own."""
    owns = None if own is None else own.states()
    generators = global_generators()
    if generators.reseeder.are_as_seeded():  # because their states have 10 KB and take 60 us to read
        return generators.reseeder.key, owns
    return *global_states(), owns


def global_states() -> tuple[Any, ...]:
    """Return comparable states of the generators that this thread's plain calls draw from, without changing them."""
    generators = global_generators().set
    numpys: Any = generators.numpy.get_state(legacy=False)
    torch_state = generators.torch_state()
    torchs = b"" if torch_state is None else torch_state.numpy().tobytes()
    words = numpys["state"]["key"].tobytes(), numpys["state"]["pos"], numpys["has_gauss"]
    return generators.python.getstate(), words, torchs


def end_samples() -> None:
    """Record that no sample is being decoded."""
    now = _threads.now
    now.reading = now.watch = None


def key_in_pass(base_seed: int, step: int, row: int) -> tuple[int, int]:
    """Return the key of a sample's generator in torch mode without workers, where no stream belongs to the loader.

    Args:
        base_seed: seed of the pass, which torch draws from its generator, and from which it seeds workers.
        step: number of the batch in the pass.
        row: row of the sample in the batch; -1 if several are read at once.
    """
    return sample_key_pair(base_seed & 0xFFFFFFFFFFFFFFFF, step, row & 0xFFFFFFFFFFFFFFFF, _OWN_STREAM)


def sample_info() -> SampleInfo:
    """Return the identity of the sample that is being decoded.

    Returns:
        (epoch, index, worker): index is -1 if the sampler's key is not an integer; worker is 0 if the trainer reads without
        workers.
    Raises:
        RuntimeError: called while no sample is being read.
    """
    _, epoch, index, worker = _sample()
    return SampleInfo(epoch, -1 if index < LEAST_INDEX else index, worker)


def _sample() -> Sample:
    reading = _threads.now.reading
    if reading is None or not reading.begun:
        raise _unread()
    return reading.sample()


def seed_and_epoch() -> tuple[int | None, int] | None:
    """Return (seed, epoch) of the sample or batch that this thread is decoding; None if no ShmLoader is reading in this thread."""
    reading = _threads.now.reading
    return None if reading is None or not reading.begun else reading.sample()[:2]


def sample_rng(index: int | None = None) -> np.random.Generator:
    """Return the generator of the sample that is being decoded, keyed by (seed, epoch, index).

    A sample draws the same numbers for any number of workers, start method, crash or resume, and other numbers in other epochs. The
    generator is valid until the next sample. In torch mode (`seed=None`) it is seeded from torch's per-worker stream instead, and
    without workers from the base seed of the pass, which torch draws as for workers, so `torch.manual_seed` sets the numbers.

    Args:
        index: index of the sample, in a `read_batch_into` or `__getitems__`, which read several samples. None is the sample that is
            being decoded. In seed mode a `__getitems__` that asks without an index is called again for each sample.
    Returns:
        the same generator for every call within one sample.
    Raises:
        RuntimeError: called while no sample is being read, or in seed mode by `read_batch_into` without an index.
    Example:
        >>> from shmload import ShmLoader, sample_rng
        >>> class Noise:
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return sample_rng().standard_normal(2)
        >>> loaders = [ShmLoader(Noise(), batch_size=4, seed=7) for _ in range(2)]
        >>> first, again = (next(iter(loader)) for loader in loaders)
        >>> (first == again).all().item()
        True
    """
    now = _threads.now
    reading = now.reading
    begun = None if reading is None else reading.begun
    if reading is None or not begun:
        raise _unread()
    if index is not None:
        seed, epoch, _, _ = reading.sample()
        if seed is not None:
            index = int(index)  # numpy integers do not accept the mask
            index = index if now.keyed is None else now.keyed.key(index)
            own = sample_key_pair(seed, epoch, index & 0xFFFFFFFFFFFFFFFF, _OWN_STREAM)
            return np.random.Generator(np.random.Philox(key=np.array(own, np.uint64)))
    part = _part.get()
    if part is not None and part.begun == begun:
        if part.rng is None:
            seed, epoch, of, _ = reading.sample()
            own = sample_key_pair(seed or 0, epoch, index_of((of, part.key)) & 0xFFFFFFFFFFFFFFFF, _OWN_STREAM)
            part.rng = np.random.Generator(np.random.Philox(key=np.array(own, np.uint64)))
        return part.rng
    watch = now.watch and _watch(now)
    if watch is not None:
        if not watch.can_repeat:
            raise RuntimeError(
                "sample_rng() needs an index in read_batch_into, which reads several samples at once: call sample_rng(index)"
            )
        watch.has_drawn = True
    if now.rng is None or now.rng_of != begun:
        seed, epoch, of, _ = reading.sample()
        if seed is None:
            python = global_generators().set.python
            key = reading.own_key() or (python.getrandbits(64), python.getrandbits(64))
        else:
            key = sample_key_pair(seed, epoch, of & 0xFFFFFFFFFFFFFFFF, _OWN_STREAM)
        now.rng, now.rng_of = _generator(now, *key), begun
    return now.rng


def _generator(now: _ThreadState, first: int, second: int) -> np.random.Generator:
    """Return a generator at the start of a key's stream.

    The thread's last generator is reused unless other code has kept it, because a new one costs 8 us. numpy's own setter takes 3
    us, so its memory is written directly if its layout is known.
    """
    if now.rng is None or sys.getrefcount(now.rng) > _UNKEPT:
        now.rng_at = None
        return np.random.Generator(np.random.Philox(key=np.array([first, second], np.uint64)))
    last = now.rng
    if now.rng_at is None:
        bits: Any = last.bit_generator
        now.rng_at = philox_place(bits)
    if now.rng_at:
        rekey_philox(now.rng_at, first, second)
        return last
    last.bit_generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": _ZEROS, "key": np.array([first, second], np.uint64)},
        "buffer": _ZEROS,
        "buffer_pos": len(_ZEROS),  # the buffer is empty
        "has_uint32": 0,
        "uinteger": 0,
    }
    return last


@contextmanager
def sample_of(
    seed: int, epoch: int, index: int, worker: int, *, keys: list[Any] | None = None, row: int = 0, own: OwnGenerators | None = None
) -> Iterator[None]:
    """Let the block read a sample with a key of its own inside another sample, which is the current one again afterward.

    The global generators and `own` are seeded for the inner sample, and are not restored. Arguments are those of `begin_sample`.
    """
    with reading_of(_SingleReading((seed, epoch, index, worker))):
        begin_sample(seed, epoch, index, worker, reseed=True, keys=keys, row=row, own=own)
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators after the block, so that reading in the trainer (`num_workers=0`) does not change its draws."""
    generators = global_generators()
    own = generators.set
    put_pythons_back, put_numpys_back, torchs = generators.keep_pythons(), generators.keep_numpys(), own.torch_state()
    try:
        yield
    finally:
        put_pythons_back()
        put_numpys_back()
        if torchs is not None:
            own.torch_home.default_generator.set_state(torchs)
