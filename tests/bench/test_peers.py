"""Other libraries as contestants: their stored data are read back, files are written once, and they deliver the same samples."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.contestants.common import Continued, TorchOrder, decoder, fills_batches, packed, unpacked, written
from benchmarks.contestants.ways import Threads, torch_getitems, torch_inline
from shmload.tools.bench.contestants import LoaderOptions, torch_loader

slow = pytest.mark.slow(reason="starts a worker of torch's and reads three epochs")
PEERS = {
    "webdataset": "webdataset",
    "spdl": "spdl",
    "grain": "grain",
    "litdata": "litdata",
    "mosaicml": "streaming",
    "tfdata": "tensorflow",
    "dali": "nvidia",
    "ffcv": "ffcv",
}
IN_ORDER = ("spdl", "grain", "dali")


def test_every_peer_is_tested():
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "contestants"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__", "common", "ways"} == set(PEERS)


def test_sample_stored_by_a_peer_is_decoded_unchanged(small_dataset):
    for index in (0, 7, len(small_dataset) - 1):
        got = unpacked(packed(small_dataset, index), decoder(small_dataset))
        expected = small_dataset[index]
        leaves = torch.utils._pytree.tree_leaves
        for one, other in zip(leaves(expected), leaves(got), strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.asarray(one).dtype == np.asarray(other).dtype


def test_data_of_the_user_are_not_stored_for_peers():
    with pytest.raises(ValueError, match=r"peers store the samples of built-in workloads: needs one of .*, given list"):
        packed([1, 2], 0)


def test_files_are_written_once_and_again_after_an_interruption(tmp_path):
    options = LoaderOptions(batch_size=1, num_workers=0, seed=0, scratch=tmp_path)

    def write(folder):
        (folder / "data").touch()
        calls.append(sorted(path.name for path in folder.iterdir()))
        if len(calls) == 1:
            (folder / "half").touch()
            raise OSError("full")

    calls: list[list[str]] = []
    with pytest.raises(OSError, match="full"):
        written(options, write)
    assert [path.name for path in written(options, write).iterdir()] == ["data"]
    assert written(options, write).is_dir()
    assert calls == [["data"], ["data"]]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=slow)])
def test_torchs_order_is_predicted_over_epochs_with_and_without_workers(workers):
    """Covers that persistent workers draw no base seed for the second epoch."""
    options = LoaderOptions(batch_size=3, num_workers=workers, seed=5)
    loader = (torch_loader if workers else torch_inline)(list(range(10)), options)
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


def test_endless_stream_is_divided_into_epochs_and_ends_when_closed():
    stream = Counting()
    assert [list(stream), list(stream)] == [[0, 1, 2], [3, 4, 5]]
    assert stream.is_open
    stream.close()
    assert not stream.is_open
    stream.close()


@pytest.mark.slow(reason="writes the data of every workload and reads two epochs twice")
@pytest.mark.parametrize("factory", [Threads, torch_getitems])
def test_peers_deliver_torchs_batches_in_torchs_order_over_two_epochs(factory, small_dataset):
    options = LoaderOptions(batch_size=len(small_dataset) // 3, num_workers=0, seed=5)
    if factory is torch_getitems and not fills_batches(small_dataset):
        with pytest.raises(ValueError, match="loader torch_getitems: needs a dataset with a schema"):
            factory(small_dataset, options)
        return
    rival = factory(small_dataset, options)
    reference = DataLoader(small_dataset, options.batch_size, shuffle=True, generator=options.generator())
    for _ in range(2):
        for expected, got in zip(reference, rival, strict=True):
            pairs = zip(torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(got), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
    if factory is Threads:
        rival.close()


@pytest.mark.slow(reason="measures in forked processes")
@pytest.mark.parametrize("peer", sorted(PEERS))
def test_peer_runs_and_delivers_the_same_bytes_if_it_keeps_the_order(bench, peer):
    if not find_spec(PEERS[peer]):
        pytest.skip(f"needs {PEERS[peer]}")
    name = f"benchmarks.contestants.{peer}:open_loader"
    done = bench("--quick", "--workload", "tokens", "--loader", f"{name},torch", "--json", "--workers", "1")
    assert done.returncode == 0, done.stderr
    (section,) = json.loads(done.stdout)["workloads"]
    assert section["loaders"][name]["same_bytes"] is (True if peer in IN_ORDER else None)
