"""The states of the generators from which a sampler draws an epoch: read, save, and restore them."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shmload.worker.sample_rng import generators_kept

GENERATORS = ("of_torch", "of_python", "of_numpy")  # attributes of Origin for the global generators


@dataclass(frozen=True)
class Origin:
    """The states of the generators from which a sampler may draw an epoch.

    Attributes:
        of_torch: state of torch's global CPU generator.
        of_python: state of Python's generator.
        of_numpy: state of numpy's generator.
        own: state of the loader's `generator`, if it has one.
        of_sampler: state of the sampler's `generator`, if it has one that is not the loader's.
    """

    of_torch: torch.Tensor
    of_python: tuple[Any, ...]
    of_numpy: Any
    own: torch.Tensor | None
    of_sampler: torch.Tensor | None = None

    def dumps(self, is_torch_enough: bool) -> dict[str, str]:
        """Return the states as a JSON-able dict, about 3.4 KB for each generator.

        Args:
            is_torch_enough: leave out Python's and numpy's states.
        """
        states = {"torch": self.of_torch, "generator": self.own, "sampler": self.of_sampler}
        texts = {name: _torch_text(state) for name, state in states.items() if state is not None}
        if not is_torch_enough:
            _, words, gauss = self.of_python
            texts["random"] = f"{gauss!r} {_text(np.array(words, np.uint32).tobytes())}"
            if self.of_numpy[0] == "MT19937":
                _, words, place, has_gauss, cached = self.of_numpy
                texts["numpy"] = f"{place} {has_gauss} {float(cached)!r} {_text(np.asarray(words, np.uint32).tobytes())}"
        return texts

    def bytes_of(self, name: str) -> bytes:
        """Return the state of one of GENERATORS as bytes. Equal states have equal bytes."""
        if name == "of_torch":
            return self.of_torch.numpy().tobytes()
        if name == "of_python":
            _, words, gauss = self.of_python
            return np.array(words, np.uint32).tobytes() + repr(gauss).encode()
        kind, *parts = self.of_numpy if isinstance(self.of_numpy, tuple) else ("", self.of_numpy)
        return b" ".join(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode() for part in (kind, *parts))

    def is_same(self, other: Origin, name: str) -> bool:
        """Return whether one of GENERATORS has the same state in `other`."""
        return self.bytes_of(name) == other.bytes_of(name)

    def replaced(self, other: Origin, names: Iterable[str]) -> Origin:
        """Return a copy with the states of `other` for the generators named."""
        return replace(self, **{name: getattr(other, name) for name in names})

    def is_now(self) -> bool:
        """Return whether every global generator has this state."""
        now = origin_of(None)
        return all(self.is_same(now, name) for name in GENERATORS)

    @classmethod
    def loads(cls, texts: dict[str, str]) -> Origin:
        """Return the states that `dumps` wrote; a generator that was left out has its present state."""
        now = origin_of(None)
        python, numpy, torch_state, own = now.of_python, now.of_numpy, now.of_torch, None
        if "torch" in texts:
            torch_state = _tensor(texts["torch"])
        if "generator" in texts:
            own = _tensor(texts["generator"])
        if "random" in texts:
            gauss, words = texts["random"].split()
            numbers = np.frombuffer(_bytes(words), np.uint32).tolist()
            python = (3, tuple(numbers), None if gauss == "None" else float(gauss))
        if "numpy" in texts:
            place, has_gauss, cached, words = texts["numpy"].split()
            numpy = ("MT19937", np.frombuffer(_bytes(words), np.uint32), int(place), int(has_gauss), float(cached))
        return cls(torch_state, python, numpy, own, _tensor(texts["sampler"]) if "sampler" in texts else None)


def origin_of(generator: torch.Generator | None, of_sampler: torch.Generator | None = None) -> Origin:
    """Return the present states of all global generators, the loader's own and the sampler's own. Takes about 40 us.

    Args:
        generator: the loader's own, if it has one.
        of_sampler: the sampler's own, if it has one that is not the loader's.
    """
    own, its = (None if each is None else each.get_state() for each in (generator, of_sampler))
    return Origin(torch.get_rng_state(), random.getstate(), np.random.get_state(), own, its)


def torch_origin(generator: torch.Generator | None) -> Origin:
    """Return the present states of torch's generators alone, which can only be dumped with `is_torch_enough`. Takes about 5 us.

    Args:
        generator: the loader's own, if it has one.
    """
    return Origin(torch.get_rng_state(), (), None, None if generator is None else generator.get_state())


@contextmanager
def replayed(origin: Origin, generator: torch.Generator | None, of_sampler: torch.Generator | None = None) -> Iterator[None]:
    """Set the generators to saved states within the block, and restore the global ones afterward.

    Args:
        origin: the saved states.
        generator, of_sampler: the loader's own and the sampler's own, which keep the states after the draws.
    """
    with generators_kept():
        set_global(origin)
        set_own(origin, generator, of_sampler)
        yield


def set_global(origin: Origin) -> None:
    """Set the global generators to their states in `origin`."""
    torch.set_rng_state(origin.of_torch)
    random.setstate(origin.of_python)
    np.random.set_state(origin.of_numpy)


def set_own(origin: Origin, generator: torch.Generator | None, of_sampler: torch.Generator | None) -> None:
    """Set the loader's own generator and the sampler's own, where they exist, to their states in `origin`."""
    for each, state in ((generator, origin.own), (of_sampler, origin.of_sampler)):
        if each is not None and state is not None:
            each.set_state(state)


def _text(state: bytes) -> str:
    return base64.b64encode(state).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


# the state of torch's CPU generator has 5056 bytes: a head of 24, 624 words of 8 of which 4 are used, a tail of 40
_HEAD, _WORDS_END, _NBYTES = 24, 24 + 8 * 624, 5056


def _torch_text(state: torch.Tensor) -> str:
    raw = state.numpy().tobytes()
    if len(raw) != _NBYTES:
        return _text(raw)
    words = np.frombuffer(raw[_HEAD:_WORDS_END], np.uint64).astype(np.uint32).tobytes()
    return _text(raw[:_HEAD] + raw[_WORDS_END:] + words)


def _tensor(text: str) -> torch.Tensor:
    raw, around = _bytes(text), _HEAD + _NBYTES - _WORDS_END
    if len(raw) == around + 4 * 624:
        words = np.frombuffer(raw[around:], np.uint32).astype(np.uint64).tobytes()
        raw = raw[:_HEAD] + words + raw[_HEAD:around]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
