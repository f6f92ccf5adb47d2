"""Rows of Ray Data: Arrow blocks are read into the batch by row number; order, state and workers are ShmLoader's."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from shmload import SampleError, ShmLoader
from tests.ray.cluster_kit import Cluster

if importlib.util.find_spec("ray") is None:
    pytest.skip('Ray is not installed: pip install "shmload[ray]"', allow_module_level=True)

import ray  # only where it is

from shmload.formats import RayDataset, RayStream

IMAGE = pa.fixed_shape_tensor(pa.uint8(), (2, 3))  # as in Ray's own tensors: a shape, and lists of values


class FakeDataset:
    """Replaces a ray.data.Dataset that has these tables as its blocks."""

    def __init__(self, *tables: pa.Table) -> None:
        self.tables = list(tables)
        self.context = self.execution_options = self
        self.preserve_order = False

    def to_arrow_refs(self) -> list[pa.Table]:
        assert self.preserve_order, "preserve_order must be set, or blocks arrive in the order in which they finish"
        return self.tables

    def streaming_split(self, count: int) -> list[FakeIterator]:
        assert self.preserve_order, "equal parts need preserve_order, or blocks go to the faster part"
        return [FakeIterator(self.tables[number::count]) for number in range(count)]


class FakeIterator:
    """Replaces a DataIterator."""

    def __init__(self, tables: list[pa.Table]) -> None:
        self.tables = tables

    def iter_batches(self, *, batch_size: None, batch_format: str) -> list[pa.Table]:
        assert batch_format == "pyarrow"
        return self.tables


class LocalRemote:
    """Replaces a remote function: runs it in this process."""

    def __init__(self, function: Any) -> None:
        self.remote = function

    def options(self, **_: Any) -> LocalRemote:
        return self


class Context:
    gcs_address = "head:6379"


@pytest.fixture(autouse=True)
def objects_are_their_references(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "cluster" not in request.fixturenames:
        monkeypatch.setattr(ray, "get", lambda found: found)
        monkeypatch.setattr(ray, "remote", LocalRemote)
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "get_runtime_context", Context)


def table(first: int, count: int) -> pa.Table:
    rows = range(first, first + count)
    return pa.table(
        {
            "index": list(rows),
            "image": pa.ExtensionArray.from_storage(IMAGE, pa.array([[row % 256] * 6 for row in rows], IMAGE.storage_type)),
            "tokens": pa.array([list(range(row % 3)) for row in rows], pa.list_(pa.int32())),
            "text": ["a" * row for row in rows],
        }
    )


@pytest.mark.slow(reason="a program that executes a dataset of Ray Data on a cluster, and reads it in four kinds of processes")
def test_batches_and_states_do_not_depend_on_the_process_that_reads_blocks(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "tests.ray.data_program", cluster.address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220)
    assert done.stdout.endswith("all is as expected\n"), done.stderr[-4000:]


def test_rows_of_all_blocks_are_read_by_index() -> None:
    made = FakeDataset(table(0, 5), table(5, 0), table(5, 4), table(9, 3))
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


def test_stream_delivers_rows_block_by_block_and_resumes_from_a_state() -> None:
    made = FakeDataset(table(0, 5), table(5, 0), table(5, 4), table(9, 3))
    columns = ["index", "image", "text"]
    with ShmLoader(RayStream(made, columns), 5) as loader:
        assert not made.preserve_order
        batches = iter(loader)
        begun = [next(batches)["index"].tolist()]
        state = loader.state_dict()
    with ShmLoader(RayStream(made, columns), 5) as again:
        again.load_state_dict(state)
        for batch in again:
            begun.append(batch["index"].tolist())
            for at, index in enumerate(begun[-1]):
                assert batch["image"][at].tolist() == [[index] * 3] * 2
                assert batch["text"][at] == "a" * index
    assert [sample["tokens"].tolist() for sample in RayStream(made)] == [list(range(index % 3)) for index in range(12)]
    assert begun == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


def test_rows_of_a_large_block_are_read_in_bulk_and_are_independent() -> None:
    whole = table(0, 600)
    found = list(RayStream(FakeDataset(whole.select(["index", "image", "text"]))))
    assert [(sample["index"], sample["image"].tolist(), sample["text"]) for sample in found] == [
        (index, [[index % 256] * 3] * 2, "a" * index) for index in range(600)
    ]


def test_each_worker_reads_its_part_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = RayStream(FakeDataset(*(table(first, 2) for first in range(0, 12, 2))), columns=["index"], num_readers=2)
    parts = []
    for worker in range(2):
        monkeypatch.setattr(
            "shmload.formats.ray_blocks.get_worker_info", lambda worker=worker: SimpleNamespace(id=worker, num_workers=2)
        )
        parts.append([int(sample["index"]) for sample in pickle.loads(pickle.dumps(stream))])
    assert parts == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=r"a RayStream of num_readers=2 is read by 1 workers: .* as many num_workers as the stream has"
    ):
        next(iter(stream))


def test_stream_that_would_repeat_or_skip_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [int(sample["index"]) for sample in RayStream(FakeIterator([table(0, 2)]))] == [0, 1]
    with pytest.raises(ValueError, match=r"a ray.data.DataIterator has one reader; got num_readers=2"):
        RayStream(FakeIterator([]), num_readers=2)
    with pytest.raises(ValueError, match="num_readers is the number of workers that read, at least 1; got 0"):
        RayStream(FakeDataset(), num_readers=0)
    with pytest.raises(TypeError, match=r"RayStream takes a ray.data.Dataset, or a DataIterator .* got list"):
        RayStream([])
    with pytest.raises(ValueError, match="block 1: column 'text' is not there"):
        list(RayStream(FakeDataset(table(0, 1), table(1, 1).drop(["text"]))))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"each of the 2 ranks would execute the whole .* one of dataset.streaming_split\(2\)"):
        RayStream(FakeDataset(table(0, 1)))


def test_unpickled_dataset_reads_the_same_blocks_in_any_process() -> None:
    dataset = pickle.loads(pickle.dumps(RayDataset(FakeDataset(table(0, 4), table(4, 3)), columns=["index", "text"])))
    again = pickle.loads(pickle.dumps(dataset))
    assert [again[row] for row in (6, 0, -1)] == [{"index": row, "text": "a" * row} for row in (6, 0, 6)]


def test_nulls_are_an_error_or_a_value() -> None:
    held = pa.table({"x": pa.array([1, None, 3], pa.int64())})
    with pytest.raises(SampleError, match=r"block 1 of the ray.data.Dataset: column 'x' has 1 nulls"):
        RayDataset(FakeDataset(pa.table({"x": [0]}), held))[3]
    assert RayDataset(FakeDataset(held), fill_null={"x": 7})[1] == {"x": 7}


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ([table(0, 0)], {}, "the ray.data.Dataset has no rows"),
        ([table(0, 1)], {"columns": []}, "columns needs at least one name; None takes all of them"),
        ([table(0, 1)], {"columns": ["x"]}, r"block 0: columns names \['x'\], which do not exist"),
        (
            [table(0, 1), table(1, 1).drop(["text"])],
            {},
            "block 1: column 'text' is not there, and string in block 0; the blocks of",
        ),
        ([pa.table({"x": [{"y": 1}]})], {}, "block 0: column 'x' of struct<y: int64> cannot be a field of a batch"),
    ],
)
def test_dataset_without_rows_is_refused(tables: list[pa.Table], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayDataset(FakeDataset(*tables), **options)


def test_use_in_a_fork_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, stream = RayDataset(FakeDataset(table(0, 4))), RayStream(FakeIterator([table(0, 4)]))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match='give multiprocessing_context="forkserver", or backend="ray"'):
        dataset[0]
    with pytest.raises(RuntimeError, match="RayStream cannot be read in a fork of the process that made it"):
        next(iter(stream))
