"""shmload's own arguments are refused where they have no effect, and implicit sharding is shown."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from shmload import LengthBuckets, ShmLoader, Weighted

IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 1, "world_size": 2}, "rank=1 and world_size=2 have no effect without seed="),
    "rank and sampler": (
        {"seed": 7, "rank": 1, "world_size": 2, "sampler": [0, 1]},
        "rank=1 and world_size=2 have no effect with a sampler of your own",
    ),
    "uneven": ({"uneven": "exact"}, "uneven='exact' has no effect without seed="),
    "uneven and drop_last": ({"seed": 7, "uneven": "drop", "drop_last": True}, "uneven='drop' has no effect with drop_last=True"),
    "max_bad": ({"max_bad": 3}, 'max_bad=3 has no effect with on_error="raise"'),
    "snapshots": ({"seed": 7, "snapshot_every_n_steps": 10}, "snapshot_every_n_steps=10 has no effect with seed="),
    "no snapshots": ({"seed": 7, "snapshot_every_n_steps": None}, "snapshot_every_n_steps=None has no effect with seed="),
    "ring_bytes": ({"ring_bytes": 1 << 20}, "ring_bytes=1048576 has no effect with num_workers=0"),
    "max_restarts": ({"max_restarts": 0}, "max_restarts=0 has no effect with num_workers=0"),
}


@pytest.mark.parametrize("name", IDLE)
def test_argument_without_effect_is_refused_by_name(name: str) -> None:
    options, message = IDLE[name]
    with pytest.raises(ValueError) as caught:
        ShmLoader(range(10), batch_size=2, **options)
    assert str(caught.value).startswith(f"{message}: ")


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 7, "rank": 1, "world_size": 2},
        {"seed": 7, "rank": 1, "world_size": 2, "sampler": Weighted([1.0] * 10)},
        {"seed": 7, "rank": 1, "world_size": 2, "uneven": "exact", "batch_sampler": LengthBuckets([1] * 10, batch_size=2)},
        {"uneven": "pad", "snapshot_every_n_steps": 1},  # the defaults, written out
        {"on_error": "skip", "max_bad": 3},
        {"seed": 7, "drop_last": True},
        {"rank": 0, "world_size": 1},  # a single rank reads everything
        {"seed": 7, "rank": 1, "world_size": 2, "sampler": torch.utils.data.DistributedSampler(range(10), 2, 1)},  # type: ignore[arg-type]
    ],
)
def test_arguments_with_an_effect_and_a_loaders_own_attributes_are_accepted(options: dict[str, Any]) -> None:
    size = {} if "batch_sampler" in options else {"batch_size": 2}
    loader: ShmLoader[Any] = ShmLoader(range(10), **size, **options)
    again: ShmLoader[Any] = ShmLoader(range(10), **size, **{name: getattr(loader, name) for name in options})
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]


class Items(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def test_rank_names_the_audit_file_in_torch_mode(tmp_path: Any) -> None:
    loader: ShmLoader[int] = ShmLoader(Items(), batch_size=2, rank=1, world_size=2, audit=tmp_path)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_sharding_by_the_environment_is_in_the_repr_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.INFO, "shmload"):
        loader: ShmLoader[int] = ShmLoader(range(8), batch_size=2, seed=7)
        assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]
        list(loader)
    assert ", rank 1 of 2 (from RANK and WORLD_SIZE), " in repr(loader)
    assert [record.getMessage() for record in caplog.records if "part of rank" in record.getMessage()] == [
        "this ShmLoader reads the part of rank 1 of 2, according to RANK and WORLD_SIZE; give rank=0, world_size=1 to read all samples"
    ]


def test_explicit_sharding_is_in_the_repr_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shmload"):
        loader: ShmLoader[int] = ShmLoader(range(8), batch_size=2, seed=7, rank=1, world_size=2)
    assert ", rank 1 of 2, " in repr(loader)
    assert not caplog.records
    assert "rank" not in repr(ShmLoader(range(8), seed=7))
