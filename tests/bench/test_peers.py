"""Other libraries as contestants: what is stored comes back, what is missing is said, and samples are compared."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from shmload.tools.bench.contestants import LoaderOptions, TorchOrder, torch_inline, torch_workers
from shmload.tools.bench.measure import num_rows, rows_digest
from shmload.tools.bench.peers import PEERS, Peer
from shmload.tools.bench.peers.continued import Continued
from shmload.tools.bench.peers.stored import packed, unpacked
from shmload.tools.bench.rounds import benchmark, contestants, prepare
from shmload.tools.bench.settings import Options
from shmload.tools.bench.workloads import WORKLOADS
from shmload.tools.named import BenchError

NOWHERE = Peer(name="nowhere", title="", package="no_such_package.inner", install="no-such-package")


def test_what_a_peer_stores_is_decoded_to_the_same_sample(small_dataset):
    for index in (0, 7, len(small_dataset) - 1):
        got = unpacked(packed(small_dataset, index), type(small_dataset).decoded)
        expected = small_dataset[index]
        leaves = torch.utils._pytree.tree_leaves
        for one, other in zip(leaves(expected), leaves(got), strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.asarray(one).dtype == np.asarray(other).dtype


def test_a_peer_that_is_not_installed_is_named_with_its_command(monkeypatch):
    assert NOWHERE.missing() == "needs no_such_package.inner: pip install no-such-package"
    monkeypatch.setitem(PEERS, "nowhere", NOWHERE)
    notes: list[str] = []
    assert "nowhere" not in contestants(Options(loaders=("shmload", "peers")), notes)
    assert "nowhere left out: needs no_such_package.inner: pip install no-such-package" in notes
    with pytest.raises(
        BenchError, match=r"--loader nowhere: needs no_such_package\.inner: pip install no-such-package"
    ):
        contestants(Options(loaders=("shmload", "nowhere")), [])


def test_installed_peers_are_found_in_the_order_of_the_table(monkeypatch):
    for name in PEERS:
        monkeypatch.setitem(PEERS, name, Peer(name=name, title="", package="json", install="json"))
    assert contestants(Options(loaders=("shmload", "peers", "torch")), []) == ("shmload", *PEERS, "torch")


def test_where_peers_take_part_all_loaders_read_the_same_number_of_samples(tmp_path):
    (task,) = prepare(Options(workloads=("rows",), loaders=("shmload", "webdataset"), quick=True), tmp_path, [])
    assert task.job.arguments["num_samples"] == 96 * 1024 // 16


def batch(numbers):
    return default_collate([(np.full(4, number, np.float32), number) for number in numbers])


def test_rows_digest_is_blind_to_order_and_to_how_rows_are_batched():
    whole = rows_digest(batch([1, 2, 3, 4]))
    assert whole == rows_digest(batch([4, 2, 1, 3]))
    assert whole == (rows_digest(batch([3])) + rows_digest(batch([2, 1, 4]))) % (1 << 128)


@pytest.mark.parametrize("other", [[1, 2, 3], [1, 2, 3, 5], [1, 2, 3, 3]])
def test_rows_digest_sees_a_row_that_is_missing_other_or_twice(other):
    assert rows_digest(batch([1, 2, 3, 4])) != rows_digest(batch(other))


def test_rows_are_counted_in_the_first_leaf_that_has_some():
    assert num_rows(batch([1, 2, 3])) == 3
    assert num_rows({"names": "ab", "x": torch.zeros(5, 2)}) == 5
    assert num_rows(["a", "b"]) == 2


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_torchs_order_is_told_over_epochs_with_and_without_workers(workers):
    """Workers that persist draw no base seed for the second epoch."""
    options = LoaderOptions(batch_size=3, num_workers=workers, seed=5)
    loader = (torch_workers if workers else torch_inline)(list(range(10)), options)
    orders = TorchOrder(list(range(10)), options)
    for _ in range(3):
        assert [batch.tolist() for batch in loader] == list(orders.epoch())


class Counting(Continued):
    def __init__(self):
        super().__init__(3)
        self.is_open = False

    def open(self):
        self.is_open = True
        try:
            yield from range(100)
        finally:
            self.is_open = False


def test_a_continued_stream_is_cut_into_epochs_and_ends_when_closed():
    stream = Counting()
    assert [list(stream), list(stream)] == [[0, 1, 2], [3, 4, 5]]
    assert stream.is_open
    stream.close()
    assert not stream.is_open
    stream.close()


@pytest.mark.slow
def test_webdataset_delivers_the_same_samples_out_of_its_own_files(bench):
    pytest.importorskip("webdataset")
    done = bench("--quick", "--workload", "tokens", "--loader", "torch-0,webdataset", "--json", "-", "--workers", "1")
    assert done.returncode == 0, done.stderr
    (section,) = json.loads(done.stdout)["workloads"]
    assert section["loaders"]["webdataset"]["same_bytes"] is True
    assert section["loaders"]["webdataset"]["compared"] == "rows of an epoch in any order"


@pytest.mark.slow
def test_peers_are_left_out_of_the_users_own_dataset_with_a_line(bench):
    pytest.importorskip("webdataset")
    done = bench("--quick", "--dataset", "planted:Good", "--loader", "torch-0,webdataset", "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert "webdataset left out: peers run on the built-in workloads" in " ".join(done.stdout.split())


def test_the_table_knows_the_workloads_that_a_peer_has_no_part_in():
    assert {workload for peer in PEERS.values() for workload in peer.unable} <= set(WORKLOADS)
    assert "photos" in PEERS["ffcv"].unable


@pytest.mark.slow
def test_a_peer_that_has_no_part_in_a_workload_is_left_out_with_a_line(monkeypatch):
    unable = Peer(name="unable", title="", package="json", install="json", unable={"rows": "it cannot"})
    monkeypatch.setitem(PEERS, "unable", unable)
    options = Options(workloads=("rows",), loaders=("torch-0", "unable"), rounds=1, quick=True)
    (section,) = benchmark(options, Mock()).workloads
    assert [*section.loaders] == ["torch-0"]
    assert "unable left out: it cannot" in section.notes
