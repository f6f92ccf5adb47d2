"""Check the types of a loader's arguments when the loader is constructed, so that the error names the wrong argument."""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shmload.engine.tuning.auto_number import is_auto


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or _is_integer(value)


def _has_samples(value: Any) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")  # what iter() accepts


_TRUTHS = ("shuffle", "pin_memory", "persistent_workers", "in_order")  # torch mode takes any object, as torch does
# arguments, their check, and the description of the valid types for the error
_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("num_workers",), lambda value: is_auto(value) or _is_integer(value), 'an integer of at least 0 or "auto"'),
    (
        ("prefetch_factor",),
        lambda value: value is None or is_auto(value) or _is_integer(value),
        'an integer of at least 1, "auto" or None',
    ),
    (
        ("max_bad", "max_restarts", "rank", "world_size", "snapshot_every_n_steps"),
        lambda value: value is None or _is_integer(value),
        "an integer or None",
    ),
    (("timeout",), _is_number, "a number of seconds"),
    (("sample_timeout_s",), lambda value: value is None or _is_number(value), "a number of seconds or None"),
    (("ring_bytes",), lambda value: value is None or _is_number(value), "a number of bytes or None"),
    (("generator",), lambda value: isinstance(value, torch.Generator | None), "a torch.Generator or None"),
    (("sampler",), lambda value: value is None or _has_samples(value), "an iterable of indices or None"),
    (("batch_sampler",), lambda value: value is None or _has_samples(value), "an iterable of lists of indices or None"),
    (("collate_fn",), lambda value: value is None or callable(value), "a function of a list of samples or None"),
    (("worker_init_fn",), lambda value: value is None or callable(value), "a function of a worker's number or None"),
    (("after_batch",), lambda value: value is None or callable(value), "a function of a batch or None"),
    ((*_TRUTHS, "seed_samples", "trust_state"), lambda value: value is None or isinstance(value, int | np.bool_), "True or False"),
    (("audit",), lambda value: isinstance(value, str | os.PathLike | None), "the path of a folder or None"),
    (("batch_size",), lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool)), "an int or None"),
)
_CHECKED_BY_TORCH = ("num_workers", "prefetch_factor", "timeout")  # in torch mode, where the error is torch's


def check_types(given: Mapping[str, Any]) -> None:
    """Raise unless each argument has a valid type.

    Arguments that must be one of a few words are not checked here.

    Args:
        given: the arguments of `ShmLoader` by name.
    Raises:
        TypeError: an argument has the wrong type.
    """
    for name, text in _wrong(given):
        if not _is_left_to_torch(name, given):
            raise TypeError(text)


def add_wrong_type(error: Exception, given: Mapping[str, Any]) -> None:
    """Add a note to an error of torch's DataLoader, if an argument has a wrong type, because torch's message may not name it.

    Args:
        error: the error.
        given: the arguments of `ShmLoader` by name.
    """
    for name, text in _wrong(given):
        if name not in _TRUTHS and _is_left_to_torch(name, given):
            error.add_note(f"shmload: {text}")


def _wrong(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each argument of a wrong type, and the text that says which types are valid."""
    for names, is_valid, what in _TYPES:
        for name in names:
            if not is_valid(value := given[name]):
                yield name, f"{name} must be {what}; got {value!r} of type {type(value).__name__}"


def _is_left_to_torch(name: str, given: Mapping[str, Any]) -> bool:
    """Return whether torch itself decides if a wrong type is an error, so that programs get torch's own error."""
    if name == "batch_size":
        return True
    if given["seed"] is not None:
        return False
    is_late = name in _CHECKED_BY_TORCH and isinstance(given[name], float) and given[name] > 0  # torch raises in the first pass
    return name in (*_TRUTHS, *_CHECKED_BY_TORCH) and not is_late
