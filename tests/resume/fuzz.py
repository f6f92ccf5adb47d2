"""Loads mutated states into loaders and pipelines; tests/formats/fuzz.py runs it: python -m tests.formats.fuzz ../resume
[seconds] [seed]

The allowed outcomes are a StateMismatch that changes nothing or, if the mutation does not change the meaning, the same position.
Some mutations get a valid checksum, as from an attacker: then a StateMismatch and any position are allowed.
"""

from __future__ import annotations

import copy
import json
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmload import LengthBuckets, Mix, ShmLoader, StateMismatch
from shmload.growing import SampleCache
from shmload.pipeline import Collate, Conveyer, Join, Permutation, Range
from shmload.schedule.state_checksum import with_checksum
from tests.growing.growing_kit import dataset_of, put
from tests.resume import noisy_data as data

OWN = {
    "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "array": np.arange(4, dtype=">i2"),
    "scalar": np.float32(0.5),
    3: (b"bytes", {"a set"}, 1 << 70, float("nan"), OrderedDict(a=None)),
}


class StateOfManyKinds(data.StatefulLines):
    """Returns a state with values of many kinds."""

    def state_dict(self) -> dict[Any, Any]:
        return {**super().state_dict(), **OWN}


def _made(folder: Path) -> list[Any]:
    cache_ = SampleCache(folder, capacity_bytes=1 << 20)
    put(cache_, range(25))
    return [
        ShmLoader(range(50), 6, shuffle=True, seed=1),
        ShmLoader(Mix([(range(30), 1), (range(20), 2)]), 6, shuffle=True, seed=1),
        ShmLoader(range(20), batch_sampler=LengthBuckets([1 + i % 5 for i in range(20)], batch_size=3), seed=1),
        ShmLoader(range(50), 6, sampler=data.StatefulSampler(50), seed=1),
        ShmLoader(dataset_of(cache_, run="a"), 6, seed=1),
        ShmLoader(range(50), 6, shuffle=True),
        ShmLoader(range(50), 6, sampler=data.StatefulSampler(50)),
        ShmLoader(StateOfManyKinds(), 6),
        Conveyer([Permutation(12, seed=7, repeating=False), Collate(2)]),
        Conveyer([Join([(Conveyer([Range(4)]), 1), (Conveyer([Range(3)]), 2)])]),
        Join([(Conveyer([Range(4)]), 1), (Conveyer([Range(3)]), 2)]),
    ]


@cache
def corpus(folder: Path) -> list[tuple[Any, Any]]:
    """Returns loaders and pipelines with a state of each, passed through JSON."""
    found = []
    for made in _made(folder):
        batches = iter(made)
        next(batches), next(batches)
        found.append((made, json.loads(json.dumps(made.state_dict()))))
    return found


VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    1 << 40,
    1 << 64,
    10**30,
    0.5,
    "",
    "x",
    "0",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
    {"$pickle": ["x", ""]},
]


def _changed(value: Any, rng: random.Random) -> Any:
    """Returns the value with one place changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        kind = rng.randrange(6)
        if kind == 0:
            del value[name]
        elif kind == 1:
            value[rng.choice(["x", "$own", "$tensor", "check"])] = value.pop(name)
        else:
            value[name] = _changed(value[name], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.randrange(4) == 0:
            del value[at]
        else:
            value[at] = _changed(value[at], rng)
        return value
    if isinstance(value, str) and value.startswith("{") and rng.random() < 0.9:
        with suppress(ValueError):  # changed before, and no longer JSON
            return json.dumps(_changed(json.loads(value), rng))
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(["", "A", "0", "!", "é"]) + value[at + 1 :]
    if type(value) is int and rng.random() < 0.7:
        return value + rng.choice([-(1 << 33), -1, 1, 2, 6, 1 << 33])
    return rng.choice(VALUES)


def mutations(seed: int, folder: Path) -> Iterator[tuple[Any, Any, Any, bool]]:
    """Yields the loader or pipeline, its state, a mutated state, and whether the latter has a valid checksum."""
    rng = random.Random(seed)
    whose = corpus(folder)
    while True:
        made, state = rng.choice(whose)
        if rng.random() < 0.4:  # flip bits of the serialized text
            text = bytearray(json.dumps(state).encode())
            for _ in range(rng.choice([1, 1, 1, 3])):
                text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
            with suppress(ValueError):
                yield made, state, json.loads(text), False
            continue
        changed = copy.deepcopy(state)
        for _ in range(rng.choice([1, 1, 2, 4])):
            changed = _changed(changed, rng)
        if rng.random() < 0.1:  # use another one's state: some fit
            yield made, state, rng.choice(whose)[1], True
        is_sealed = isinstance(changed, dict) and rng.random() < 0.6
        yield made, state, with_checksum(changed) if is_sealed else changed, is_sealed


def read(made: Any, state: Any, mutated: Any, is_sealed: bool) -> bool:
    """Loads the mutated state and returns whether it was accepted."""
    made.load_state_dict(state)
    before = made.state_dict()
    assert before == state
    if mutated == {}:  # the empty state, which torchdata ignores
        return True
    try:
        made.load_state_dict(mutated)
    except StateMismatch:
        assert made.state_dict() == before, f"refused, but the loader changed: {made!r}, {mutated!r:.900}"
        return False
    assert is_sealed or made.state_dict() == state, f"damaged, but accepted: {made!r}, {mutated!r:.600}"
    return True
