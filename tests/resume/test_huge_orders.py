"""Orders that are computed need the same resources for any number of samples, and so does starting at any position."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from shmload import BlockShuffle, Mix, ShmLoader
from shmload.modes.sampler_reader import SamplerReader
from shmload.modes.sampler_start import SamplerStart

N = 10**11  # would be 745 GiB as an array of int64


class Numbers:
    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return int(index)


CASES: dict[str, Any] = {
    "in order": lambda **k: ShmLoader(Numbers(), 4, **k),
    "one by one": lambda **k: ShmLoader(Numbers(), None, **k),
    "drop_last": lambda **k: ShmLoader(Numbers(), 4, drop_last=True, **k),
    "sampler": lambda **k: ShmLoader(Numbers(), 4, sampler=SequentialSampler(Numbers()), **k),
    "batch sampler": lambda **k: ShmLoader(
        Numbers(), batch_sampler=BatchSampler(SequentialSampler(Numbers()), 4, drop_last=False), **k
    ),
    "replacement": lambda **k: ShmLoader(Numbers(), 4, sampler=RandomSampler(Numbers(), replacement=True), **k),
    "a range": lambda **k: ShmLoader(Numbers(), 4, sampler=range(N), **k),
    "seed": lambda **k: ShmLoader(Numbers(), 4, seed=1, **k),
    "seed, shuffled": lambda **k: ShmLoader(Numbers(), 4, seed=1, shuffle=True, **k),
    "seed, blocks": lambda **k: ShmLoader(Numbers(), 4, seed=1, sampler=BlockShuffle(N, block_size=1 << 20), **k),
    "seed, mix": lambda **k: ShmLoader(Mix([(Numbers(N // 2), 1), (Numbers(N // 2), 1)]), 4, seed=1, shuffle=True, **k),
    "seed, sampler": lambda **k: ShmLoader(Numbers(), 4, seed=1, sampler=SequentialSampler(Numbers()), **k),
}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow(reason="starts a worker for each of two loaders"))])
@pytest.mark.parametrize("case", CASES)
def test_1e11_samples_need_no_memory(case: str, workers: int) -> None:
    with CASES[case](num_workers=workers) as loader:
        iterator = iter(loader)
        next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        expected = torch.as_tensor(next(iterator)).tolist()
        loader.stats()
    with CASES[case](num_workers=workers) as loader:
        loader.load_state_dict(state)
        assert expected == torch.as_tensor(next(iter(loader))).tolist()


@pytest.mark.parametrize("is_batched", [True, False])
def test_any_position_is_reached_at_once(is_batched: bool) -> None:
    sampler: Any = SequentialSampler(Numbers())
    if is_batched:
        sampler = BatchSampler(sampler, 4, drop_last=False)
    start = SamplerStart(sampler, None, is_resumed=True)
    reader = SamplerReader(sampler, None, every=1, iterator=iter(sampler), start=start, seed_between=False, auto_collation=True)
    reader.resume({**reader.state(0), "taken": N // 4 - 2})
    batches = reader.batches()
    if is_batched:
        assert [list(range(N - 8, N - 4)), list(range(N - 4, N))] == [batch.tolist() for batch in batches]
    else:
        assert next(batches) == N // 4 - 2
