"""Save the states of a worker's generators in a few bytes, and restore them.

random, numpy and torch all use a Mersenne Twister: 624 words and a position among them, 2.5 KB for each generator of each worker.
After 624 draws a generator computes the next 624 words (a "block") from the last, so the number of blocks since the worker's seed
is enough to restore the words. If a dataset seeds a generator itself, its words no longer follow from the worker's seed, and the
state contains all of them.

Source: M. Matsumoto, T. Nishimura, Mersenne Twister (1998). All three compute their words by its recurrence.
"""

from __future__ import annotations

import base64
import ctypes
import logging
import sys
import zlib
from functools import cached_property
from typing import Any

import numpy as np

from shmload.worker.generator_set import GeneratorSet, current_set

log = logging.getLogger("shmload")

NUM_WORDS = 624
BLOCKS_MAX = 4096  # most blocks searched for the words of the next state: 2.5 million draws, 12 ms
REPLAY_MAX = 1 << 20  # most blocks that a resume may replay, which takes 1.5 seconds

Rest = list[Any]  # state of a generator besides its words, JSON-able


def _view_of(generator: np.random.MT19937) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return a view of the generator's own 624 words and its position among them."""
    address = generator.ctypes.state_address
    assert isinstance(address, int)
    return np.ctypeslib.as_array((ctypes.c_uint32 * (NUM_WORDS + 1)).from_address(address))


class _WordSequence:
    """The sequence of words that follow from the initial words, block by block.

    Attributes:
        words: the words of the current block.
        num_blocks: number of blocks since the initial words.
        is_lost: a generator's words were not found in the sequence, so its words must be stored.
    """

    def __init__(self, words: bytes) -> None:
        self.words = words
        self.num_blocks = 0
        self.is_lost = False

    @cached_property
    def _twister(self) -> tuple[np.random.MT19937, np.ndarray[Any, np.dtype[np.uint32]]]:
        """Return the generator that computes the words after these, and a view of its words. Making it takes 60 us."""
        twister = np.random.MT19937()
        view = _view_of(twister)
        view[:NUM_WORDS] = np.frombuffer(self.words, np.uint32)
        view[NUM_WORDS] = NUM_WORDS
        return twister, view[:NUM_WORDS]

    def follow(self, words: bytes) -> None:
        """Advance to these words, or record that the sequence does not contain them."""
        limit = self.num_blocks + BLOCKS_MAX
        while self.words != words and not self.is_lost:
            self.skip(1)
            self.is_lost = self.num_blocks > limit
        self.words = words

    def skip(self, num_blocks: int) -> None:
        """Advance by this number of blocks."""
        twister, twisted = self._twister
        for _ in range(num_blocks):
            twister.random_raw(NUM_WORDS, output=False)
        self.num_blocks += num_blocks
        self.words = twisted.tobytes()


class _Random:
    """Python's random. Its words are read in place, after the object's head, because `getstate` takes 6 us."""

    def __init__(self, generators: GeneratorSet) -> None:
        self._generator: Any = generators.python
        view = np.ctypeslib.as_array((ctypes.c_uint32 * (NUM_WORDS + 1)).from_address(id(self._generator) + 16))
        numbers = self._generator.getstate()[1]
        self._view = view if view.tolist() == [numbers[-1], *numbers[:-1]] else None  # the layout may differ in other interpreters

    def read(self) -> tuple[bytes, Rest]:
        _, numbers, gauss = self._generator.getstate()
        return np.array(numbers[:-1], np.uint32).tobytes(), [numbers[-1], gauss]

    def has_moved(self, words: bytes, rest: Rest) -> bool:
        if self._view is not None:
            return (
                int(self._view[0]) != rest[0]
                or self._generator.gauss_next != rest[1]
                or int(self._view[1]) != int.from_bytes(words[:4], sys.byteorder)
            )
        _, numbers, gauss = self._generator.getstate()
        return [numbers[-1], gauss] != rest or numbers[0] != int.from_bytes(words[:4], sys.byteorder)

    def write(self, words: bytes, rest: Rest) -> None:
        self._generator.setstate((3, (*np.frombuffer(words, np.uint32).tolist(), rest[0]), rest[1]))


class _Numpy:
    """numpy's RandomState."""

    def __init__(self, generators: GeneratorSet) -> None:
        self._state: Any = generators.numpy
        self._generator = generators.numpys_bits  # kept alive for the view
        self._view = _view_of(self._generator)

    def read(self) -> tuple[bytes, Rest]:
        _, words, place, has_gauss, gauss = self._state.get_state()
        return np.asarray(words, np.uint32).tobytes(), [int(place), int(has_gauss), float(gauss)]

    def has_moved(self, words: bytes, rest: Rest) -> bool:
        # rest[1] is the flag of a cached gaussian, which would be drawn without using a word
        return (
            bool(rest[1]) or int(self._view[NUM_WORDS]) != rest[0] or int(self._view[0]) != int.from_bytes(words[:4], sys.byteorder)
        )

    def write(self, words: bytes, rest: Rest) -> None:
        self._state.set_state(("MT19937", np.frombuffer(words, np.uint32), *rest))


class _Torch:
    """torch's CPU generator, whose state is 24 bytes of head, 624 words of 8 bytes, and a tail."""

    def __init__(self, generators: GeneratorSet) -> None:
        self._generators = generators
        self._last = b""

    def _parts(self) -> tuple[bytes, bytes]:
        state = self._last = self._generators.torch_state().numpy().tobytes()
        return state[24 : 24 + 8 * NUM_WORDS], state[:24] + state[24 + 8 * NUM_WORDS :]

    def read(self) -> tuple[bytes, Rest]:
        words, rest = self._parts()
        return np.frombuffer(words, np.uint64).astype(np.uint32).tobytes(), [base64.b64encode(rest).decode()]

    def has_moved(self, words: bytes, rest: Rest) -> bool:
        return bool(self._generators.torch_state().numpy().tobytes() != self._last)

    def write(self, words: bytes, rest: Rest) -> None:
        torch = sys.modules["torch"]
        around = base64.b64decode(rest[0])
        wide = np.frombuffer(words, np.uint32).astype(np.uint64).tobytes()
        state = torch.frombuffer(bytearray(around[:24] + wide + around[24:]), dtype=torch.uint8)
        self._generators.torch_home.default_generator.set_state(state)


class GeneratorStreams:
    """The positions of the worker's generators, counted from their states at construction.

    Construct it in the worker, after it has been seeded and worker_init_fn was called.
    """

    def __init__(self) -> None:
        own = current_set()
        self._generators: dict[str, Any] = {"random": _Random(own), "torch": _Torch(own)}
        if isinstance(own.numpys_bits, np.random.MT19937):  # the user may have installed another kind
            self._generators["numpy"] = _Numpy(own)
        self._positions: dict[str, dict[str, Any]] = {}
        self._seen: dict[str, tuple[bytes, Rest]] = {}
        self._sequences: dict[str, _WordSequence] = {}
        for name, generator in self._generators.items():
            self._seen[name] = generator.read()
            self._sequences[name] = _WordSequence(self._seen[name][0])

    def positions(self) -> dict[str, dict[str, Any]]:
        """Return the positions as a JSON-able dict, with one entry for each generator that was drawn from.

        The result is the same object as that of the last call if nothing was drawn since, which takes about 10 us to find out.
        """
        for name, generator in self._generators.items():
            if generator.has_moved(*self._seen[name]):
                words, rest = self._seen[name] = generator.read()
                sequence = self._sequences[name]
                sequence.follow(words)
                entry: dict[str, Any] = {"rest": rest, "check": zlib.crc32(words)}
                if sequence.is_lost or sequence.num_blocks > REPLAY_MAX:
                    entry["words"] = base64.b64encode(words).decode()
                else:
                    entry["blocks"] = sequence.num_blocks
                self._positions = {**self._positions, name: entry}
        return self._positions

    def go_to(self, positions: dict[str, dict[str, Any]]) -> None:
        """Set the generators to saved positions.

        A generator whose initial words differ from those of the saved run is left as it is, and a warning is logged.
        """
        for name, entry in positions.items():
            sequence = self._sequences[name]
            if "words" in entry:
                words = base64.b64decode(entry["words"])
            else:
                sequence.skip(entry["blocks"])
                words = sequence.words
            if zlib.crc32(words) != entry["check"]:
                log.warning(
                    "the stream of %s could not be resumed in this worker: worker_init_fn seeds it differently in each run", name
                )
                self._sequences[name] = _WordSequence(self._seen[name][0])
                continue
            self._generators[name].write(words, entry["rest"])
            sequence.words, sequence.is_lost = words, "words" in entry
            self._seen[name] = self._generators[name].read()
            self._positions = {**self._positions, name: entry}
