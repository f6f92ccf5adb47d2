"""Generators that a dataset keeps for itself: seed mode reseeds the global ones, these it cannot know."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
OBJECTS_MAX = 2000  # looked at before giving up: a dataset may hold millions
ITEMS_MAX = 50  # of a list or dict: transforms stand in short ones


def own_generators(dataset: Any) -> list[str]:
    """The attribute paths of generators in a dataset, its transforms and what else it holds: ["dataset.transform.rng"]."""
    found: list[str] = []
    seen = {id(np.random.mtrand._rand), id(torch.default_generator), id(getattr(random, "_inst", None))}
    queue: list[tuple[str, Any]] = [("dataset", dataset)]
    while queue and len(seen) < OBJECTS_MAX:
        path, value = queue.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, KINDS):
            found.append(path)
        else:
            queue += ((path + name, part) for name, part in _parts(value))
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, np.ndarray, str, bytes, type)):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items())[:ITEMS_MAX])
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value[:ITEMS_MAX]))
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield from ((f".{name}", part) for name, part in value.__dict__.items())
