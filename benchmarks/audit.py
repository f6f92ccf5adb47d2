"""Measure the trainer's CPU per batch that an audit adds.

Method: The CPU time of the whole consuming process is measured over the timed part, without the consumer's own reading of the
batch. Seed mode, 2 forked workers, a fresh process per case, with and without `audit=` to a folder on the temporary file
system. Photos: 64 x 3 x 224 x 224 uint8, 9.6 MB; rows: 1024 x 64 float32 and a label, 0.27 MB; pairs: 16 int64, to show the
cost when there is almost nothing to read. The digest is also measured alone: XXH64 of one resident array of 9.6 MB, compared
with zlib.crc32 and blake2b.

How to read: The audit reads every delivered byte once. With large batches, its cost is that of reading memory on one core, and
it is visible because the trainer computes the digest. With small batches, it is the cost of traversing the batch and of one
write().

Predicted: 14 GB/s; photos 0.8 ms more, rows 40 us more, pairs 15 us more.

Result (2 cores, other work on the machine):
| | without | with | more |
|---|---|---|---|
| photos | 50 us | 955 us | 905 us, 10.6 GB/s |
| rows | 31 us | 106 us | 75 us |
| pairs | 29 us | 56 us | 26 us |

The digest alone reads 16 GB/s (crc32 5.4, blake2b 1.1). Batches are not in the trainer's cache: without prefetching in
src/digest.pyx photos cost 1930 us. Rows and pairs cost more than predicted because the audit's own code and data are not in the
cache either: in a loop that does nothing else, the digest, record and write of pairs take 6 us.
"""

import hashlib
import shutil
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np

from benchmarks.common import Result, Row, Settings, forked, in_turn, main, plain
from shmload import ShmLoader
from shmload._core.digest import hash_bytes
from shmload.tools.bench.contestants import LoaderOptions
from shmload.tools.bench.workload import Field

SHAPES: dict[str, tuple[int, dict[str, Field]]] = {  # batch size, schema
    "photos": (64, {"image": ("uint8", (3, 224, 224))}),
    "rows": (1024, {"x": ("float32", (64,)), "label": ("int64", ())}),
    "pairs": (16, {"x": ("int64", ())}),
}
LIMITS_US = {"photos": 1500, "rows": 80, "pairs": 40}


class Resident:
    """Rows in memory, each of which begins with its index modulo 128."""

    def __init__(self, shape: str, num_samples: int = 100_000) -> None:
        self.schema = SHAPES[shape][1]
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def read_batch_into(self, indices: Sequence[int], out: MutableMapping[str, Any]) -> None:
        for name in self.schema:
            rows = out[name].reshape(len(indices), -1)
            rows[:, 0] = np.asarray(indices) % 128

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("it is read by whole batches")


def audited(dataset: Any, options: LoaderOptions) -> Any:
    """Returns a ShmLoader in seed mode with an audit, whose folder is deleted together with the loader."""
    folder = tempfile.mkdtemp()
    loader: Any = ShmLoader(
        dataset, options.batch_size, shuffle=True, seed=options.seed, num_workers=options.num_workers, audit=folder
    )
    weakref.finalize(loader, shutil.rmtree, folder, True)
    return loader


def gb_per_s(read: Callable[[Any], Any], rounds: int) -> float:
    """Returns the best rate at which a function reads 9.6 MB."""
    data = np.random.default_rng(5).integers(0, 256, 64 * 3 * 224 * 224, np.uint8)
    times = []
    for _ in range(4 * rounds):
        began = time.thread_time()
        read(data)
        times.append(time.thread_time() - began)
    return float(data.nbytes / min(times) / 1e9)


def measure(settings: Settings) -> Result:
    """Measures all cases."""
    cases = {
        f"{shape}, {name}": forked(
            settings,
            workload=shape,
            dataset="benchmarks.audit:Resident",
            arguments={"shape": shape},
            loader=loader,
            batch_size=SHAPES[shape][0],
        )
        for shape in SHAPES
        for name, loader in (("without", "shmload-seed"), ("with", "benchmarks.audit:audited"))
    }
    found = in_turn(cases, settings)
    cost = {name: each["trainer_us_per_batch"].median for name, each in found.items()}
    rows = []
    for shape, limit_us in LIMITS_US.items():
        without, more = cost[f"{shape}, without"], cost[f"{shape}, with"] - cost[f"{shape}, without"]
        what = f"trainer CPU per batch of {shape} that an audit adds"
        rows.append(Row(what, more, "us", f"{without:.0f} us without", f"<= {limit_us} us", more <= limit_us))
    rates = {
        "XXH64": gb_per_s(hash_bytes, settings.rounds),
        "crc32": gb_per_s(zlib.crc32, settings.rounds),
        "blake2b": gb_per_s(lambda data: hashlib.blake2b(data).digest(), settings.rounds),
    }
    beside = f"crc32 {rates['crc32']:.1f}, blake2b {rates['blake2b']:.1f}"
    rows.append(Row("digest of 9.6 MB", rates["XXH64"], "GB/s", beside, ">= 8 GB/s", rates["XXH64"] >= 8))
    return Result(rows, {"cases": plain(found), "gb_per_s": rates})


if __name__ == "__main__":
    main("audit", __doc__, measure)
