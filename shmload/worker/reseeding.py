"""The global generators of random, numpy and torch, seeded before a sample as their public calls seed them, at a tenth of the time.

    random.seed(key); np.random.seed(key & 0xFFFFFFFF); torch.default_generator.manual_seed(key)

Those take 7 us, for each sample, whether or not it draws: each fills 624 words by a recurrence in which every word waits for the
one before. So the states of the next sixteen samples are computed side by side (src/twister.h), and copied to where the generators
keep them. Deferring the work until something is drawn would not do, as datasets look at states and seeds, too.

Where a generator keeps its words is found, not known: in the memory of Python's and numpy's own objects, and in what torch's points
to, which is read in such a way that a wrong address is an error and no crash. A place is used if it then gives what the public
calls give, for several keys, after draws of each kind. A generator whose place is not found, as another interpreter or a coming
release may have it, is seeded by its public call; so is, for one sample, each that the sample before has drawn from.
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

_STREAM = 1  # of sample keys: that of the reseeded global generators
_NUM_WORDS = 624
_LOOKED_FOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # seeds of the states that are looked for
_GAUSS = 0.6180339887
# A state of torch's: 24 bytes of head, the words 8 bytes each, then a double gaussian and a float one with whether they are there
_FIRST, _END, _DOUBLE, _FLOAT, _NBYTES = 24, 24 + 8 * _NUM_WORDS, 24 + 8 * _NUM_WORDS, 24 + 8 * _NUM_WORDS + 32, 5056
_BEFORE, _BEHIND = 512, 24  # bytes of ATen's object that may stand before the words, and must stand behind them


@functools.cache
def python_offset() -> int:
    """Offset of a random.Random's words from its address, which their place precedes; 0: not found."""
    own = random.Random(_LOOKED_FOR[0])
    if sys.implementation.name != "cpython" or not (at := _random_at(own)):
        return 0
    reseed_pythons(*_LOOKED_FOR, 3, [own], [4], at - id(own))
    is_right = own.getstate() == random.Random(sample_words(*_LOOKED_FOR, 3, 4)[0]).getstate()
    return at - id(own) if is_right else 0


class GlobalGenerators:
    """Seeds them, sample by sample."""

    def __init__(self) -> None:
        self._knows_torch = False

    @functools.cached_property
    def reseeder(self) -> Reseeder:
        """What seeds those whose place is known."""
        return _reseeder()

    def begin(self, seed: int, epoch: int, index: int, keys: list[Any] | None, row: int) -> None:
        """Seeds them for a sample.

        Args:
            keys: of the samples that are read with it, which is at `row`, as far as is known. The next ones are prepared for.
        """
        if left := self.reseeder.begin(seed, epoch, index, keys, row):
            self.seed_rest(left, seed, epoch, index, keys, row)

    def keep_numpys(self) -> Callable[[], None]:
        """Returns what puts numpy's generator back to where it stands now. Its own calls take 75 us, and each batch needs both."""
        own = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, but missing in numpy's stubs
        reseeder = vars(self).get("reseeder")
        if reseeder is None or not reseeder.numpy_at or own.ctypes.state_address != reseeder.numpy_at:
            return functools.partial(np.random.set_state, np.random.get_state())
        places = [(reseeder.numpy_at, 4 * _NUM_WORDS + 4), (reseeder.gauss_at, 16)]
        with own.lock:
            held = [ctypes.string_at(*place) for place in places]

        def put_back() -> None:
            with own.lock:
                for (at, nbytes), data in zip(places, held, strict=True):
                    ctypes.memmove(at, data, nbytes)

        return put_back

    def seed_rest(self, left: int, seed: int, epoch: int, index: int, keys: list[Any] | None, row: int) -> None:
        """Seeds those that the reseeder has left."""
        if left & TORCH and not self._knows_torch:
            _find_torch(self.reseeder, sys.modules["torch"])
            self._knows_torch = True
            left = self.reseeder.begin(seed, epoch, index, keys, row)
        _seed_publicly(left, self.reseeder.key)


def _seed_publicly(left: int, key: int) -> None:
    """Seeds those generators that have been left."""
    if left & RANDOM:
        random.seed(key)
    if left & NUMPY:
        np.random.seed(key & 0xFFFFFFFF)  # also forgets half a pair of gaussians, which a bit generator's own seeding does not
    if left & TORCH:
        sys.modules["torch"].default_generator.manual_seed(key)


def _reseeder() -> Reseeder:
    """One that knows where random and numpy keep their words. Torch may come later."""
    python: Any = random.seed.__self__  # type: ignore[attr-defined]  # a method of the global one
    numpys_own = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, but missing in numpy's stubs
    reseeder = Reseeder(_STREAM)
    reseeder.watch(python, numpys_own, sys.modules)
    if sys.implementation.name == "cpython":  # where id() is an address
        reseeder.random_at = _random_at(python)
        if not _is_right(reseeder, RANDOM):
            reseeder.random_at = 0
        if isinstance(numpys_own, np.random.MT19937):  # a user may have put in another kind
            reseeder.own_at, reseeder.gauss_at = _own_at(numpys_own), _gauss_at()
            reseeder.numpy_at = numpys_own.ctypes.state_address if reseeder.own_at and reseeder.gauss_at else 0
            if not _is_right(reseeder, NUMPY):
                reseeder.numpy_at = 0
    return reseeder


def _find_torch(reseeder: Reseeder, torch: Any) -> None:
    reseeder.watch_torch(torch)
    if sys.implementation.name == "cpython":
        reseeder.torch_at = _torch_at(torch.default_generator)
        if not _is_right(reseeder, TORCH):
            reseeder.torch_at = 0


def _random_at(python: random.Random) -> int:
    """Address of Python's words, which their place precedes, within the object's basic size; 0: not found."""
    python.seed(_LOOKED_FOR[0])
    words = np.array(python.getstate()[1][:-1], np.uint32).tobytes()
    at = ctypes.string_at(id(python), type(python).__basicsize__).find(struct.pack("<i", _NUM_WORDS) + words)
    return 0 if at < 0 or at % 4 else id(python) + at + 4


def _numpys_memory() -> tuple[int, bytes]:
    """Address of numpy's global object, and what lies there within its basic size."""
    numpys: Any = np.random.get_state.__self__  # type: ignore[attr-defined]  # a method of the global one
    return id(numpys), ctypes.string_at(id(numpys), type(numpys).__basicsize__)


def _own_at(bit_generator: Any) -> int:
    """Address of numpy's reference to its bit generator; 0: not found, or more than one could be it."""
    start, memory = _numpys_memory()
    reference = struct.pack("<Q", id(bit_generator))
    at = memory.find(reference)
    return 0 if at < 0 or at % 8 or reference in memory[at + 8 :] else start + at


def _gauss_at() -> int:
    """Address of whether numpy has a gaussian left, which that one follows; 0: not found."""
    np.random.set_state(("MT19937", np.zeros(_NUM_WORDS, np.uint32), _NUM_WORDS, 1, _GAUSS))
    start, memory = _numpys_memory()
    at = memory.find(struct.pack("<d", _GAUSS)) - 8
    return 0 if at < 0 or at % 8 or memory[at : at + 4] != struct.pack("<i", 1) else start + at


def _torch_at(generator: Any) -> int:
    """Address of torch's words within the object that its Python object points to; 0: not found."""
    head = object.__basicsize__
    pointers = struct.unpack(
        f"<{(type(generator).__basicsize__ - head) // 8}Q",
        ctypes.string_at(id(generator) + head, (type(generator).__basicsize__ - head) // 8 * 8),
    )
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not for this process to see
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
    """Offset of a generator's words from an address, which may be none; -1: they are not there, or not the rest as it must be."""
    state = generator.get_state().numpy().tobytes()
    words = np.frombuffer(state[_FIRST:_END], np.uint64).astype(np.uint32).tobytes()
    try:
        found = os.pread(memory, _BEFORE + len(words) + _BEHIND, pointer)
    except (OSError, OverflowError):
        return -1
    at = found.find(words)
    is_it = at >= 20 and (pointer + at) % 8 == 4 and found[at - 20 : at - 12] == struct.pack("<Q", generator.initial_seed())
    return at if is_it and at + len(words) + _BEHIND <= len(found) else -1


def _is_right(reseeder: Reseeder, which: int) -> bool:
    """Whether the reseeder makes of one generator what its public call makes of it, whatever was done with that before."""
    return all(_agrees(reseeder, which, number) for number in range(4)) and _leaves_no_gaussian(reseeder, which)


def _agrees(reseeder: Reseeder, which: int, number: int) -> bool:
    """Whether one that was seeded publicly is seeded anew, and then draws what it should; if it had been drawn from, or left."""
    _seed_publicly(which, number)
    if reseeder.begin(number, 0, number, None, 0) & which or not _is_at_start(which, reseeder.key):
        return False
    _draw(which, number)
    return bool(reseeder.begin(number, 1, number, None, 0) & which) or _is_at_start(which, reseeder.key)


def _leaves_no_gaussian(reseeder: Reseeder, which: int) -> bool:
    """Whether half a pair of gaussians is forgotten, or the generator is left to its public call."""
    for number in range(2):  # the kinds of them
        _seed_publicly(which, number)
        _put_gaussian(which, number)
        if not reseeder.begin(number, 2, 0, None, 0) & which and not _is_at_start(which, reseeder.key):
            return False
    return True


def _draw(which: int, count: int) -> None:
    for _ in range(count):
        if which == RANDOM:
            random.gauss()
        elif which == NUMPY:
            np.random.standard_normal()
        else:
            sys.modules["torch"].randn(3)


def _put_gaussian(which: int, kind: int) -> None:
    """Lets a generator have a gaussian left, and its words as they are."""
    if which == RANDOM:
        random.setstate((*random.getstate()[:2], _GAUSS))
    elif which == NUMPY:
        legacy: Any = np.random.get_state()
        np.random.set_state((*legacy[:3], 1, _GAUSS))
    else:
        torch = sys.modules["torch"]
        state = torch.get_rng_state()
        if kind:
            state[_FLOAT : _FLOAT + 5] = torch.frombuffer(bytearray(struct.pack("<f?", _GAUSS, True)), dtype=torch.uint8)
        else:
            left = bytearray(struct.pack("<dddi", _GAUSS, 0, 0, 1))
            state[_DOUBLE : _DOUBLE + 28] = torch.frombuffer(left, dtype=torch.uint8)
        torch.set_rng_state(state)


def _is_at_start(which: int, key: int) -> bool:
    """Whether a generator stands where its public call puts it."""
    if which == RANDOM:
        return random.getstate() == random.Random(key).getstate()
    if which == NUMPY:
        expected: Any = np.random.RandomState(key & 0xFFFFFFFF).get_state()
        state: Any = np.random.get_state()
        return state[0] == expected[0] and bool((state[1] == expected[1]).all()) and state[2:] == expected[2:]
    torch = sys.modules["torch"]
    fresh = torch.Generator().manual_seed(key)
    own = torch.default_generator
    return bool(torch.equal(own.get_state(), fresh.get_state())) and own.initial_seed() == fresh.initial_seed()
