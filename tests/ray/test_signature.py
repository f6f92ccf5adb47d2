"""DpexDataLoader takes what programs for Dpex give it: names, positions and defaults."""

from __future__ import annotations

import inspect

from shmload.cluster import DpexDataLoader

SEEDS = {
    "dataset": inspect.Parameter.empty,
    "distribute_mode": False,
    "head_address": "auto",
    "batch_size": 1,
    "shuffle": False,
    "sampler": None,
    "batch_sampler": None,
    "num_workers": 0,
    "collate_fn": None,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": 2,
}


def test_the_signature_is_the_seeds() -> None:
    given = inspect.signature(DpexDataLoader).parameters
    assert list(SEEDS.items()) == [(name, each.default) for name, each in given.items()]
    assert [name for name, each in given.items() if each.kind is each.KEYWORD_ONLY] == ["prefetch_factor"]


def test_its_own_prefetch_factor_is_no_error_without_workers() -> None:
    assert [batch.tolist() for batch in DpexDataLoader([1, 2, 3], batch_size=2, prefetch_factor=2)] == [[1, 2], [3]]
