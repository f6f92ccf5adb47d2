"""Measure the CPU time per row of reading Parquet, HDF5, Zarr and safetensors files.

Method: 40,000 samples of 64 random float32 and a label, in the page cache, in groups (chunks) of 1,000 rows; batches of 64 in
random order; 2 forked workers; loaders take turns in fresh processes. All decoded data fits into the caches, so this measures
the cost of a row, not of decoding a group. shmload and torch read the same dataset object, torch one sample at a time. For
Parquet and HDF5, torch also reads what users write by hand: a memory-mapped pyarrow table with slice() and to_pylist(), and
h5py with an index.

How to read: The figures are CPU microseconds per sample over all processes, trainer and workers.

Predicted: shmload 1.5 us for mapped files (safetensors, contiguous HDF5), 3 for Parquet, 8 for Zarr and chunked HDF5, whose
rows numpy gathers block by block (a batch touches 64 rows of 40 blocks); torch, one sample at a time, 60 to 120 us; pyarrow by
hand 150, h5py by hand 130.

Result (2 cores shared with other programs, 2 workers, 2 rounds), torch on the same dataset in parentheses: safetensors 1.5 us
(39), contiguous HDF5 1.3 (47; by hand 192), Parquet 2.4 (72; by hand 41), Zarr 4.1 (81), chunked HDF5 4.2 (75; by hand 226).
Parquet by hand is cheaper than its dataset in torch, because it slices a whole table in memory, whereas the dataset is not made
for reading one row at a time.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Result, Row, Settings, forked, in_turn, main, plain
from shmload.formats import HDF5Dataset, ParquetDataset, SafetensorsDataset, ZarrDataset
from shmload.tools.bench.bench_job import BenchJob

COUNT, PER_GROUP = 40_000, 1_000


@contextmanager
def files() -> Iterator[Path]:
    """Writes a file of each format and yields their folder."""
    import h5py
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zarr
    from safetensors.numpy import save_file

    rows, labels = np.random.default_rng(5).random((COUNT, 64), np.float32), np.arange(COUNT)
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as name:
        folder = Path(name)
        lists = pa.FixedSizeListArray.from_arrays(rows.reshape(-1), 64)
        pq.write_table(pa.table({"x": lists, "label": labels}), folder / "a.parquet", row_group_size=PER_GROUP)
        with h5py.File(folder / "plain.h5", "w") as file:
            file["x"], file["label"] = rows, labels
        with h5py.File(folder / "chunked.h5", "w") as file:
            file.create_dataset("x", data=rows, chunks=(PER_GROUP, 64), compression="lzf")
            file.create_dataset("label", data=labels, chunks=(PER_GROUP,))
        group = zarr.open_group(folder / "a.zarr", mode="w")
        group.create_array("x", data=rows, chunks=(PER_GROUP, 64))
        group.create_array("label", data=labels, chunks=(PER_GROUP,))
        save_file({"x": rows, "label": labels}, folder / "a.safetensors")
        yield folder


def opened(kind: str, path: str) -> Any:
    return {"parquet": ParquetDataset, "hdf5": HDF5Dataset, "zarr": ZarrDataset, "safetensors": SafetensorsDataset}[kind](path)


class PyarrowRows:
    """A dataset as users commonly write it: a table in memory, read row by row."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as pq

        self.table = pq.read_table(path, memory_map=True, use_threads=False).combine_chunks()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (row,) = self.table.slice(index, 1).to_pylist()
        return {"x": np.array(row["x"], np.float32), "label": row["label"]}


class H5pyRows:
    """A dataset as users commonly write it: a file that is opened at first use and read row by row."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r")
        return {"x": self.file["x"][index], "label": self.file["label"][index]}


def pyarrow_rows(path: str) -> PyarrowRows:
    return PyarrowRows(path)


def h5py_rows(path: str) -> H5pyRows:
    return H5pyRows(path)


CASES = {  # name: (kind, file, the hand-written dataset that torch reads)
    "Parquet": ("parquet", "a.parquet", "pyarrow_rows"),
    "HDF5 in one piece": ("hdf5", "plain.h5", "h5py_rows"),
    "HDF5 in chunks": ("hdf5", "chunked.h5", "h5py_rows"),
    "Zarr": ("zarr", "a.zarr", None),
    "safetensors": ("safetensors", "a.safetensors", None),
}


def measure(settings: Settings) -> Result:
    """Measures each format."""

    def job(dataset: str, loader: str, **arguments: str) -> BenchJob:
        return forked(
            settings,
            workload="columnar",
            dataset=f"benchmarks.columnar:{dataset}",
            arguments=arguments,
            loader=loader,
            batch_size=64,
        )

    with files() as folder:
        jobs = {}
        for name, (kind, file, by_hand) in CASES.items():
            path = str(folder / file)
            for loader in ("shmload", "torch"):
                jobs[f"{name}: {loader}"] = job("opened", loader, kind=kind, path=path)
            if by_hand:
                jobs[f"{name}: by hand"] = job(by_hand, "torch", path=path)
        found = in_turn(jobs, settings)
    cost = {name: each["cpu_us_per_sample"].median for name, each in found.items()}
    rows = []
    for name, (_, _, by_hand) in CASES.items():
        mine, theirs = cost[f"{name}: shmload"], cost[f"{name}: torch"]
        beside = f"{mine:.2f} us, torch {theirs:.1f}" + (f", by hand {cost[f'{name}: by hand']:.1f}" if by_hand else "")
        rows.append(Row(f"{name}, CPU a sample: torch over shmload", theirs / mine, "x", beside, ">= 5x", theirs >= 5 * mine))
    return Result(rows, {"cases": plain(found)})


if __name__ == "__main__":
    main("columnar", __doc__, measure)
