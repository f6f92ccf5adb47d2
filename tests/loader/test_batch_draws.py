"""Random numbers that `read_batch_into` draws from shared generators belong to samples, not to the batches that workers cut."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from shmload import ShmLoader

N = 24


class Drawing:
    """Adds draws of the global generators, and of one of its own, to the samples of a batch."""

    schema: Any = {"index": "int64", "drawn": ("float64", (4,))}

    def __init__(self) -> None:
        self.own = np.random.default_rng(0)
        self.calls: list[int] = []

    def __len__(self) -> int:
        return N

    def read_batch_into(self, indices: Any, out: Any) -> None:
        self.calls.append(len(indices))
        out["index"][...] = indices
        for row in range(len(indices)):
            out["drawn"][row] = [np.random.rand(), random.random(), float(torch.rand(())), self.own.random()]


class RaggedDrawing(Drawing):
    schema: Any = {"index": "int64", "drawn": ("float64", (None,))}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["index"][...] = indices
        out["drawn"] = [np.array([np.random.rand(), random.random(), self.own.random()]) for _ in indices]


class Plain(Drawing):
    def read_batch_into(self, indices: Any, out: Any) -> None:
        self.calls.append(len(indices))
        out["index"][...] = indices
        out["drawn"][...] = 1


def rows_of(loader: Any) -> dict[int, list[float]]:
    found = {}
    for batch in loader:
        drawn = batch["drawn"].tolist() if isinstance(batch["drawn"], torch.Tensor) else [each.tolist() for each in batch["drawn"]]
        found.update(zip(batch["index"].tolist(), drawn, strict=True))
    return found


def read(dataset: Any, **options: Any) -> dict[int, list[float]]:
    with ShmLoader(dataset, **{"batch_size": 6, "shuffle": True, "seed": 3, **options}) as loader:
        return rows_of(loader)


@pytest.mark.parametrize("kind", [Drawing, RaggedDrawing])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "backend": "thread"}, {"batch_size": 4}],
    ids=["no worker", "one worker", "two workers", "threads", "another batch size"],
)
def test_draws_are_those_of_the_sample(kind: Any, options: dict[str, Any]) -> None:
    ragged = {"ragged": "list"} if kind is RaggedDrawing else {}
    expected = {index: read(kind(), batch_size=1, **ragged)[index] for index in (0, 7, N - 1)}
    found = read(kind(), **options, **ragged)
    assert len({tuple(drawn) for drawn in found.values()}) == N
    assert {index: found[index] for index in expected} == expected


def test_ranks_draw_what_one_trainer_draws() -> None:
    alone = read(Drawing())
    assert {**read(Drawing(), batch_size=3, rank=0, world_size=2), **read(Drawing(), batch_size=3, rank=1, world_size=2)} == alone


def test_batches_without_draws_are_read_at_once() -> None:
    for dataset, expected in ((Plain(), [6] * 3), (Drawing(), [1] * 18)):
        with ShmLoader(dataset, batch_size=6, seed=3) as loader:  # the first batch is read again by the check of first samples
            iterator = iter(loader)
            next(iterator)
            dataset.calls.clear()
            list(iterator)
        assert dataset.calls == expected


def test_torch_mode_reads_batches_at_once_and_draws_from_the_stream() -> None:
    dataset = Drawing()
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    (batch,) = (batch for number, batch in enumerate(ShmLoader(dataset, batch_size=6)) if number == 0)
    assert 6 in dataset.calls
    assert len({tuple(drawn) for drawn in batch["drawn"].tolist()}) == 6


class Broken(Drawing):
    def read_batch_into(self, indices: Any, out: Any) -> None:
        if 13 in np.asarray(indices).tolist():
            raise RuntimeError("broken file")
        super().read_batch_into(indices, out)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", [{}, {"seed": 3}], ids=["torch mode", "seed mode"])
def test_error_of_a_batch_names_the_sample(num_workers: int, mode: dict[str, Any]) -> None:
    loader = ShmLoader(Broken(), batch_size=6, num_workers=num_workers, **mode)
    with loader, pytest.raises(RuntimeError, match="broken file") as caught:
        list(loader)
    (note,) = caught.value.__notes__
    assert note.startswith("shmload: sample 13, epoch 0, batch 2; to step through it: shmload.debug.read(dataset, 13")
