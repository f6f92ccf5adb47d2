"""Reads rows of Ray Data through ShmLoader on a cluster and checks them. Runs as its own process.

python -m tests.ray.data_program ADDRESS
"""

from __future__ import annotations

import sys
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
import pytest
import ray
import ray.data
import torch

from shmload import Ray, ShmLoader
from shmload.formats import RayDataset, RayStream
from tests.ray.cluster_kit import copied_batches

NUM_ROWS = 23
NUM_LARGE = 168
MB = 1 << 20


def row(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "image": np.full((100, 200, 3), index, np.uint8),
        "text": "a" * index,
        "tokens": np.arange(1 + index % 4, dtype=np.int32).tolist(),
        "left out": {"nested": index},
    }


def check(batches: list[Any], expected: list[list[int]]) -> None:
    assert expected == [batch["index"].tolist() for batch in batches], (expected, batches)
    for batch in batches:
        for at, index in enumerate(batch["index"].tolist()):
            wanted = row(index)
            assert np.array_equal(wanted["image"], batch["image"][at].numpy())
            assert batch["image"].dtype == torch.uint8
            assert wanted["text"] == batch["text"][at]
            assert wanted["tokens"] == batch["tokens"][at].tolist()


def check_stream() -> None:
    """Checks a streamed Dataset that is larger than both nodes' memory: it resumes from a state, and two ranks' parts contain all
    rows.
    """
    large = ray.data.range(NUM_LARGE, override_num_blocks=NUM_LARGE // 8).map(
        lambda row: {**row, "image": np.full(MB, row["id"], np.uint8)}, concurrency=2
    )
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "forkserver"}
    begun: list[Any] = []
    with ShmLoader(RayStream(large, num_readers=2), **options) as loader:
        for step, batch in enumerate(loader):
            assert (batch["image"].amin(1) == batch["id"]).all()
            assert (batch["image"].amax(1) == batch["id"]).all()
            begun.append(batch["id"].tolist())
            if step == 1:
                state = loader.state_dict()
            del batch
    assert sorted(chain.from_iterable(begun)) == list(range(NUM_LARGE))
    with ShmLoader(RayStream(large, num_readers=2), **options) as again:
        again.load_state_dict(state)
        assert [batch["id"].tolist() for batch in again] == begun[2:]
    parts = [RayStream(part) for part in ray.data.range(10, override_num_blocks=5).streaming_split(2)]
    ranks = [ShmLoader(part, **{**options, "num_workers": 1}) for part in parts]
    for _ in range(2):
        found = [batch["id"].tolist() for pair in zip_longest(*ranks) for batch in pair if batch is not None]
        assert sorted(chain.from_iterable(found)) == list(range(10)), found
    for rank in ranks:
        rank.close()


def main(address: str) -> None:
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    check_stream()
    made = ray.data.from_items([row(index) for index in range(NUM_ROWS)], override_num_blocks=4)
    dataset = RayDataset(made.filter(lambda row: True), columns=["index", "image", "text", "tokens"])
    assert not made.context.execution_options.preserve_order
    assert len(dataset) == NUM_ROWS
    assert [dataset[index]["index"] for index in range(NUM_ROWS)] == list(range(NUM_ROWS))
    assert len(dataset.bytes_by_node()) in (1, 2)

    class Numbers:
        def __len__(self) -> int:
            return NUM_ROWS

        def __getitem__(self, index: int) -> int:
            return index

    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5}
    with ShmLoader(Numbers(), **options) as loader:
        expected = [batch.tolist() for batch in loader]
    with ShmLoader(dataset, **options) as here:
        check(copied_batches(here), expected)
        here.set_epoch(0)
        begun = copied_batches(islice(iter(here), 2))
        state = here.state_dict()
    actors = {"num_workers": 2, "backend": Ray(address=address)}
    with ShmLoader(dataset, **options, **actors) as far:
        far.load_state_dict(state)
        check(begun + copied_batches(islice(iter(far), 2)), expected[:4])
        state = far.state_dict()
    with ShmLoader(dataset, **options, num_workers=1, multiprocessing_context="forkserver") as local:
        local.load_state_dict(state)
        check(copied_batches(local), expected[4:])
    with (
        ShmLoader(dataset, **options, num_workers=1, multiprocessing_context="fork") as forked,
        pytest.raises(RuntimeError, match="cannot be read in a fork"),
    ):
        next(iter(forked))


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("all is as expected")
