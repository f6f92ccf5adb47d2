"""Adapt shmload to the harness that measured it and its peers on the same five workloads.

The workloads are 1 MiB records (W1), rows of 64 floats (W2), JPEGs to 224 (W3), windows of 1,025 tokens (W4) and
variable-length dicts (W5). Every loader reads the same files and delivers the same tensors; the consumer reads a byte of every
page. The harness is not changed: this file adds itself to its table of peers and runs its `bench.py`. The arguments of
`bench.py` come after the harness's folder:

    python -m benchmarks.peers HARNESS --data DIR --workload W2 --peer shmload --workers 2     (bench.py ... --peer shmload)

`shmload` is the drop-in replacement with the workload's own dataset and torch's shuffle; `shmload-seed` is the same in seed
mode; `shmload-tfrecord` reads W1 from TFRecord files and verifies checksums; `shmload-in-place` reads W5 directly into the
batch.

How to read: The figures are CPU microseconds per sample over all processes, consumer included. Give W3 at least 8 seconds per
epoch, because torch and the drop-in replacement finish the batches of an abandoned epoch and count them in the next. Read the
files once before every run.

Predicted: W1 140, W2 0.20, W3 1,236, W4 2.7, W5 12 (from the other benchmarks in this folder).

Result (2 cores, one of them busy with other work, 2 workers, peers in turn, 2 or 3 rounds, lowest to highest):
| | W1 | W2 | W3 | W4 | W5 |
|---|---|---|---|---|---|
| torch | 1,084-1,445 | 4.4-5.6 | 1,530-1,597 | 38 | 690-714 |
| torch, whole batches | 964-1,007 | 1.6-2.0 | 1,441-1,454 | 36-47 | 51-69 |
| threads | 229-247 | 0.16-0.17 | 1,289-1,311 | 3.3-4.0 | 13.4-33.5 |
| SPDL's threads | 301-497 | 0.45-0.47 | 1,325-1,370 | 10-13 | 19-51 |
| FFCV | 189-209 | 0.57-0.62 | 1,967-1,980 | 6-21 | - |
| shmload | 157-167 (191 before) | 0.18-0.21 | 1,331-1,363 | 2.8-3.1 | 17.8-18.7 |
| shmload-seed | 178-179 (213 before) | 0.17 | 1,348-1,380 | 3.0-3.7 | 27 |
| shmload-tfrecord, shmload-in-place | 165-180 | - | - | - | 13.0-13.6 |
`before`: when rows of 256 KiB and more did not yet bypass the caches. FFCV's W4 was 2.4 in a first, single run. shmload is
slower than the best in W2 because of torch's sampler, and in W5 from samples because each sample is copied.

W2 again, after torch's permutation was drawn without its spinning threads (quiet machine, in turn, 2 rounds): threads
0.28-0.30, shmload 0.18, shmload-seed 0.18; 8.9 to 9.1 M rows/s, threads 4.5 to 4.8.

W3 again, after only the data that a crop needs was decoded (other files of 91 kB, load 14 from other work, 2 rounds): torch
1,934-1,954, SPDL's threads 1,720-1,882, shmload 1,442-1,601, shmload-seed 1,569-1,593, SPDL's own FFmpeg 3,649-3,908.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from shmload import ShmLoader
from shmload.formats import ArrayDataset, ImageDecoder, ImageFolder, RandomResizedCrop, TFRecordDataset, TokenDataset

FIELDS = ("a", "b", "c")  # of W5, in addition to the string `id`


class Ctx(Protocol):
    """The context that the harness passes to an adapter."""

    workload: str
    workers: int
    batch: int
    out: str

    def path(self, *parts: str) -> Path: ...


Epoch = Callable[[int], Iterator[Any]]


def records(ctx: Ctx) -> ArrayDataset:
    return ArrayDataset(ctx.path("x.npy"))


def rows(ctx: Ctx) -> ArrayDataset:
    return ArrayDataset((np.load(ctx.path("x.npy")), np.load(ctx.path("y.npy"))))


def images(ctx: Ctx) -> ImageFolder:
    files = sorted(map(str, ctx.path("img").iterdir()))
    if ctx.out == "float":
        image = ImageDecoder(RandomResizedCrop(224), flip=0.5, fast=True, normalize=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    else:
        image = ImageDecoder(RandomResizedCrop(224), flip=0.5, fast=True)
    return ImageFolder(files, image, labels=[number % 1000 for number in range(len(files))])


def tokens(ctx: Ctx) -> TokenDataset:
    return TokenDataset(ctx.path("tokens.npy"), 1025, stride=1024)


def dicts(ctx: Ctx) -> Any:
    return importlib.import_module("common").FlatW5(ctx.path())  # the harness's class, which every peer uses


class InPlace:
    """W5 read from its files directly into the batch."""

    schema: ClassVar = {**dict.fromkeys(FIELDS, ("float32", (None,))), "id": str}

    def __init__(self, ctx: Ctx) -> None:
        self.flat = np.asarray(np.load(ctx.path("flat.npy"), mmap_mode="r"))
        self.offsets = np.load(ctx.path("off.npy"))

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // 3

    def read_into(self, index: int, out: Any) -> None:
        offsets = self.offsets[3 * index : 3 * index + 4].tolist()
        for name, (start, end) in zip(FIELDS, pairwise(offsets), strict=True):
            out.reserve(name, end - start)[:] = self.flat[start:end]
        out["id"] = f"sample-{index:08d}"


def tfrecords(ctx: Ctx) -> TFRecordDataset:
    return TFRecordDataset(ctx.path("tfrecord", "data.tfrecord"), {"x": ("float32", (1 << 18,))})


DATASETS: dict[str, Callable[[Ctx], Any]] = {"W1": records, "W2": rows, "W3": images, "W4": tokens, "W5": dicts}


def epochs(ctx: Ctx, dataset: Any, **more: Any) -> Epoch:
    """Returns the function that the harness calls: number of an epoch -> its batches."""
    if ctx.workload == "W5":
        more["ragged"] = "jagged"
    loader: ShmLoader[Any] = ShmLoader(
        dataset,
        batch_size=ctx.batch,
        shuffle=True,
        num_workers=ctx.workers,
        drop_last=True,
        persistent_workers=ctx.workers > 0,
        **more,
    )
    return lambda number: with_lengths(loader) if ctx.workload == "W5" else iter(loader)


def with_lengths(loader: ShmLoader[Any]) -> Iterator[dict[str, Any]]:
    """Yields W5 as the other loaders deliver it: concatenated values, lengths, strings."""
    for batch in loader:
        lengths = {f"{name}_len": batch[name].lengths for name in FIELDS}
        yield {"id": batch["id"], **{name: batch[name].values for name in FIELDS}, **lengths}


def drop_in(ctx: Ctx) -> Epoch:
    return epochs(ctx, DATASETS[ctx.workload](ctx))


def seeded(ctx: Ctx) -> Epoch:
    return epochs(ctx, DATASETS[ctx.workload](ctx), seed=1)


def out_of_tfrecords(ctx: Ctx) -> Epoch:
    return epochs(ctx, tfrecords(ctx))


def in_place(ctx: Ctx) -> Epoch:
    return epochs(ctx, InPlace(ctx))


ADAPTERS: dict[tuple[str, str], Callable[[Ctx], Epoch]] = {
    **{("shmload", workload): drop_in for workload in DATASETS},
    **{("shmload-seed", workload): seeded for workload in DATASETS},
    ("shmload-tfrecord", "W1"): out_of_tfrecords,
    ("shmload-in-place", "W5"): in_place,
}
FORMATS = {"shmload": "npy", "shmload-seed": "npy", "shmload-tfrecord": "tfrecord", "shmload-in-place": "npy"}


def main() -> None:
    """Adds the adapter to the harness's table and runs its `bench.py`."""
    if len(sys.argv) < 2 or not Path(sys.argv[1], "bench.py").is_file():
        raise SystemExit("first the folder of the harness, with bench.py and adapters/, then bench.py's arguments")
    sys.path.insert(0, sys.argv.pop(1))
    entries = {peer: ("shmload", "main", stored) for peer, stored in FORMATS.items()}
    importlib.import_module("adapters").PEERS.update(entries)
    sys.modules["adapters.shmload"] = sys.modules[__name__]
    importlib.import_module("bench").main()


if __name__ == "__main__":
    main()
