"""shmload among its peers: an adapter for the harness that measured them all on the same five workloads.

Its five are 1 MiB records (W1), rows of 64 floats (W2), JPEGs to 224 (W3), windows of 1,025 tokens (W4) and variable-length dicts
(W5). Every loader reads the same files and delivers the same tensors; the consumer reads a byte of every page. The harness stays
as it is: this file enters itself in its table of peers and runs its `bench.py`, whose arguments follow the harness's folder:

    python -m benchmarks.peers HARNESS --data DIR --workload W2 --peer shmload --workers 2     (bench.py ... --peer shmload)

`shmload` is the drop-in with the workload's own dataset, torch's shuffle; `shmload-seed` the same in seed mode; `shmload-tfrecord`
reads W1 out of TFRecord files, checksums compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shmload import ShmLoader
from shmload.formats import ArrayDataset, ImageDecoder, ImageFolder, RandomResizedCrop, TFRecordDataset, TokenDataset

FIELDS = ("a", "b", "c")  # of W5, beside the string `id`


class Ctx(Protocol):
    """What the harness tells an adapter."""

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
        image = ImageDecoder(
            RandomResizedCrop(224), flip=0.5, fast=True, normalise=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        )
    else:
        image = ImageDecoder(RandomResizedCrop(224), flip=0.5, fast=True)
    return ImageFolder(files, image, labels=[number % 1000 for number in range(len(files))])


def tokens(ctx: Ctx) -> TokenDataset:
    return TokenDataset(ctx.path("tokens.npy"), 1025, stride=1024)


def dicts(ctx: Ctx) -> Any:
    from common import FlatW5  # the harness's, which every peer reads

    return FlatW5(ctx.path())


def tfrecords(ctx: Ctx) -> TFRecordDataset:
    return TFRecordDataset(ctx.path("tfrecord", "data.tfrecord"), {"x": ("float32", (1 << 18,))})


DATASETS: dict[str, Callable[[Ctx], Any]] = {"W1": records, "W2": rows, "W3": images, "W4": tokens, "W5": dicts}


def epochs(ctx: Ctx, dataset: Any, **more: Any) -> Epoch:
    """What the harness asks for: epoch number -> its batches."""
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
    """W5 as its peers deliver it: values end to end, lengths, strings."""
    for batch in loader:
        lengths = {f"{name}_len": batch[name].lengths for name in FIELDS}
        yield {"id": batch["id"], **{name: batch[name].values for name in FIELDS}, **lengths}


def drop_in(ctx: Ctx) -> Epoch:
    return epochs(ctx, DATASETS[ctx.workload](ctx))


def seeded(ctx: Ctx) -> Epoch:
    return epochs(ctx, DATASETS[ctx.workload](ctx), seed=1)


def out_of_tfrecords(ctx: Ctx) -> Epoch:
    return epochs(ctx, tfrecords(ctx))


ADAPTERS: dict[tuple[str, str], Callable[[Ctx], Epoch]] = {
    **{("shmload", workload): drop_in for workload in DATASETS},
    **{("shmload-seed", workload): seeded for workload in DATASETS},
    ("shmload-tfrecord", "W1"): out_of_tfrecords,
}
FORMATS = {"shmload": "npy", "shmload-seed": "npy", "shmload-tfrecord": "tfrecord"}


def main() -> None:
    """Enters the adapter in the harness's table and runs its `bench.py`."""
    if len(sys.argv) < 2 or not Path(sys.argv[1], "bench.py").is_file():
        raise SystemExit("python -m benchmarks.peers HARNESS ARGUMENTS: HARNESS is the folder with bench.py and adapters/")
    sys.path.insert(0, sys.argv.pop(1))
    import adapters
    import bench

    adapters.PEERS.update({peer: ("shmload", "main", stored) for peer, stored in FORMATS.items()})
    sys.modules["adapters.shmload"] = sys.modules[__name__]
    bench.main()


if __name__ == "__main__":
    main()
