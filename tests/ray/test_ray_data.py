"""Rows of Ray Data: Arrow blocks are read by number into the batch, and order, state and workers are ShmLoader's."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from shmload import SampleError, ShmLoader
from tests.ray.cluster_kit import Cluster

if importlib.util.find_spec("ray") is None:
    pytest.skip('Ray is not installed: pip install "shmload[ray]"', allow_module_level=True)

import ray  # only where it is

from shmload.formats import RayDataset

IMAGE = pa.fixed_shape_tensor(pa.uint8(), (2, 3))  # what Ray's own tensors are, too: a shape, and lists of values


class Executed:
    """A ray.data.Dataset whose blocks are these tables."""

    def __init__(self, *tables: pa.Table) -> None:
        self.tables = list(tables)
        self.context = self.execution_options = self
        self.preserve_order = False

    def to_arrow_refs(self) -> list[pa.Table]:
        assert self.preserve_order, "blocks come in the order in which they are done"
        return self.tables


class Remote:
    """A function that runs here."""

    def __init__(self, function: Any) -> None:
        self.remote = function

    def options(self, **_: Any) -> Remote:
        return self


class Context:
    gcs_address = "head:6379"


@pytest.fixture(autouse=True)
def objects_are_their_references(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "cluster" not in request.fixturenames:
        monkeypatch.setattr(ray, "get", lambda found: found)
        monkeypatch.setattr(ray, "remote", Remote)
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "get_runtime_context", Context)


def table(first: int, count: int) -> pa.Table:
    rows = range(first, first + count)
    return pa.table(
        {
            "index": list(rows),
            "image": pa.ExtensionArray.from_storage(IMAGE, pa.array([[row] * 6 for row in rows], IMAGE.storage_type)),
            "tokens": pa.array([list(range(row % 3)) for row in rows], pa.list_(pa.int32())),
            "text": ["a" * row for row in rows],
        }
    )


@pytest.mark.slow(reason="a program that executes a dataset of Ray Data on a cluster, and reads it in four kinds of processes")
def test_batches_and_states_are_the_same_whoever_reads_the_blocks(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "tests.ray.data_program", cluster.address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.stdout.endswith("all is as expected\n"), done.stderr[-4000:]


def test_rows_of_all_blocks_come_by_number() -> None:
    made = Executed(table(0, 5), table(5, 0), table(5, 4), table(9, 3))
    dataset = RayDataset(made)
    assert not made.preserve_order
    assert dataset.schema == {"index": ("int64", ()), "image": ("uint8", (2, 3)), "tokens": ("int32", (None,)), "text": str}
    assert (len(dataset), dataset.block_starts.tolist(), dataset.block_size) == (12, [0, 5, 9, 12], 5)
    with ShmLoader(dataset, 5, shuffle=True, seed=2) as loader:
        for batch in loader:
            for at, index in enumerate(batch["index"].tolist()):
                assert batch["image"][at].tolist() == [[index] * 3] * 2
                assert batch["tokens"][at].tolist() == list(range(index % 3))
                assert batch["text"][at] == "a" * index


def test_a_copy_reads_the_same_blocks_wherever_it_is_opened() -> None:
    dataset = pickle.loads(pickle.dumps(RayDataset(Executed(table(0, 4), table(4, 3)), columns=["index", "text"])))
    again = pickle.loads(pickle.dumps(dataset))
    assert [again[row] for row in (6, 0, -1)] == [{"index": row, "text": "a" * row} for row in (6, 0, 6)]


def test_nulls_are_an_error_or_a_value() -> None:
    held = pa.table({"x": pa.array([1, None, 3], pa.int64())})
    with pytest.raises(SampleError, match=r"block 1 of the ray.data.Dataset: column 'x' has 1 nulls"):
        RayDataset(Executed(pa.table({"x": [0]}), held))[3]
    assert RayDataset(Executed(held), fill_null={"x": 7})[1] == {"x": 7}


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ([table(0, 0)], {}, "the ray.data.Dataset has no rows"),
        ([table(0, 1)], {"columns": []}, "columns needs at least one name; None takes all of them"),
        ([table(0, 1)], {"columns": ["x"]}, r"block 0: columns names \['x'\], which are not there"),
        (
            [table(0, 1), table(1, 1).drop(["text"])],
            {},
            "block 1: column 'text' is not there, and string in block 0; the blocks of",
        ),
        ([pa.table({"x": [{"y": 1}]})], {}, "block 0: column 'x' of struct<y: int64> is no field of a batch"),
    ],
)
def test_what_is_no_dataset_of_rows_is_refused(tables: list[pa.Table], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayDataset(Executed(*tables), **options)


def test_a_fork_of_the_process_that_made_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = RayDataset(Executed(table(0, 4)))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match='give multiprocessing_context="forkserver", or backend="ray"'):
        dataset[0]
