"""Built-in datasets: reading in place equals reading samples, and nothing is all zeros."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from shmload.tools.bench.builtin_workloads import WORKLOADS
from shmload.tools.bench.core_limit import filler, protocol
from shmload.tools.bench.photos import OWN_PHOTOS, photo_files
from shmload.tools.bench.workload_table import FACTS
from shmload.tools.byte_size import size_text


def poisoned(dataset, rows):
    """Returns arrays for the dataset's schema, filled with a byte that no dataset would write everywhere."""
    return {
        name: np.frombuffer(bytearray(b"\xa5") * (rows * int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(
            rows, *shape
        )
        for name, (dtype, shape) in dataset.schema.items()
    }


def test_reading_in_place_equals_getitem(small_dataset):
    if protocol(small_dataset) == "__getitem__":
        pytest.skip("a plain dataset")
    indices = [3, 0, len(small_dataset) - 1, 3]
    out = poisoned(small_dataset, len(indices))
    filler(small_dataset)(indices, out)
    expected = default_collate([small_dataset[index] for index in indices])
    assert list(expected) == list(out)
    for name, tensor in expected.items():
        assert tensor.numpy().dtype == out[name].dtype
        np.testing.assert_array_equal(tensor.numpy(), out[name])


def test_contents_are_repeatable_and_not_zeros(small_dataset):
    first, again = (default_collate([small_dataset[5]]) for _ in range(2))
    for one, other in zip(torch.utils._pytree.tree_leaves(first), torch.utils._pytree.tree_leaves(again), strict=True):
        assert torch.equal(one, other)
        if one.numel() > 1:
            assert one.float().std() > 0


def test_pickled_dataset_reads_the_same_and_contains_no_file(small_dataset):
    data = pickle.dumps(small_dataset)
    for one, other in zip(
        torch.utils._pytree.tree_leaves(small_dataset[1]), torch.utils._pytree.tree_leaves(pickle.loads(data)[1]), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    if hasattr(small_dataset, "path"):
        assert len(data) < 1000


def test_every_workload_has_a_name_and_a_title():
    for name, workload in WORKLOADS.items():
        assert name == workload.name
        assert (workload.title, workload.batch_size) == (FACTS[name].title, FACTS[name].batch_size)


def test_sample_in_a_batch_has_the_described_size(small_dataset, request):
    batch = default_collate([small_dataset[0], small_dataset[1]])
    nbytes = sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(batch))
    assert nbytes == 2 * FACTS[request.node.callspec.params["small_dataset"]].sample_nbytes


def test_page_of_the_bench_describes_every_workload():
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    for name, facts in FACTS.items():
        row = f"| {name} | {facts.title} | {size_text(facts.sample_nbytes)} | {facts.batch_size:,} |"
        assert row in page


def test_photo_has_different_crops_at_different_indices():
    photos = pytest.importorskip("simplejpeg") and WORKLOADS["photos"]
    assert photos.missing() is None
    from shmload.tools.bench.photos import Photos

    dataset = Photos(photo_files()[:1])
    assert not np.array_equal(dataset[0]["image"], dataset[1]["image"])


def test_packaged_photos_are_few_and_have_licenses():
    files = photo_files()
    assert sum(Path(path).stat().st_size for path in files) < 700_000
    licences = (OWN_PHOTOS / "LICENCES").read_text()
    for path in files:
        assert path.rpartition("/")[2] in licences
