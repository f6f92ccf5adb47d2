"""Let the decoders of one sample's images make the same random choices, so that a mask stays aligned with its image."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np


class _Thread(threading.local):
    """The choices made for the sample that this thread decodes: what they depend on, and the generator before them."""

    made: list[tuple[Any, np.random.Generator]] | None = None


_thread = _Thread()


def one_sample(functions: Iterable[Any]) -> AbstractContextManager[None]:
    """Return a context in which the images of one sample are decoded.

    If two or more of the functions are ImageDecoders, those of equal crop and flip make the same random choices in it.
    """
    count = sum(getattr(function, "shares_choices", None) is True for function in functions)
    return _sharing() if count > 1 else nullcontext()


@contextmanager
def _sharing() -> Iterator[None]:
    outer, _thread.made = _thread.made, []
    try:
        yield
    finally:
        _thread.made = outer


def generator_for(choices: Any, generator: Callable[[], np.random.Generator]) -> np.random.Generator:
    """Return the generator from which a decoder draws.

    Args:
        choices: what is chosen, such as a crop; decoders of one sample for which this is equal draw the same numbers.
        generator: returns the sample's own generator.
    """
    if _thread.made is None:
        return generator()
    for known, before in _thread.made:
        if known == choices:
            return copy.deepcopy(before)
    found = generator()
    _thread.made.append((choices, copy.deepcopy(found)))
    return found
