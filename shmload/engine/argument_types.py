"""Check the types of a loader's arguments when the loader is constructed, so that the error names the wrong argument."""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any

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


# arguments, their check, and the description of the valid types for the error
_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("num_workers",), lambda value: is_auto(value) or _is_integer(value), 'an integer or "auto"'),
    (("prefetch_factor",), lambda value: value is None or is_auto(value) or _is_integer(value), 'an integer, "auto" or None'),
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
    (("audit",), lambda value: isinstance(value, str | os.PathLike | None), "the path of a folder or None"),
)
_CHECKED_BY_TORCH = ("num_workers", "prefetch_factor", "timeout")  # in torch mode, where the error is torch's


def check_types(given: Mapping[str, Any]) -> None:
    """Raise unless each argument has a valid type.

    Arguments that torch uses as truth values, and those that must be one of a few words, are not checked here.

    Args:
        given: the arguments of `ShmLoader` by name.
    Raises:
        TypeError: an argument has the wrong type.
    """
    for names, is_valid, what in _TYPES:
        for name in names:
            if given["seed"] is None and name in _CHECKED_BY_TORCH:
                continue
            if not is_valid(given[name]):
                raise TypeError(f"{name} must be {what}; got {given[name]!r} of type {type(given[name]).__name__}")
