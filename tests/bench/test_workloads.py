"""Built-in datasets: what they read in place is what they return, and never zeros."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from shmload.tools.bench.contestants import LoaderOptions, RowView, Threads, fill, fills_batches, torch_getitems
from shmload.tools.bench.workloads import WORKLOADS
from shmload.tools.bench.workloads.photos import OWN_PHOTOS, decode_file, photo_files
from shmload.tools.named import BenchError


def poisoned(dataset, rows):
    """Arrays of the dataset's schema, full of a byte that no dataset writes by chance everywhere."""
    return {
        name: np.frombuffer(
            bytearray(b"\xa5") * (rows * int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype
        ).reshape(rows, *shape)
        for name, (dtype, shape) in dataset.schema.items()
    }


def test_reading_in_place_equals_getitem(small_dataset):
    if not fills_batches(small_dataset):
        pytest.skip("a plain dataset")
    indices = [3, 0, len(small_dataset) - 1, 3]
    out = poisoned(small_dataset, len(indices))
    fill(small_dataset, indices, out)
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


def test_a_pickled_dataset_reads_the_same_and_carries_no_file(small_dataset):
    data = pickle.dumps(small_dataset)
    for one, other in zip(
        torch.utils._pytree.tree_leaves(small_dataset[1]),
        torch.utils._pytree.tree_leaves(pickle.loads(data)[1]),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    if hasattr(small_dataset, "path"):
        assert len(data) < 1000


def test_each_workload_says_what_its_ratio_means():
    for name, workload in WORKLOADS.items():
        assert name == workload.name
        assert workload.title
        assert workload.meaning
        assert not workload.meaning.endswith(".")


def test_a_photo_has_other_crops_at_other_indices():
    photos = pytest.importorskip("simplejpeg") and WORKLOADS["photos"]
    assert photos.missing() is None
    from shmload.tools.bench.workloads.photos import Photos

    dataset = Photos(photo_files(OWN_PHOTOS)[:1])
    assert not np.array_equal(dataset[0]["image"], dataset[1]["image"])


def test_the_shipped_photos_are_few_and_have_their_licences():
    files = photo_files(OWN_PHOTOS)
    assert sum(Path(path).stat().st_size for path in files) < 700_000
    licences = (OWN_PHOTOS / "LICENCES").read_text()
    for path in files:
        assert path.rpartition("/")[2] in licences


def test_a_file_that_is_no_photo_is_named(tmp_path):
    pytest.importorskip("simplejpeg")
    path = tmp_path / "x.jpg"
    path.write_bytes(b"\xff\xd8\xff\xe0 not really")
    with pytest.raises(ValueError, match=r"x\.jpg: not a photo that can be decoded"):
        decode_file(str(path))
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="needs JPEG or PNG, given 7 bytes"):
        decode_file(str(path))


def test_a_row_view_writes_through():
    out = {"x": np.zeros((2, 3)), "label": np.zeros(2)}
    row = RowView(out, 1)
    row["label"] = 3
    row["x"][...] = 2
    assert out["label"].tolist() == [0, 3]
    assert out["x"].tolist() == [[0, 0, 0], [2, 2, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("factory", [Threads, torch_getitems])
def test_rivals_deliver_torchs_batches_in_torchs_order_over_two_epochs(factory, small_dataset):
    options = LoaderOptions(batch_size=len(small_dataset) // 3, num_workers=0, seed=5)
    if factory is torch_getitems and not fills_batches(small_dataset):
        with pytest.raises(BenchError, match="loader torch-getitems: needs a dataset with a schema"):
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
