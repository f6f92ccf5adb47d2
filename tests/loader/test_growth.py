"""Slots that grow: the data is right, and the old memory is released."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from shmload import ShmLoader


class Growing:
    """Samples of text: sample i is i kilobytes long."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> str:
        return chr(97 + index % 26) * (index * 1000)


def same(samples: list[Any]) -> Any:
    return [torch.full((len(s),), ord(s[0]) if s else 0, dtype=torch.uint8) for s in samples]


def segments(stem: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"{stem}-payload")]


@pytest.mark.parametrize("collate", [None, same], ids=["text", "tensors"])
@pytest.mark.parametrize("seed", [None, 1], ids=["torch mode", "seed mode"])
def test_growing_batches_are_right_and_old_memory_is_released(seed: int | None, collate: Any) -> None:
    with ShmLoader(Growing(), batch_size=2, num_workers=2, seed=seed, collate_fn=collate) as loader:
        for step, batch in enumerate(loader):
            for row, value in enumerate(batch):
                index = 2 * step + row
                if collate is None:
                    assert value == Growing()[index]
                else:
                    assert value.numel() == index * 1000
                    assert value.eq(97 + index % 26).all()
        engine = loader._builder.last
        assert engine is not None
        assert loader.stats()["num_grown"] > engine.num_slots
        if seed is not None:
            assert len(segments(engine._ring_parts.group.stem)) <= 1 + engine.num_slots


def test_long_order_is_sent_in_its_own_segment() -> None:
    with ShmLoader(list(range(3000)), batch_sampler=[list(range(2500)), [1, 2], list(range(2999, 0, -1))], num_workers=1) as loader:
        assert [len(batch) for batch in loader] == [2500, 2, 2999]
