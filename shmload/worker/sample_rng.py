"""Randomness that belongs to the sample, not to the worker that happens to decode it.

In seed mode (seed, epoch, index) keys every draw. `sample_rng()` gives the sample's own numpy Generator; with `seed_samples` the
global generators of random, numpy and torch are reseeded from the same key before each sample (reseeding.py), and those that the
dataset keeps for itself from keys of their own (own_generators.py), so that ordinary augmentations come out the same for any number
of workers, any start method, and after any crash or resume.

Where a worker's global generators stand, in a few bytes each, and back to there.

random, numpy and torch all hold a Mersenne Twister: 624 words and a place among them. Written out, that is 2.5 KB for each
generator of each worker. But a worker's words follow from its seed by so many whole renewals ("blocks") of the 624 words, so a
state need only say how many. A dataset that seeds a generator itself leaves that line; then its words are written out.

Source: M. Matsumoto, T. Nishimura, Mersenne Twister (1998). All three renew their words by its recurrence.
"""

from __future__ import annotations

import base64
import ctypes
import logging
import random
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from shmload._core.permutation import sample_key_pair
from shmload._core.twister import rekey_philox
from shmload.worker.own_generators import OwnGenerators, philox_place
from shmload.worker.reseeding import GlobalGenerators

_OWN_STREAM = 0  # keys sample_rng(); 1 keys the global generators (reseeding.py)
_ZEROS = np.zeros(4, np.uint64)
_UNKEPT = 2  # references to a generator that only this module has: `_Now.rng`, the argument; a local is none since Python 3.14
_UNREAD = "sample_info() and sample_rng() answer only while a ShmLoader reads a sample of its dataset"


class SampleInfo(NamedTuple):
    """Which sample is being decoded: its epoch, its index (-1 if the sampler's key is no integer), and by which worker."""

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
    worker: int


Sample: TypeAlias = tuple[int | None, int, int, int]  # seed, epoch, index, worker


class CurrentReading(Protocol):
    """Who reads samples one after another: it is asked for the sample only when somebody wants to know."""

    @property
    def begun(self) -> object:
        """Another one for each sample, or reading of several, that is begun; false: none is."""

    def sample(self) -> Sample: ...


@dataclass
class _Watch:
    """What a reading of several samples at once draws: that is no sample's own, and depends on who reads how many of them."""

    begun: object  # which reading
    states: tuple[Any, ...] | None  # of the global generators and the dataset's own before it; None: nobody compares them
    can_repeat: bool
    own: OwnGenerators | None
    has_drawn: bool = False


class _One:
    """The reading of one sample."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    @property
    def begun(self) -> object:
        return self

    def sample(self) -> Sample:
        return self._sample


class _Keyed:
    """Which samples are meant by the indices that a reading of several asks for random numbers by."""

    def __init__(self, indices: Any, keys: Any) -> None:
        self._made_of = indices, keys
        self._key_of: dict[int, int] | None = None  # most datasets never ask

    def key(self, index: int) -> int:
        if self._key_of is None:
            indices, keys = (np.asarray(each).tolist() for each in self._made_of)
            self._key_of = dict(zip(indices, keys, strict=True))
        return self._key_of.get(index, index)


@dataclass(slots=True)
class _Now:
    """What a thread is reading, and the generator of a sample once it was asked for.

    `watch` is of a reading of several samples at once, whose first is the sample.
    """

    reading: CurrentReading | None = None
    watch: _Watch | None = None
    rng: np.random.Generator | None = None
    rng_of: object = None  # which sample's it is, as `CurrentReading.begun`
    rng_at: int | None = None  # where it keeps what it holds; 0: not known, None: not looked for
    keyed: _Keyed | None = None


class _Threads(threading.local):
    """`now` is this thread's: a look-up that costs more than all others, so that each function does it once."""

    def __init__(self) -> None:
        self.now = _Now()


_threads = _Threads()
generators = GlobalGenerators()
seed_globals = generators.begin


def begin_reading(reading: CurrentReading) -> None:
    """Says who reads the samples that come next."""
    _threads.now.reading = reading


@contextmanager
def reading_of(reading: CurrentReading) -> Iterator[None]:
    """Says who reads the samples of a batch. A sample may itself read another loader's batches, and goes on drawing after that."""
    now = _threads.now
    outer = None if now.reading is None else (now.reading, now.watch, now.rng, now.rng_of, now.rng_at)
    keyed = now.keyed
    now.reading, now.watch, now.keyed = reading, None, None
    try:
        yield
    finally:
        now.keyed = keyed
        if outer is None:
            end_samples()
        else:
            now.reading, now.watch, now.rng, now.rng_of, now.rng_at = outer


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
    """Says which sample comes next; with `reseed` also seeds random, numpy and (if imported) torch from its key.

    Args:
        keys: of the samples that are read with it, which is at `row`: the next ones are prepared for.
        own: the dataset's generators, which are keyed with the global ones.
    """
    _threads.now.reading = _One((seed, epoch, index, worker))
    if reseed and seed is not None:
        seed_globals(seed, epoch, index, keys, row)
        if own is not None:
            own.begin(seed, epoch, index)


def begin_many(*, can_repeat: bool, compares: bool = False, own: OwnGenerators | None = None) -> None:
    """Says that with the sample begun last others are read, in one call.

    Args:
        can_repeat: whether they can be read one by one instead, if `drew_for_many` says so.
        compares: whether the global generators count for that, too, and `own`, those of the dataset.
    """
    now = _threads.now
    reading = now.reading
    if reading is not None and reading.sample()[0] is not None:
        now.watch = _Watch(reading.begun, _states(own) if compares else None, can_repeat, own)


@contextmanager
def keyed_by(indices: Any, keys: Any) -> Iterator[None]:
    """Has `sample_rng(index)` draw what the sample of another key draws: for a dataset that is read by indices of its own.

    Args:
        indices, keys: of the samples that are read, in the same order.
    """
    now = _threads.now
    now.keyed = _Keyed(indices, keys)
    try:
        yield
    finally:
        now.keyed = None


def drew_for_many() -> bool:
    """Whether what was read since `begin_many` has drawn random numbers: then it is to be read again, one by one."""
    watch = _watch(_threads.now)
    if watch is None:
        return False
    return watch.has_drawn or (watch.states is not None and watch.states != _states(watch.own))


def _watch(now: _Now) -> _Watch | None:
    """Of what is being read now."""
    watch, reading = now.watch, now.reading
    return watch if watch is not None and reading is not None and watch.begun == reading.begun else None


def _states(own: OwnGenerators | None) -> tuple[Any, ...]:
    """Where the global generators stand and the dataset's own, as what can be compared."""
    owns = None if own is None else own.states()
    if generators.reseeder.are_as_seeded():  # whose states are 10 KB, and take 60 us to get
        return generators.reseeder.key, owns
    numpys: dict[str, Any] = np.random.get_state(legacy=False)
    torch = sys.modules.get("torch")
    torchs = b"" if torch is None else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), numpys["state"]["key"].tobytes(), numpys["state"]["pos"], numpys["has_gauss"], torchs, owns


def end_samples() -> None:
    """Says that no sample is being decoded."""
    now = _threads.now
    now.reading = now.watch = None


def sample_info() -> SampleInfo:
    """The sample being decoded, for datasets that want to know.

    Returns:
        (epoch, index, worker): index is -1 if the sampler's key is no integer, worker 0 where the trainer reads itself.
    Raises:
        RuntimeError: called outside a dataset's reading of a sample.
    """
    return SampleInfo(*_sample()[1:])


def _sample() -> Sample:
    reading = _threads.now.reading
    if reading is None or not reading.begun:
        raise RuntimeError(_UNREAD)
    return reading.sample()


def seed_and_epoch() -> tuple[int | None, int] | None:
    """Seed and epoch of the sample that this thread is decoding, or of the batch; None: no loader of ours is reading."""
    reading = _threads.now.reading
    return None if reading is None or not reading.begun else reading.sample()[:2]


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
    now = _threads.now
    reading = now.reading
    begun = None if reading is None else reading.begun
    if reading is None or not begun:
        raise RuntimeError(_UNREAD)
    if index is not None:
        seed, epoch, _, _ = reading.sample()
        if seed is not None:
            index = int(index)  # of an array it is numpy's, which does not take the mask
            index = index if now.keyed is None else now.keyed.key(index)
            own = sample_key_pair(seed, epoch, index & 0xFFFFFFFFFFFFFFFF, _OWN_STREAM)
            return np.random.Generator(np.random.Philox(key=np.array(own, np.uint64)))
    watch = now.watch and _watch(now)
    if watch is not None:
        if not watch.can_repeat:
            raise RuntimeError(
                "sample_rng() belongs to one sample, and read_batch_into reads several at once: ask for each one's, "
                "sample_rng(index)"
            )
        watch.has_drawn = True
    if now.rng is None or now.rng_of != begun:
        seed, epoch, of, _ = reading.sample()
        if seed is None:
            key = random.getrandbits(64), random.getrandbits(64)
        else:
            key = sample_key_pair(seed, epoch, of & 0xFFFFFFFFFFFFFFFF, _OWN_STREAM)
        now.rng, now.rng_of = _generator(now, *key), begun
    return now.rng


def _generator(now: _Now, first: int, second: int) -> np.random.Generator:
    """A generator at the start of a key's stream: the thread's last one unless someone has kept it, as a new one costs 8 us.

    numpy's own setter takes 3 us, so its memory is written where that is known to be right.
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
        "buffer_pos": len(_ZEROS),  # nothing in it
        "has_uint32": 0,
        "uinteger": 0,
    }
    return last


@contextmanager
def sample_of(seed: int, epoch: int, index: int, worker: int, *, own: OwnGenerators | None = None) -> Iterator[None]:
    """Reads what has a key of its own inside of another sample, which goes on behind it; generators stay where they are then."""
    now = _threads.now
    outer = now.reading
    begin_sample(seed, epoch, index, worker, reseed=True, own=own)
    try:
        yield
    finally:
        now.reading = outer


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the trainer's own global generators: reading in the trainer (`num_workers=0`) must not disturb them."""
    torch = sys.modules.get("torch")
    pythons, put_numpys_back, torchs = random.getstate(), generators.keep_numpys(), torch.get_rng_state() if torch else None
    try:
        yield
    finally:
        random.setstate(pythons)
        put_numpys_back()
        if torchs is not None:
            sys.modules["torch"].set_rng_state(torchs)


log = logging.getLogger("shmload")

NUM_WORDS = 624
BLOCKS_MAX = 4096  # renewals looked for between two looks: 2.5 million draws, 12 ms
REPLAY_MAX = 1 << 20  # renewals a resume may cost, a second and a half
Rest = list[Any]  # what a generator holds beside its words: JSON-able


def _view_of(generator: np.random.MT19937) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The generator's own 624 words and its place among them."""
    address = generator.ctypes.state_address
    assert isinstance(address, int)
    return np.ctypeslib.as_array((ctypes.c_uint32 * (NUM_WORDS + 1)).from_address(address))


class _Line:
    """The words that follow from some first ones, block by block."""

    def __init__(self, words: bytes) -> None:
        self._twister = np.random.MT19937()
        self._words = _view_of(self._twister)[:NUM_WORDS]
        self._place = _view_of(self._twister)[NUM_WORDS:]
        self._words[:] = np.frombuffer(words, np.uint32)
        self._place[0] = NUM_WORDS
        self.words = words
        self.num_blocks = 0
        self.is_left = False

    def follow(self, words: bytes) -> None:
        """Goes on to these words, or notes that they are not on the line."""
        limit = self.num_blocks + BLOCKS_MAX
        while self.words != words and not self.is_left:
            self.skip(1)
            self.is_left = self.num_blocks > limit
        self.words = words

    def skip(self, num_blocks: int) -> None:
        """Goes on by so many renewals."""
        for _ in range(num_blocks):
            self._twister.random_raw(NUM_WORDS, output=False)
        self.num_blocks += num_blocks
        self.words = self._words.tobytes()


def _numpys_own() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, but missing in numpy's stubs


class _Random:
    """Python's random. Its words are looked at where they lie, behind the object's head; asking for them takes 6 us."""

    def __init__(self) -> None:
        self._generator: Any = random.seed.__self__  # type: ignore[attr-defined]  # a method of the global one
        view = np.ctypeslib.as_array((ctypes.c_uint32 * (NUM_WORDS + 1)).from_address(id(self._generator) + 16))
        numbers = random.getstate()[1]
        self._view = view if view.tolist() == [numbers[-1], *numbers[:-1]] else None  # another interpreter may differ

    def read(self) -> tuple[bytes, Rest]:
        _, numbers, gauss = random.getstate()
        return np.array(numbers[:-1], np.uint32).tobytes(), [numbers[-1], gauss]

    def has_moved(self, words: bytes, rest: Rest) -> bool:
        if self._view is not None:
            return (
                int(self._view[0]) != rest[0]
                or self._generator.gauss_next != rest[1]
                or int(self._view[1]) != int.from_bytes(words[:4], sys.byteorder)
            )
        _, numbers, gauss = random.getstate()
        return [numbers[-1], gauss] != rest or numbers[0] != int.from_bytes(words[:4], sys.byteorder)

    def write(self, words: bytes, rest: Rest) -> None:
        random.setstate((3, (*np.frombuffer(words, np.uint32).tolist(), rest[0]), rest[1]))


class _Numpy:
    """numpy's global RandomState."""

    def __init__(self) -> None:
        self._generator = _numpys_own()  # kept alive for its view
        self._view = _view_of(self._generator)

    def read(self) -> tuple[bytes, Rest]:
        _, words, place, has_gauss, gauss = np.random.get_state()
        return np.asarray(words, np.uint32).tobytes(), [int(place), int(has_gauss), float(gauss)]

    def has_moved(self, words: bytes, rest: Rest) -> bool:
        # rest[1]: half a pair of gaussians is left, and would be drawn without a word being used
        return (
            bool(rest[1]) or int(self._view[NUM_WORDS]) != rest[0] or int(self._view[0]) != int.from_bytes(words[:4], sys.byteorder)
        )

    def write(self, words: bytes, rest: Rest) -> None:
        np.random.set_state(("MT19937", np.frombuffer(words, np.uint32), *rest))


class _Torch:
    """torch's CPU generator, whose state is bytes: 24 of head, 624 words of 8, and a tail."""

    def __init__(self) -> None:
        self._torch = sys.modules["torch"]
        self._last = b""

    def _parts(self) -> tuple[bytes, bytes]:
        state = self._last = self._torch.get_rng_state().numpy().tobytes()
        return state[24 : 24 + 8 * NUM_WORDS], state[:24] + state[24 + 8 * NUM_WORDS :]

    def read(self) -> tuple[bytes, Rest]:
        words, rest = self._parts()
        return np.frombuffer(words, np.uint64).astype(np.uint32).tobytes(), [base64.b64encode(rest).decode()]

    def has_moved(self, words: bytes, rest: Rest) -> bool:
        return bool(self._torch.get_rng_state().numpy().tobytes() != self._last)

    def write(self, words: bytes, rest: Rest) -> None:
        torch = self._torch
        around = base64.b64decode(rest[0])
        wide = np.frombuffer(words, np.uint32).astype(np.uint64).tobytes()
        torch.set_rng_state(torch.frombuffer(bytearray(around[:24] + wide + around[24:]), dtype=torch.uint8))


class Streams:
    """The global generators of this process, followed from where they stand now (after seeding and worker_init_fn)."""

    def __init__(self) -> None:
        self._generators: dict[str, Any] = {"random": _Random(), "torch": _Torch()}
        if isinstance(_numpys_own(), np.random.MT19937):  # a user may have put in another kind
            self._generators["numpy"] = _Numpy()
        self._positions: dict[str, dict[str, Any]] = {}
        self._seen: dict[str, tuple[bytes, Rest]] = {}
        self._lines: dict[str, _Line] = {}
        for name, generator in self._generators.items():
            self._seen[name] = generator.read()
            self._lines[name] = _Line(self._seen[name][0])

    def positions(self) -> dict[str, dict[str, Any]]:
        """Where they stand, JSON-able: one entry for each generator that has been drawn from. About 10 us if none has."""
        for name, generator in self._generators.items():
            if generator.has_moved(*self._seen[name]):
                words, rest = self._seen[name] = generator.read()
                line = self._lines[name]
                line.follow(words)
                entry: dict[str, Any] = {"rest": rest, "check": zlib.crc32(words)}
                if line.is_left or line.num_blocks > REPLAY_MAX:
                    entry["words"] = base64.b64encode(words).decode()
                else:
                    entry["blocks"] = line.num_blocks
                self._positions = {**self._positions, name: entry}
        return self._positions

    def go_to(self, positions: dict[str, dict[str, Any]]) -> None:
        """Makes the generators stand where they stood. One whose line began elsewhere is left as it is, with a warning."""
        for name, entry in positions.items():
            line = self._lines[name]
            if "words" in entry:
                words = base64.b64decode(entry["words"])
            else:
                line.skip(entry["blocks"])
                words = line.words
            if zlib.crc32(words) != entry["check"]:
                log.warning(
                    "the stream of %s could not be resumed in this worker: worker_init_fn seeds it differently in each run", name
                )
                self._lines[name] = _Line(self._seen[name][0])
                continue
            self._generators[name].write(words, entry["rest"])
            line.words, line.is_left = words, "words" in entry
            self._seen[name] = self._generators[name].read()
            self._positions = {**self._positions, name: entry}
