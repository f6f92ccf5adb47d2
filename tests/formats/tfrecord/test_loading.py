"""TFRecord files through the loader: workers of every kind, threads, resuming."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload import ShardCorrupt, ShmLoader
from shmload.formats import TFRecordDataset
from tests.formats.tfrecord.conftest import NUM_SAMPLES, SCHEMA, sample

slow = pytest.mark.slow(reason="starts two workers for each of three loaders")


def taken(batch: Any) -> list[dict[str, Any]]:
    """Returns a batch's samples as numpy arrays."""
    return [
        {name: value if isinstance(value, str) else value.numpy().copy() for name in SCHEMA for value in [batch[name][row]]}
        for row in range(len(batch["label"]))
    ]


def in_order(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda each: -each["label"])


def test_several_files_are_one_dataset_in_the_order_of_their_names(shards):
    dataset = TFRecordDataset(shards, SCHEMA)
    assert len(dataset) == NUM_SAMPLES
    for number in (0, 9, 10, 14, 15, 21):
        np.testing.assert_equal(dataset[number], sample(number))
        np.testing.assert_equal(dataset[number - NUM_SAMPLES], sample(number))
    for index in (NUM_SAMPLES, -NUM_SAMPLES - 1):
        with pytest.raises(IndexError, match=f"index {index} is out of range for a TFRecordDataset of 22 records"):
            dataset[index]
    for index in (1.5, "1"):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            dataset[index]
    assert repr(dataset) == "TFRecordDataset(3 files, example, image, label, tokens, text, verify='all')"


@pytest.mark.slow(reason="starts workers, also by spawn")
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "spawn"},
        {"num_workers": 1, "threads_per_worker": 2},
    ],
    ids=["fork", "spawn", "threads"],
)
@pytest.mark.parametrize("is_open", [False, True], ids=["fresh", "opened before"])
def test_workers_deliver_every_sample_once(shards, options, is_open):
    dataset = TFRecordDataset(shards, SCHEMA)
    if is_open:
        len(dataset)
    with ShmLoader(dataset, batch_size=4, shuffle=True, seed=3, ragged="list", **options) as loader:
        found = [each for batch in loader for each in taken(batch)][:NUM_SAMPLES]
    np.testing.assert_equal(in_order(found), [sample(number) for number in range(NUM_SAMPLES)])
    assert [each["label"] for each in found] != [each["label"] for each in in_order(found)]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=slow)])
def test_loader_resumes_within_an_epoch(shards, num_workers):
    def loader() -> ShmLoader:
        dataset = TFRecordDataset(shards, SCHEMA)
        return ShmLoader(dataset, batch_size=4, shuffle=True, seed=3, ragged="list", num_workers=num_workers)

    with loader() as whole:
        expected = [each for batch in whole for each in taken(batch)]
    with loader() as first:
        batches = iter(first)
        found = [each for _ in range(2) for each in taken(next(batches))]
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        found += [each for batch in second for each in taken(batch)]
    np.testing.assert_equal(found, expected)


def test_threads_share_a_dataset(shards):
    dataset = TFRecordDataset(shards, SCHEMA)
    numbers = list(range(NUM_SAMPLES)) * 10
    with ThreadPoolExecutor(4) as pool:
        for number, each in zip(numbers, pool.map(dataset.__getitem__, numbers), strict=True):
            np.testing.assert_equal(each, sample(number))


def test_pickled_dataset_is_small_and_rejects_files_of_another_size(shards):
    dataset = TFRecordDataset(shards, SCHEMA)
    np.testing.assert_equal(pickle.loads(pickle.dumps(dataset))[3], sample(3))
    assert len(dataset) == NUM_SAMPLES
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1500
    np.testing.assert_equal(pickle.loads(pickled)[3], sample(3))
    last = dataset.paths[-1]
    os.replace(dataset.paths[0], last)
    dataset.paths[0] = last
    with pytest.raises(
        ShardCorrupt, match=r"00002\.tfrecord: has \d+ bytes, and had \d+ when this dataset first read it: create the dataset again"
    ):
        pickle.loads(pickled.replace(b"00000.tfrecord", b"00002.tfrecord"))[3]


def test_error_that_ends_the_epoch_names_the_bad_record(shards):
    path = Path(TFRecordDataset(shards).paths[0])
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    dataset = TFRecordDataset(shards, SCHEMA)
    with (
        ShmLoader(dataset, batch_size=4, ragged="list") as loader,
        pytest.raises(ShardCorrupt, match=r"00000\.tfrecord: record 0, which starts at byte 0: corrupted: the checksum"),
    ):
        list(loader)
