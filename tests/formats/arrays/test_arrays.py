"""ArrayDataset: rows equal numpy's, structure is kept, memory is shared once; torch's TensorDataset is read as torch reads it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tracemalloc
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shmload import ShardCorrupt, ShmLoader
from shmload.formats import ArrayDataset

DTYPES = ["u1", "<i2", ">i4", "<f8", ">f2", ">c8", "?"]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_of_any_view_equal_numpys(data: Any) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5))
    array = np.random.default_rng(0).integers(0, 99, shape).astype(data.draw(st.sampled_from(DTYPES)))
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    array = array[tuple(data.draw(st.slices(n)) for n in array.shape)]
    n = len(array)
    indices = data.draw(st.lists(st.integers(-n, n - 1), max_size=40)) if n else []
    dataset = ArrayDataset(array)
    out = np.full((len(indices), *array.shape[1:]), 77, array.dtype.newbyteorder("="))
    dataset.read_batch_into(indices, {"data": out})
    np.testing.assert_array_equal(array[np.array(indices, int)], out)


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("kind", ["dict", "tuple", "list", "named", "single"])
def test_a_batch_has_the_structure_of_the_input(kind: str) -> None:
    x, y = np.arange(12).reshape(6, 2), torch.arange(6).bfloat16()
    given = {"dict": {"x": x, "y": y}, "tuple": (x, y), "list": [x, y], "named": Pair(x, y), "single": x}[kind]
    dataset = ArrayDataset(given)
    (batch,) = ShmLoader(dataset, batch_size=6)
    parts = list(batch.values()) if kind == "dict" else [batch] if kind == "single" else list(batch)
    assert type(batch) is (torch.Tensor if kind == "single" else type(given))
    assert torch.equal(torch.from_numpy(x), parts[0])
    assert kind == "single" or torch.equal(y, parts[1])
    sample = dataset[-1]
    first = {"dict": lambda: sample["x"], "single": lambda: sample}.get(kind, lambda: sample[0])()
    assert first.tolist() == [10, 11]


@pytest.mark.parametrize("order", ["C", "F"])
def test_files_and_views_of_memory_maps_are_pickled_as_paths(tmp_path: Path, order: Any) -> None:
    x = np.asarray(np.arange(60, dtype=np.int32).reshape(10, 6), order=order)
    np.save(tmp_path / "x.npy", x)
    os.link(tmp_path / "x.npy", tmp_path / "by another name.npy")
    (tmp_path / "link.npy").symlink_to("x.npy")
    maps = [np.load(tmp_path / name, mmap_mode="r") for name in ("x.npy", "link.npy", "by another name.npy")]
    for source, expected in ((tmp_path / "x.npy", x), *((each[2:8, 1::2], x[2:8, 1::2]) for each in maps)):
        dataset = pickle.loads(pickle.dumps(ArrayDataset({"x": source})))
        assert dataset._held._memory is None
        np.testing.assert_array_equal(expected, [s["x"] for s in (dataset[i] for i in range(len(dataset)))])


@pytest.mark.parametrize("change", ["removed", "replaced", "renamed", "renamed and replaced"])
def test_memory_map_of_a_moved_or_replaced_file_keeps_its_content(tmp_path: Path, change: str) -> None:
    path, other = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(path, np.arange(6).reshape(3, 2))
    shown = np.load(path, mmap_mode="r")
    np.save(other, np.zeros((3, 2), int))
    if change == "removed":
        path.unlink()
    if change.startswith("renamed"):
        path.rename(tmp_path / "z.npy")
    if change.endswith("replaced"):
        other.replace(path)
    dataset = ArrayDataset(shown)
    assert dataset[2].tolist() == [4, 5]
    assert pickle.loads(pickle.dumps(dataset))[2].tolist() == [4, 5]


def test_pickling_twice_copies_memory_into_one_segment() -> None:
    dataset = ArrayDataset((np.arange(10), torch.arange(10).bfloat16()))
    first, second = pickle.dumps(dataset), pickle.dumps(dataset)
    assert first == second
    assert len(first) < 1000
    other = pickle.loads(first)
    assert (9, torch.tensor(9.0, dtype=torch.bfloat16)) == other[9]
    assert dataset._held._memory is not None
    assert dataset._held._memory.reference == other._held._memory.reference


def test_sharing_strided_arrays_copies_one_at_a_time() -> None:
    arrays = {name: np.ones((1 << 10, 1 << 11), np.uint8)[:, ::2] for name in "abcdef"}  # 1 MiB each
    dataset = ArrayDataset(arrays)
    tracemalloc.start()
    try:
        dataset.shared()
        assert tracemalloc.get_traced_memory()[1] < 2.5 * (1 << 20)
    finally:
        tracemalloc.stop()
    assert dataset[3]["f"].all()


@pytest.mark.slow(reason="starts two workers, also by spawn")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_deliver_every_row(method: str) -> None:
    dataset = ArrayDataset({"x": np.arange(200).reshape(100, 2)})
    with ShmLoader(dataset, batch_size=7, num_workers=2, multiprocessing_context=method) as loader:
        assert list(range(0, 200, 2)) == [v for b in loader for v in b["x"][:, 0].tolist()]


@pytest.mark.parametrize("num_bytes", [(1 << 18) - 1, 1 << 18, (1 << 18) + 77])
def test_rows_copied_with_nontemporal_stores_are_complete(num_bytes: int) -> None:
    rows = np.random.default_rng(3).integers(0, 256, (5, num_bytes), np.uint8)
    around = np.full(4 * num_bytes + 2, 7, np.uint8)
    got = around[1:-1].reshape(4, num_bytes)  # not aligned to a cache line
    ArrayDataset(rows).read_batch_into(np.array([3, 0, -1, 3]), {"data": got})
    np.testing.assert_array_equal(rows[[3, 0, 4, 3]], got)
    assert (around[0], around[-1]) == (7, 7)


def test_index_out_of_range_writes_nothing() -> None:
    dataset = ArrayDataset(np.arange(4))
    out = np.full(2, 9)
    with pytest.raises(IndexError, match="index 4 is out of range for 4 samples"):
        dataset.read_batch_into([0, 4], {"data": out})
    assert out.tolist() == [9, 9]
    with pytest.raises(IndexError, match="index -5 is out of range for 4 samples"):
        dataset[-5]
    with pytest.raises(TypeError, match="float"):
        dataset[1.5]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(4)}, ValueError, "one row for each sample; got {'a': 3, 'b': 4}"),
        ({}, ValueError, "got no array"),
        ({1: np.zeros(3), "1": np.ones(3)}, ValueError, "two arrays have one name as text: 1, '1'; name each differently"),
        (np.zeros(()), ValueError, "array 'data' has no axis"),
        (np.array(["a"]), TypeError, "dtype <U1, which no tensor has"),
        (np.zeros(2, "O"), TypeError, "dtype object, which no tensor has"),
        ([3], TypeError, "array '0' is of type int; needs a numpy array"),
        (np.ma.masked_equal([1, 2], 2), TypeError, "array 'data' is masked, and no tensor has a mask"),
        (torch.zeros(2, requires_grad=True), TypeError, "requires_grad=True; rows are read from dense tensors"),
    ],
)
def test_invalid_input_is_an_error(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ArrayDataset(given)


IMPORTS = """
import sys
import torch
from torch.utils.data import TensorDataset
from shmload import ShmLoader

before = "numpy.ma" in sys.modules  # numpy 1 imports it at once
with ShmLoader(TensorDataset(torch.zeros(8, 2)), 4, seed=1) as loader:
    list(loader)
print(before == ("numpy.ma" in sys.modules))
"""


def test_masked_arrays_are_recognized_without_importing_them(output_of: Callable[..., str]) -> None:
    """Each worker would import them for itself, which takes 30 ms and 6 MB."""
    assert output_of(IMPORTS) == "True\n"


def test_batch_of_the_wrong_size_or_strides_is_an_error() -> None:
    dataset = ArrayDataset(np.arange(4))
    with pytest.raises(ValueError, match="the buffer must have 8 bytes for 1 rows of 8, got 16"):
        dataset.read_batch_into([0], {"data": np.zeros(2)})
    with pytest.raises(ValueError, match="field 'data': rows are written into C-contiguous memory"):
        dataset.read_batch_into([0, 1], {"data": np.zeros(4)[::2]})


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array(["2026-01-01"], "datetime64[D]"), np.array(5.0)])
def test_error_about_an_invalid_array_names_its_file(array: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", array)
    with pytest.raises((TypeError, ValueError), match=r"labels\.npy.*'y'"):
        ArrayDataset({"x": np.arange(2), "y": tmp_path / "labels.npy"})


def test_damaged_header_is_an_error_or_another_valid_array(tmp_path: Path) -> None:
    """A .npy file has no checksum: a damaged header is either valid and describes another array, or raises ShardCorrupt."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(20).reshape(5, 4))
    whole, draw = path.read_bytes(), np.random.default_rng(1)
    num_refused = num_read = 0
    for i in range(300):
        damaged = bytearray(whole[: draw.integers(len(whole))] if i % 3 == 0 else whole)
        for at in draw.integers(0, 128, 2):
            if at < len(damaged):
                damaged[at] = draw.integers(256)
        path.write_bytes(damaged)
        try:
            dataset = ArrayDataset(path)
        except (ShardCorrupt, TypeError, ValueError) as error:
            num_refused += not isinstance(error, ShardCorrupt) or str(path) in str(error)
        else:
            num_read += 1
            [dataset[index] for index in range(min(len(dataset), 50))]
    assert num_refused > 100
    assert num_read + num_refused == 300
    path.write_bytes(whole[:-1])
    with pytest.raises(ShardCorrupt, match=r"x.npy, offset 128: shape \(5, 4\) of int64 needs 160 bytes, 159 are left"):
        ArrayDataset(path)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"\x93NUMPZ\x01\x00", "offset 8: this is not the header of a .npy file: the magic string is not correct"),
        (b"\x93NUMPY\x09\x00", r"offset 8: this is not the header of a .npy file: its version .9, 0. is not 1.0, 2.0 or 3.0"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "this is not the header of a .npy file: EOF"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", "an array of object and shape .* is not a block of numbers"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-3,), }", "shape .-3,. is not a block of numbers"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999,), }", "needs 799999999999992 bytes, 24 are left"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (1<<62,), }", "this is not the header of a .npy file"),
        ("{'descr': __import__('os').system('true'), 'shape': (3,), }", "this is not the header of a .npy file"),
        (
            "{'descr': '<f8', 'fortran_order': False, 'shape': (3.0,), }",
            "this is not the header of a .npy file: shape is not valid",
        ),
    ],
    ids=str,
)
def test_malicious_header_is_an_error_and_nothing_is_unpickled(tmp_path: Path, head: bytes | str, message: str) -> None:
    if isinstance(head, str):
        text = head.ljust(117).encode() + b"\n"
        head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    path = tmp_path / "x.npy"
    path.write_bytes(head + bytes(24))
    if head.endswith(b"{"):
        path.write_bytes(head)
    with pytest.raises(ShardCorrupt, match=message) as caught:
        ArrayDataset(path)
    assert str(caught.value).startswith(f"{path}, offset ")


def test_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.npy").touch()
    with pytest.raises(ShardCorrupt, match=r"x.npy, offset 0: this is not the header of a .npy file: EOF"):
        ArrayDataset(tmp_path / "x.npy")


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 2)])
def test_empty_arrays_have_empty_rows(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "x.npy", np.zeros(shape, np.float32))
    for source in (tmp_path / "x.npy", np.zeros(shape, np.float32)):
        made = ArrayDataset(source)
        dataset = pickle.loads(pickle.dumps(made))
        batches = list(ShmLoader(dataset, batch_size=2))
        assert [shape[1:]] * shape[0] == [tuple(row.shape) for batch in batches for row in batch]


def test_mapped_file_truncated_later_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(40000))
    dataset = ArrayDataset({"x": path, "y": np.load(path, mmap_mode="r")[:10].repeat(4000)})
    part = ArrayDataset(np.load(path, mmap_mode="r")[:100])
    os.truncate(path, 8192)
    message = r"x.npy, offset 8192: the file was cut off while it was read; its array ends at 320128"
    with pytest.raises(ShardCorrupt, match=message):
        dataset.read_batch_into([0], {"x": np.zeros(1, int), "y": np.zeros(1, int)})
    with pytest.raises(ShardCorrupt, match=message):
        dataset[39999]
    assert part[99] == 99
    with pytest.raises(ShardCorrupt, match=r"x.npy, offset 128: the array does not end within the file"):
        pickle.loads(pickle.dumps(dataset))


@pytest.mark.parametrize("source", ["path", "memmap"])
@pytest.mark.parametrize("mode", ["r+b", "wb"])
def test_array_of_another_dtype_in_place_of_a_file_is_an_error(tmp_path: Path, source: str, mode: str) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(4, dtype=np.float32))
    dataset = ArrayDataset(path if source == "path" else np.load(path, mmap_mode="r"))
    text = pickle.dumps(dataset)
    with open(path, mode) as file:  # the same file, or one that was truncated first
        np.save(file, np.arange(4, dtype=np.int32))
    for one in (dataset, pickle.loads(text)):
        with pytest.raises(ShardCorrupt, match=r"x.npy: its header has changed since the dataset was created"):
            one[1]
    np.save(path, np.arange(4, 8, dtype=np.float32))
    assert (dataset[1], pickle.loads(text)[1]) == (5, 5)


def test_threads_read_concurrently() -> None:
    array = np.random.default_rng(0).random((500, 40))[:, ::3]
    dataset = ArrayDataset(array)

    def read(seed: int) -> bool:
        rng, out = np.random.default_rng(seed), np.empty((64, 14))
        indices = [rng.integers(-500, 500, 64) for _ in range(50)]
        for chosen in indices:
            dataset.read_batch_into(chosen, {"data": out})
            if not np.array_equal(array[chosen], out):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(8)))


READS_ALL = """
import pickle, sys, psutil
import numpy as np
import shmload.formats.arrays
process = psutil.Process()
np.empty((64, 4096)).fill(1)
before = process.memory_full_info().uss
dataset = pickle.loads(bytes.fromhex(sys.argv[1]))
out = {"data": np.empty((64, 4096))}
total = 0.0
for first in range(0, len(dataset), 64):
    dataset.read_batch_into(np.arange(first, first + 64), out)
    total += float(out["data"].sum())
print(int(total), process.memory_full_info().uss - before)
"""


@pytest.mark.slow(reason="another process maps and reads 32 MiB")
@pytest.mark.parametrize("is_file", [False, True])
def test_another_process_shares_the_pages(tmp_path: Path, is_file: bool) -> None:
    """Read 32 MiB in a spawned process, whose private memory must not grow by as much."""
    array = np.ones((1024, 4096))
    np.save(tmp_path / "x.npy", array)
    dataset = ArrayDataset(tmp_path / "x.npy" if is_file else array)
    dataset.read_batch_into(range(1024), {"data": array})
    done = subprocess.run(
        [sys.executable, "-c", READS_ALL, pickle.dumps(dataset).hex()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    total, growth = map(int, done.stdout.split())
    assert array.size == total
    assert growth < 6 << 20


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_file_is_a_dict_of_its_arrays(save: Any, tmp_path: Path) -> None:
    arrays = {"x": np.asfortranarray(np.arange(12.0).reshape(4, 3)), "y": np.arange(4, dtype=">i2")}
    save(tmp_path / "a.npz", **arrays)
    dataset = ArrayDataset(tmp_path / "a.npz")
    assert dataset.schema == {"x": ("float64", (3,)), "y": ("int16", ())}
    for of in (dataset, pickle.loads(pickle.dumps(dataset))):
        for name, values in np.load(tmp_path / "a.npz").items():
            assert [sample[name].tolist() for sample in of] == values.tolist()


def test_damaged_npz_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(1000))
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole[:-100])
    with pytest.raises(ShardCorrupt, match=r"a\.npz: not a valid \.npz file: BadZipFile"):
        ArrayDataset(path)
    whole[4000] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ShardCorrupt, match=r"a\.npz: not a valid \.npz file: .*CRC"):
        ArrayDataset(path)
    np.savez(path, x=np.array([{}]))
    with pytest.raises(ShardCorrupt, match=r"a\.npz: not a valid \.npz file: ValueError: Object arrays"):
        ArrayDataset(path)
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        ArrayDataset(tmp_path / "none.npz")
