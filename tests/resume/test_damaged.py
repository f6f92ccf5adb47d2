"""A damaged state is refused wherever the damage is; a state that only looks different is accepted."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shmload import ShmLoader, StateMismatch
from shmload.growing import SampleCache
from shmload.schedule.state_checksum import with_checksum
from tests.growing.growing_kit import dataset_of, put
from tests.resume import fuzz


@pytest.mark.slow(reason="loads 3000 damaged states")
def test_mutated_states_are_refused_or_equivalent(tmp_path: Path) -> None:
    taken = [fuzz.read(*each) for each in islice(fuzz.mutations(3, tmp_path), 3000)]
    assert 0 < sum(taken) < len(taken)


@pytest.mark.slow(reason="flips thousands of bits, and loads the state each time")
def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    for made, state in fuzz.corpus(tmp_path):
        text = json.dumps(state).encode()
        bits = range(8 * len(text)) if len(text) < 1024 else range(0, 8 * len(text), 37)
        for bit in bits:
            flipped = bytearray(text)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                mutated = json.loads(flipped)
            except ValueError:
                continue
            if mutated != state:
                with pytest.raises(StateMismatch):
                    made.load_state_dict(mutated)


def with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: with_tuples(value[name]) for name in reversed(value)}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("number", range(11))
def test_state_survives_other_ways_of_saving(tmp_path: Path, number: int) -> None:
    made, state = fuzz.corpus(tmp_path)[number]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for kept in (json.loads(json.dumps(state, indent=3)), torch.load(file, weights_only=True), dict(reversed(state.items()))):
        made.load_state_dict(kept)
        assert made.state_dict() == state
    if "counters" not in state and state["mode"] != "join":  # other states' entries are lists
        made.load_state_dict(with_tuples(state))
        assert made.state_dict() == state


def test_error_explains_what_is_wrong_with_a_state() -> None:
    loader = ShmLoader(range(10), 2, seed=1)
    state = loader.state_dict()
    with pytest.raises(
        StateMismatch, match=r"damaged or was changed by hand: its contents have the checksum \d+, and it stores \d+"
    ):
        loader.load_state_dict({**state, "position": 2})
    with pytest.raises(StateMismatch, match="a state is JSON, and this is not: "):
        loader.load_state_dict(
            {**state, "order": float("nan"), "check": 3} | {"epoch": 1, "order": "x", "children": {"a": float("nan")}}
        )


@pytest.mark.parametrize("options", [{"seed": 1}, {}])
def test_checksum_covers_the_rest_of_the_state(options: dict[str, Any]) -> None:
    state = ShmLoader(range(10), 2, **options).state_dict()
    assert {name for name in state if name == "check"}
    for name in state:
        with pytest.raises(StateMismatch):
            ShmLoader(range(10), 2, **options).load_state_dict({n: v for n, v in state.items() if n != name})


def test_run_named_in_a_state_is_not_used_as_a_path(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path / "cache", capacity_bytes=1 << 20)
    put(cache, range(25))
    loader = ShmLoader(dataset_of(cache, run="a"), 6, seed=1)
    next(iter(loader))
    state = loader.state_dict()
    named = state["children"]["snapshot"]
    (tmp_path / "else").mkdir()
    frozen = tmp_path / "cache" / ".growing" / "runs" / named["run"] / "epoch-0.json"
    (tmp_path / "else" / "epoch-0.json").write_bytes(frozen.read_bytes())
    for run in ("../../../else", "/etc", "", 3, None):
        with pytest.raises(StateMismatch, match="the state names no snapshot of epoch 0"):
            loader.load_state_dict(with_checksum({**state, "children": {"snapshot": {**named, "run": run}}}))
    assert loader.state_dict() == state


def test_state_with_an_impossible_epoch_of_a_growing_dataset_is_refused(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path / "cache", capacity_bytes=1 << 20)
    put(cache, range(25))
    loader = ShmLoader(dataset_of(cache, run="a"), 6, seed=1)
    state = loader.state_dict()
    for position in (0, 6):
        far = with_checksum({**state, "epoch": 1 << 33, "position": position})
        with pytest.raises(StateMismatch, match="a growing dataset's epoch is at most 8388607, the state's is 8589934592"):
            loader.load_state_dict(far)
    assert loader.state_dict() == state
