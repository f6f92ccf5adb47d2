"""The generators from which plain calls of random, numpy and torch draw: those of the process, or those of one worker thread.

A worker process has the interpreter's own. Worker threads cannot share them, because numbers would depend on which thread draws
first, so each has a set of its own (thread_generators.py), and whatever seeds, saves or compares generators works on a set.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class GeneratorSet:
    """One generator of each library.

    Attributes:
        python: the generator of `random.random()`.
        numpy: the generator of `np.random.random()`.
        seed_numpy: seeds it, as `np.random.seed` does.
        torchs: an object whose `default_generator` is the generator of `torch.rand()`; None for the torch module, once it is
            imported.
    """

    python: random.Random
    numpy: np.random.RandomState
    seed_numpy: Callable[[Any], None]
    torchs: Any = None

    @property
    def torch_home(self) -> Any:
        """Return the object whose `default_generator` is torch's generator; None if torch is not imported."""
        return sys.modules.get("torch") if self.torchs is None else self.torchs

    @property
    def numpys_bits(self) -> Any:
        """Return numpy's bit generator, which the user may have replaced."""
        return self.numpy._bit_generator

    def torch_state(self) -> Any:
        """Return the state of torch's generator as a tensor; None if torch is not imported."""
        home = self.torch_home
        return None if home is None else home.default_generator.get_state()


# the methods are those of random and numpy themselves, before thread_generators.py puts others in their place
_methods: tuple[Any, Any] = random.seed, np.random.get_state
OF_PROCESS = GeneratorSet(_methods[0].__self__, _methods[1].__self__, np.random.seed)


class _OfThread(threading.local):
    generators = OF_PROCESS


_of_thread = _OfThread()


def current_set() -> GeneratorSet:
    """Return the set from which this thread draws."""
    return _of_thread.generators


def use_set(generators: GeneratorSet) -> None:
    """Let this thread draw from a set.

    Args:
        generators: the set.
    """
    _of_thread.generators = generators
