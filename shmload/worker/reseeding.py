"""Seed the global generators of random, numpy and torch before a sample, with the results of their public calls, ten times as fast.

    random.seed(key); np.random.seed(key & 0xFFFFFFFF); torch.default_generator.manual_seed(key)

These calls take 7 us for each sample, even if it draws nothing: each fills 624 words by a recurrence in which every word depends on
the previous one. So the states of the next sixteen samples are computed side by side (src/twister.h) and copied into the memory of
the generators. Seeding on the first draw instead would be wrong, because datasets also read states and seeds.

The addresses of the words are found by a search of the memory of Python's and numpy's objects, and of the object that torch's
generator points to, which is read in such a way that a wrong address causes an error instead of a crash. An address is used only
if the generator then has the same state as after the public calls, for several keys, after draws of each kind. A generator whose
words are not found, because the interpreter or the release is a different one, is seeded by its public call. So is, for one
sample, a generator from which the previous sample has drawn.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from shmload._core.twister import NUMPY, RANDOM, TORCH, Reseeder, reseed_pythons, sample_words
from shmload.worker.generator_set import OF_PROCESS, GeneratorSet

_STREAM = 1  # the stream of sample keys that seeds the global generators
_NUM_WORDS = 624
_LOOKED_FOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # seeds of the states that the searches look for
_GAUSS = 0.6180339887
# torch's state: a header of 24 bytes, the words (8 bytes each), then a cached gaussian as double and one as float, each with a flag
_FIRST, _END, _DOUBLE, _FLOAT, _NBYTES = 24, 24 + 8 * _NUM_WORDS, 24 + 8 * _NUM_WORDS, 24 + 8 * _NUM_WORDS + 32, 5056
_BEFORE, _AFTER = 512, 24  # bytes of ATen's object that may precede the words, and that must follow them


@functools.cache
def python_offset() -> int:
    """Return the offset of a random.Random's words from its address; 0 if not found. The position among the words precedes them."""
    own = random.Random(_LOOKED_FOR[0])
    if sys.implementation.name != "cpython" or not (at := _random_at(own)):
        return 0
    reseed_pythons(*_LOOKED_FOR, 3, [own], [4], at - id(own))
    is_right = own.getstate() == random.Random(sample_words(*_LOOKED_FOR, 3, 4)[0]).getstate()
    return at - id(own) if is_right else 0


class GlobalGenerators:
    """The seeder of the generators that plain calls draw from, called before each sample.

    Args:
        generators: the generators of this process or of one of its threads.
    """

    def __init__(self, generators: GeneratorSet = OF_PROCESS) -> None:
        self.set = generators
        self._knows_torch = False

    @functools.cached_property
    def reseeder(self) -> Reseeder:
        """Return the native reseeder of the generators whose addresses are known."""
        return _reseeder(self.set)

    def begin(self, seed: int, epoch: int, index: int, keys: list[Any] | None, row: int) -> None:
        """Seed the generators for a sample.

        Args:
            seed: the loader's seed.
            epoch: epoch of the pass.
            index: index of the sample.
            keys: keys of the samples in the same batch, if known; the states of the next ones are computed ahead.
            row: position of the sample in `keys`.
        """
        if left := self.reseeder.begin(seed, epoch, index, keys, row):
            self.seed_rest(left, seed, epoch, index, keys, row)

    def keep_pythons(self) -> Callable[[], None]:
        """Return a function that restores the present state of Python's generator, faster than getstate and setstate (20 us)."""
        reseeder = vars(self).get("reseeder")
        kept = None if reseeder is None else reseeder.keep_pythons()
        if reseeder is None or kept is None:
            return functools.partial(self.set.python.setstate, self.set.python.getstate())
        return functools.partial(reseeder.put_pythons_back, *kept)

    def keep_numpys(self) -> Callable[[], None]:
        """Return a function that restores numpy's present state, faster than numpy's get_state and set_state (75 us together)."""
        own = self.set.numpys_bits
        reseeder = vars(self).get("reseeder")
        if reseeder is None or not reseeder.numpy_at or own.ctypes.state_address != reseeder.numpy_at:
            return functools.partial(self.set.numpy.set_state, self.set.numpy.get_state())
        places = [(reseeder.numpy_at, 4 * _NUM_WORDS + 4), (reseeder.gauss_at, 16)]
        with own.lock:
            held = [ctypes.string_at(*place) for place in places]

        def put_back() -> None:
            with own.lock:
                for (at, nbytes), data in zip(places, held, strict=True):
                    ctypes.memmove(at, data, nbytes)

        return put_back

    def seed_rest(self, left: int, seed: int, epoch: int, index: int, keys: list[Any] | None, row: int) -> None:
        """Seed the generators in the bit mask `left`, which the reseeder has not seeded; the other arguments are as in `begin`."""
        if left & TORCH and not self._knows_torch:
            _find_torch(self.set, self.reseeder)
            self._knows_torch = True
            left = self.reseeder.begin(seed, epoch, index, keys, row)
        _seed_publicly(self.set, left, self.reseeder.key)


def _seed_publicly(generators: GeneratorSet, left: int, key: int) -> None:
    """Seed the generators in the bit mask `left` by their public calls."""
    if left & RANDOM:
        generators.python.seed(key)
    if left & NUMPY:
        generators.seed_numpy(key & 0xFFFFFFFF)  # also discards a cached gaussian, unlike seeding the bit generator
    if left & TORCH:
        generators.torch_home.default_generator.manual_seed(key)


def _reseeder(generators: GeneratorSet) -> Reseeder:
    """Return a reseeder with the addresses of random's and numpy's words. Torch may be imported later."""
    numpys_own = generators.numpys_bits
    reseeder = Reseeder(_STREAM)
    reseeder.watch(generators.python, numpys_own, sys.modules)
    if sys.implementation.name == "cpython":  # where id() is an address
        reseeder.random_at = _random_at(generators.python)
        if not _is_right(generators, reseeder, RANDOM):
            reseeder.random_at = 0
        if isinstance(numpys_own, np.random.MT19937):  # the user may have set another kind
            reseeder.own_at, reseeder.gauss_at = _own_at(generators), _gauss_at(generators)
            reseeder.numpy_at = numpys_own.ctypes.state_address if reseeder.own_at and reseeder.gauss_at else 0
            if not _is_right(generators, reseeder, NUMPY):
                reseeder.numpy_at = 0
    return reseeder


def _find_torch(generators: GeneratorSet, reseeder: Reseeder) -> None:
    home = generators.torch_home
    reseeder.watch_torch(home)
    if sys.implementation.name == "cpython":
        reseeder.torch_at = _torch_at(home.default_generator)
        if not _is_right(generators, reseeder, TORCH):
            reseeder.torch_at = 0


def _random_at(python: random.Random) -> int:
    """Return the address of Python's words within the object's basic size; 0 if not found. Their position precedes them."""
    python.seed(_LOOKED_FOR[0])
    words = np.array(python.getstate()[1][:-1], np.uint32).tobytes()
    at = ctypes.string_at(id(python), type(python).__basicsize__).find(struct.pack("<i", _NUM_WORDS) + words)
    return 0 if at < 0 or at % 4 else id(python) + at + 4


def _numpys_memory(generators: GeneratorSet) -> tuple[int, bytes]:
    """Return the address of numpy's RandomState, and its memory up to its basic size."""
    numpys = generators.numpy
    return id(numpys), ctypes.string_at(id(numpys), type(numpys).__basicsize__)


def _own_at(generators: GeneratorSet) -> int:
    """Return the address of numpy's reference to its bit generator; 0 if not found or ambiguous."""
    start, memory = _numpys_memory(generators)
    reference = struct.pack("<Q", id(generators.numpys_bits))
    at = memory.find(reference)
    return 0 if at < 0 or at % 8 or reference in memory[at + 8 :] else start + at


def _gauss_at(generators: GeneratorSet) -> int:
    """Return the address of numpy's flag for a cached gaussian, 8 bytes before the gaussian; 0 if not found."""
    generators.numpy.set_state(("MT19937", np.zeros(_NUM_WORDS, np.uint32), _NUM_WORDS, 1, _GAUSS))
    start, memory = _numpys_memory(generators)
    at = memory.find(struct.pack("<d", _GAUSS)) - 8
    return 0 if at < 0 or at % 8 or memory[at : at + 4] != struct.pack("<i", 1) else start + at


def _torch_at(generator: Any) -> int:
    """Return the address of torch's words, in an object that the Python generator points to; 0 if not found."""
    head = object.__basicsize__
    pointers = struct.unpack(
        f"<{(type(generator).__basicsize__ - head) // 8}Q",
        ctypes.string_at(id(generator) + head, (type(generator).__basicsize__ - head) // 8 * 8),
    )
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # this process may not read it
        return 0
    try:
        for pointer in filter(None, pointers):
            first, second = (_offset_in(memory, pointer, generator.manual_seed(seed)) for seed in _LOOKED_FOR)
            if first == second >= 0:
                return int(pointer) + first
    finally:
        os.close(memory)
    return 0


def _offset_in(memory: int, pointer: int, generator: Any) -> int:
    """Return the offset of a generator's words from an address, which may be invalid; -1 if the words or the seed are not there."""
    state = generator.get_state().numpy().tobytes()
    words = np.frombuffer(state[_FIRST:_END], np.uint64).astype(np.uint32).tobytes()
    try:
        found = os.pread(memory, _BEFORE + len(words) + _AFTER, pointer)
    except (OSError, OverflowError):
        return -1
    at = found.find(words)
    is_it = at >= 20 and (pointer + at) % 8 == 4 and found[at - 20 : at - 12] == struct.pack("<Q", generator.initial_seed())
    return at if is_it and at + len(words) + _AFTER <= len(found) else -1


# (which, offsets of its words in their objects) of each kind that was right in one thread's set. If the words of a further thread's
# set were found at the same offsets, they are not tested again, because that takes half a millisecond. Torch's object is not known,
# so its words are tested once.
_right_in_a_thread: set[tuple[int, ...]] = set()


def _is_right(generators: GeneratorSet, reseeder: Reseeder, which: int) -> bool:
    """Return whether the reseeder gives a generator the state of its public call, whatever its state was before."""
    offsets = _offsets(generators, reseeder, which)
    if generators is not OF_PROCESS and offsets in _right_in_a_thread:
        return which != TORCH or _agrees(generators, reseeder, which, 1)
    agrees = all(_agrees(generators, reseeder, which, number) for number in range(4))
    is_right = agrees and _leaves_no_gaussian(generators, reseeder, which)
    if is_right and generators is not OF_PROCESS:
        _right_in_a_thread.add(offsets)
    return is_right


def _offsets(generators: GeneratorSet, reseeder: Reseeder, which: int) -> tuple[int, ...]:
    """Return the kind, and the offsets in its Python objects at which its words or its cached gaussian were found."""
    if which == RANDOM:
        return which, reseeder.random_at - id(generators.python)
    if which == NUMPY:
        start = id(generators.numpy)
        return which, reseeder.own_at - start, reseeder.gauss_at - start
    return (which,)


def _agrees(generators: GeneratorSet, reseeder: Reseeder, which: int, number: int) -> bool:
    """Return whether the reseeder sets the right state after a public call, and after `number` draws sets it or declines."""
    _seed_publicly(generators, which, number)
    if reseeder.begin(number, 0, number, None, 0) & which or not _is_at_start(generators, which, reseeder.key):
        return False
    _draw(generators, which, number)
    return bool(reseeder.begin(number, 1, number, None, 0) & which) or _is_at_start(generators, which, reseeder.key)


def _leaves_no_gaussian(generators: GeneratorSet, reseeder: Reseeder, which: int) -> bool:
    """Return whether the reseeder discards a cached gaussian, or declines to seed a generator that has one."""
    for number in range(2):  # kinds of cached gaussians
        _seed_publicly(generators, which, number)
        _put_gaussian(generators, which, number)
        if not reseeder.begin(number, 2, 0, None, 0) & which and not _is_at_start(generators, which, reseeder.key):
            return False
    return True


def _draw(generators: GeneratorSet, which: int, count: int) -> None:
    for _ in range(count):
        if which == RANDOM:
            generators.python.gauss()
        elif which == NUMPY:
            generators.numpy.standard_normal()
        else:
            sys.modules["torch"].randn(3, generator=generators.torch_home.default_generator)


def _put_gaussian(generators: GeneratorSet, which: int, kind: int) -> None:
    """Give a generator a cached gaussian, and leave its words unchanged."""
    if which == RANDOM:
        generators.python.setstate((*generators.python.getstate()[:2], _GAUSS))
    elif which == NUMPY:
        legacy: Any = generators.numpy.get_state()
        generators.numpy.set_state((*legacy[:3], 1, _GAUSS))
    else:
        torch = sys.modules["torch"]
        state = generators.torch_state()
        if kind:
            state[_FLOAT : _FLOAT + 5] = torch.frombuffer(bytearray(struct.pack("<f?", _GAUSS, True)), dtype=torch.uint8)
        else:
            left = bytearray(struct.pack("<dddi", _GAUSS, 0, 0, 1))
            state[_DOUBLE : _DOUBLE + 28] = torch.frombuffer(left, dtype=torch.uint8)
        generators.torch_home.default_generator.set_state(state)


def _is_at_start(generators: GeneratorSet, which: int, key: int) -> bool:
    """Return whether a generator has the state that its public call gives it for a key."""
    if which == RANDOM:
        return generators.python.getstate() == random.Random(key).getstate()
    if which == NUMPY:
        expected: Any = np.random.RandomState(key & 0xFFFFFFFF).get_state()
        state: Any = generators.numpy.get_state()
        return state[0] == expected[0] and bool((state[1] == expected[1]).all()) and state[2:] == expected[2:]
    torch = sys.modules["torch"]
    fresh = torch.Generator().manual_seed(key)
    own = generators.torch_home.default_generator
    return bool(torch.equal(own.get_state(), fresh.get_state())) and own.initial_seed() == fresh.initial_seed()
