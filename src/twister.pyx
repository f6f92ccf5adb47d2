"""The states to which random, numpy and torch are seeded before a sample, and writing them into the generators. See twister.h."""

cimport cython
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

cdef extern from "twister.h" nogil:
    const int SHML_TWISTER_WORDS, SHML_TWISTER_NBYTES, SHML_LANES
    ctypedef struct shml_words:
        uint64_t word[4]
    shml_words shml_sample_words(uint64_t seed, uint64_t epoch, uint64_t index, uint64_t stream)
    int shml_best_isa()
    void shml_twister_base(uint32_t *base)
    void shml_seed_twisters(const uint32_t *base, const uint64_t *keys, int count, int isa, shml_twisters *out)

cdef extern from "Python.h":
    int64_t PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    bint PyIndex_Check(object value)

import hashlib
import pickle
from array import array
from operator import index as as_int

cdef enum:  # generators, as bits
    OF_RANDOM = 1, OF_NUMPY = 2, OF_TORCH = 4

RANDOM, NUMPY, TORCH = OF_RANDOM, OF_NUMPY, OF_TORCH

cdef uint32_t _base[625]
shml_twister_base(_base)


LEAST_INDEX = -(1 << 62)  # `index_of` returns a lower number only for a hash


cdef bint integer_of(object key, int64_t *index) except -1:
    """Store the index of a sample whose key is an integer of 64 bits, of whatever type. Return False for another key."""
    cdef int has_overflown = 0
    if not PyLong_CheckExact(key):
        if not PyIndex_Check(key):
            return False
        try:
            key = as_int(key)
        except Exception:  # a tensor of several numbers, for example
            return False
    index[0] = PyLong_AsLongLongAndOverflow(key, &has_overflown)
    return not has_overflown


cpdef int64_t index_of(object key) except? -1:
    """Return the number by which the random numbers of a sample are keyed: its index, or a hash of a key that is not an integer.

    The number is the same in every process. It is -1 for None, the key of an iterable dataset's samples, and for a key that cannot be
    pickled.
    """
    cdef int64_t index = -1
    if key is None or integer_of(key, &index):
        return index
    try:
        digest = hashlib.blake2b(_encoded(key), digest_size=8).digest()
    except Exception:
        return -1
    return -(1 << 63) + (int.from_bytes(digest, "big") >> 2)


def _encoded(key):
    """Return bytes that differ for keys that differ. A numpy scalar has those of the Python value, and a tuple those of the list."""
    if hasattr(key, "tolist"):
        if getattr(key, "ndim", 0) and (plain := _plain_array(key)) is not None:
            return b"a" + f"{plain.dtype.str}{plain.shape}".encode() + plain.tobytes()
        key = key.tolist()
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, (list, tuple)):
        if key and set(map(type, key)) == {int} and -(1 << 63) <= min(key) and max(key) < 1 << 63:
            return b"i" + array("q", key).tobytes()
        parts = list(map(_encoded, key))
        return b"l" + b"".join([b"%d:" % len(part) + part for part in parts])
    if type(key) in (int, float, bool):
        return b"n" + repr(key).encode()
    return b"p" + pickle.dumps(key, 5)


def _plain_array(key):
    """Return an array or a tensor as an array of numbers, because a list of them takes long to make; None if that is not possible."""
    import numpy as np
    try:
        plain = np.asarray(key)
    except Exception:  # a tensor of a type that numpy lacks
        return None
    return None if plain.dtype.hasobject else plain


def seeded(list keys not None, isa=None):
    """Return for each key the words of random.seed(key), and those of np.random.seed(key & 0xFFFFFFFF) and torch's
    manual_seed(key).

    Args:
        keys: at most 16, in [0, 2^64).
        isa: instruction set, a position in `permutation.ISAS`; None: the fastest of this CPU.
    """
    cdef uint64_t lanes[16]
    cdef int count = len(keys), at
    if not 0 < count <= SHML_LANES:
        raise ValueError(f"there must be 1 to {SHML_LANES} keys, got {count}")
    for at in range(SHML_LANES):
        lanes[at] = keys[min(at, count - 1)]
    cdef shml_twisters *states = <shml_twisters *>malloc(sizeof(shml_twisters))
    if states == NULL:
        raise MemoryError
    try:
        shml_seed_twisters(_base, lanes, count, shml_best_isa() if isa is None else isa, states)
        return [((<char *>states.mixed[at])[:SHML_TWISTER_NBYTES], (<char *>states.plain[at])[:SHML_TWISTER_NBYTES])
                for at in range(count)]
    finally:
        free(states)


cdef class Reseeder:
    """A reseeder of the three global generators. It writes the states of a sample's key into their memory where its layout is
    known.

    It writes only what can be written while another thread draws from numpy or torch: that thread may then read words of both states,
    but never past them. Draws from Python's generator hold the GIL or, without it, the generator's critical section, which is held
    here, too. A generator that has been drawn from, or that holds one of a pair of gaussians, is left to its public call instead.

    Args:
        stream: stream of the samples' keys.

    Attributes:
        key: key of the newest sample.
        random_at: address of the words of Python's generator, preceded by its position among them; 0: unknown.
        numpy_at: address of the words of numpy's, followed by its position; 0: unknown.
        own_at: address where numpy stores the bit generator that it draws from: a user may replace it.
        gauss_at: address of numpy's stored gaussian: whether there is one, and its value.
        torch_at: address of the words of torch's, within ATen's CPUGeneratorImpl; 0: unknown.
    """

    def __cinit__(self, uint64_t stream):
        self._stream = stream
        self._isa = shml_best_isa()
        self._states = <shml_twisters *>malloc(sizeof(shml_twisters))
        if self._states == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._states)

    def watch(self, random, numpys_own, dict modules not None):
        """Store references to the generators.

        Args:
            random: Python's own generator.
            numpys_own: numpy's bit generator.
            modules: sys.modules, to which torch may be added later.
        """
        self._python, self._randoms, self._numpy, self._modules = random, random.__dict__, numpys_own, modules

    def watch_torch(self, module):
        """Store a reference to torch's generator."""
        self._torchs, self._torch = module.__dict__, module.default_generator

    def begin(self, uint64_t seed, uint64_t epoch, int64_t index, list keys, Py_ssize_t row):
        """Seed the generators for a sample.

        Args:
            keys: the keys that are probably read next, from `row` on, where this sample is; None if unknown.
        Returns:
            the generators that must be seeded with `key` by their public calls; includes TORCH when torch is first seen.
        """
        return self.seed(seed, epoch, index, keys, row)

    cdef int seed(self, uint64_t seed, uint64_t epoch, int64_t index, list keys, Py_ssize_t row) except -1:
        with cython.critical_section(self, self._python):
            return self._write(seed, epoch, index, keys, row)

    cdef int _write(self, uint64_t seed, uint64_t epoch, int64_t index, list keys, Py_ssize_t row) except -1:
        cdef int left = 0, at = self._next
        cdef uint8_t *words
        if at >= self._count or self._indices[at] != index or self._seed != seed or self._epoch != epoch:
            self._look_ahead(seed, epoch, index, keys, row)
            at = 0
        self._next = at + 1
        self.key = self._keys[at]

        words = <uint8_t *>self.random_at  # no other thread draws from it now, so all of it may be written
        if words != NULL:
            (<int32_t *>(words - 4))[0] = SHML_TWISTER_WORDS
            memcpy(words, self._states.mixed[at], SHML_TWISTER_NBYTES)
            self._randoms["gauss_next"] = None
        else:
            left |= OF_RANDOM

        words = <uint8_t *>self.numpy_at
        if (words != NULL and (<int32_t *>words)[SHML_TWISTER_WORDS] == SHML_TWISTER_WORDS
                and (<int32_t *>self.gauss_at)[0] == 0 and (<uint64_t *>self.gauss_at)[1] == 0
                and (<void **>self.own_at)[0] == <void *>self._numpy):
            memcpy(words, self._states.plain[at], SHML_TWISTER_NBYTES)
        else:
            left |= OF_NUMPY

        if self._torchs is None:
            if "torch" in self._modules:
                left |= OF_TORCH
            return left
        words = <uint8_t *>self.torch_at
        if words != NULL and _is_fresh(words) and self._torchs.get("default_generator") is self._torch:
            memcpy(words - 20, &self.key, 8)
            memcpy(words, self._states.plain[at], SHML_TWISTER_NBYTES)
        else:
            left |= OF_TORCH
        return left

    def keep_pythons(self):
        """Return a copy of the state of Python's generator (position and words, stored gaussian); None if its address is unknown."""
        if self.random_at == 0:
            return None
        with cython.critical_section(self, self._python):
            return (<const char *>(self.random_at - 4))[:SHML_TWISTER_NBYTES + 4], self._randoms["gauss_next"]

    def put_pythons_back(self, bytes words not None, gauss_next):
        """Set the state of Python's generator to one that `keep_pythons` has returned."""
        with cython.critical_section(self, self._python):
            memcpy(<char *>(self.random_at - 4), <const char *>words, SHML_TWISTER_NBYTES + 4)
            self._randoms["gauss_next"] = gauss_next

    def are_as_seeded(self):
        """Return whether nothing was drawn from the three since the last `begin`; False also if one of them cannot be inspected."""
        with cython.critical_section(self, self._python):
            return self._are_as_seeded()

    cdef bint _are_as_seeded(self) except -1:
        cdef int at = self._next - 1
        cdef const uint8_t *words
        if at < 0 or at >= self._count or self.random_at == 0 or self.numpy_at == 0:
            return False
        words = <const uint8_t *>self.random_at
        if ((<const int32_t *>(words - 4))[0] != SHML_TWISTER_WORDS or self._randoms["gauss_next"] is not None
                or memcmp(words, self._states.mixed[at], SHML_TWISTER_NBYTES) != 0):
            return False
        words = <const uint8_t *>self.numpy_at
        if ((<const int32_t *>words)[SHML_TWISTER_WORDS] != SHML_TWISTER_WORDS or (<const int32_t *>self.gauss_at)[0] != 0
                or (<void **>self.own_at)[0] != <void *>self._numpy
                or memcmp(words, self._states.plain[at], SHML_TWISTER_NBYTES) != 0):
            return False
        if self._torchs is None:
            return "torch" not in self._modules
        words = <const uint8_t *>self.torch_at
        return (self.torch_at != 0 and self._torchs.get("default_generator") is self._torch and _is_fresh(words)
                and memcmp(words - 20, &self.key, 8) == 0 and memcmp(words, self._states.plain[at], SHML_TWISTER_NBYTES) == 0)

    cdef int _look_ahead(self, uint64_t seed, uint64_t epoch, int64_t index, list keys, Py_ssize_t row) except -1:
        """Compute the states of this sample and of the next ones."""
        cdef int count = 1, at
        self._count = 0
        self._seed, self._epoch = seed, epoch
        self._indices[0] = index
        if keys is not None and row >= 0:
            while count < SHML_LANES and row + count < len(keys):
                self._indices[count] = index_of(keys[row + count])
                count += 1
        for at in range(SHML_LANES):
            if at < count:
                self._keys[at] = shml_sample_words(seed, epoch, <uint64_t>self._indices[at], self._stream).word[0]
            else:
                self._keys[at] = self._keys[0]
        shml_seed_twisters(_base, self._keys, count, self._isa, self._states)
        self._count = count
        return 0


cdef inline bint _is_fresh(const uint8_t *words) noexcept:
    """Return whether nothing has been drawn from torch's generator since it was seeded.

    Next to its words, ATen's CPUGeneratorImpl stores: the seed (-20, 8 bytes), the number of words left (-12, 4), whether it is
    seeded (-8, 1), the next word (-4, 4); a float gaussian (2500, 4) and whether there is one (2504, 1), a double one (2508, 8;
    2516, 1).
    """
    return ((<const int32_t *>(words - 12))[0] == 1 and (words - 8)[0] == 1 and (<const int32_t *>(words - 4))[0] == 0
            and words[2504] == 0 and words[2516] == 0)


def sample_words(uint64_t seed, uint64_t epoch, int64_t index, uint64_t stream):
    """Return 256 bits for one sample as four words; the first one is `permutation.sample_key`'s."""
    cdef shml_words words = shml_sample_words(seed, epoch, <uint64_t>index, stream)
    return words.word[0], words.word[1], words.word[2], words.word[3]


def reseed_pythons(uint64_t seed, uint64_t epoch, int64_t index, list generators not None, list streams not None, size_t offset):
    """Seed Python's generators as seed(sample_key(seed, epoch, index, stream)) does, each with its own stream.

    Args:
        generators: generators whose type is exactly random.Random.
        offset: offset of the words in such an object; the position among them precedes them.
    """
    cdef uint64_t keys[16]
    cdef Py_ssize_t first, at
    cdef int count
    cdef uint8_t *words
    cdef shml_twisters *states = <shml_twisters *>malloc(sizeof(shml_twisters))
    if states == NULL:
        raise MemoryError
    try:
        for first in range(0, len(generators), SHML_LANES):
            count = <int>min(<Py_ssize_t>SHML_LANES, len(generators) - first)
            for at in range(SHML_LANES):
                keys[at] = shml_sample_words(seed, epoch, <uint64_t>index, streams[first + min(at, count - 1)]).word[0]
            shml_seed_twisters(_base, keys, count, shml_best_isa(), states)
            for at in range(count):
                generator = generators[first + at]
                words = <uint8_t *><void *>generator + offset
                with cython.critical_section(generator):
                    (<int32_t *>(words - 4))[0] = SHML_TWISTER_WORDS
                    memcpy(words, states.mixed[at], SHML_TWISTER_NBYTES)
                generator.gauss_next = None
    finally:
        free(states)


def reseed_congruences(uint64_t seed, uint64_t epoch, int64_t index, list places not None, list streams not None):
    """Set numpy's PCG64s to a state and an increment made from a sample's words, each from its own stream.

    Args:
        places: addresses of the two, 128 bits each, the low half first, and of the stored half word: whether there is one, and its
            value.
    """
    cdef shml_words words
    cdef uint64_t *state
    cdef uint32_t *left
    for at in range(len(places)):
        words = shml_sample_words(seed, epoch, <uint64_t>index, streams[at])
        state, left = <uint64_t *><size_t>places[at][0], <uint32_t *><size_t>places[at][1]
        state[0], state[1] = words.word[1], words.word[0]
        state[2], state[3] = words.word[3] | 1, words.word[2]
        left[0] = left[1] = 0


def rekey_philox(size_t place, uint64_t first, uint64_t second):
    """Set one of numpy's Philox generators to the beginning of a key's stream.

    Args:
        place: address of its state: the addresses of its counter and its key, its position in its buffer, the buffer, and the
            stored half word.
        first, second: the key.
    """
    cdef uint64_t *state = <uint64_t *>place
    memset(<void *>state[0], 0, 32)
    (<uint64_t *>state[1])[0], (<uint64_t *>state[1])[1] = first, second
    (<int32_t *>(state + 2))[0] = 4  # the buffer is empty
    memset(state + 3, 0, 40)
