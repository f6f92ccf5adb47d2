"""webdataset: tar shards are read in order and split over workers. It uses no shuffle buffer, which is to its advantage."""

import functools
from pathlib import Path
from typing import Any

import webdataset
from torch.utils.data import default_collate

from benchmarks.contestants.common import decoder, packed, unpacked, worker_settings, written
from shmload.tools.bench.contestants import Loader, LoaderOptions

NUM_SHARDS = 16  # enough for all workers, because a worker without a shard delivers nothing


def write(dataset: Any, folder: Path) -> None:
    per_shard = -(-len(dataset) // NUM_SHARDS)
    with webdataset.ShardWriter(str(folder / "%05d.tar"), maxcount=per_shard, maxsize=1 << 40, verbose=0) as sink:
        for index in range(len(dataset)):
            sink.write({"__key__": f"{index:09d}", "bin": packed(dataset, index)})


def decode(sample: dict[str, Any], *, decoded: Any) -> Any:
    return unpacked(sample["bin"], decoded)


def collate(samples: list[Any]) -> Any:
    """Applies torch's collate, without the key that webdataset adds to samples that are mappings."""
    for sample in samples:
        if isinstance(sample, dict):
            sample.pop("__key__", None)
    return default_collate(samples)


def open_loader(dataset: Any, options: LoaderOptions) -> Loader:
    folder = written(options, functools.partial(write, dataset))
    shards = sorted(str(path) for path in folder.glob("*.tar"))
    samples = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
    batches = samples.map(functools.partial(decode, decoded=decoder(dataset))).batched(
        options.batch_size, collation_fn=collate, partial=True
    )
    loader: Loader = webdataset.WebLoader(batches, batch_size=None, **worker_settings(options))
    return loader


open_loader.keeps_order = False  # its bytes are not compared
