"""DpexDataLoader accepts what programs for Dpex pass: the same names, positions and defaults."""

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


def test_signature_equals_that_of_dpex() -> None:
    given = inspect.signature(DpexDataLoader).parameters
    assert list(SEEDS.items()) == [(name, each.default) for name, each in given.items()]
    assert [name for name, each in given.items() if each.kind is each.KEYWORD_ONLY] == ["prefetch_factor"]


def test_default_prefetch_factor_is_accepted_without_workers() -> None:
    assert [batch.tolist() for batch in DpexDataLoader([1, 2, 3], batch_size=2, prefetch_factor=2)] == [[1, 2], [3]]
