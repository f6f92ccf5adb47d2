"""mosaicml-streaming: a StreamingDataset over local MDS shards, shuffled by itself, in its own DataLoader."""

import functools
from pathlib import Path
from typing import Any

import streaming

from benchmarks.contestants.common import decoder, packed, unpacked, worker_settings, written
from shmload.tools.bench.contestants import Loader, LoaderOptions


def write(dataset: Any, folder: Path) -> None:
    with streaming.MDSWriter(out=str(folder), columns={"data": "bytes"}, size_limit="16mb") as sink:
        for index in range(len(dataset)):
            sink.write({"data": packed(dataset, index)})


class Decoded(streaming.StreamingDataset):
    """A StreamingDataset that decodes samples with the same functions as the other contestants."""

    def __init__(self, decoded: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.decoded = decoded

    def __getitem__(self, index: Any) -> Any:
        return unpacked(super().__getitem__(index)["data"], self.decoded)


def open_loader(dataset: Any, options: LoaderOptions) -> Loader:
    samples = Decoded(
        decoder(dataset),
        local=str(written(options, functools.partial(write, dataset))),
        shuffle=True,
        shuffle_seed=options.seed,
        batch_size=options.batch_size,
        num_canonical_nodes=1,  # more nodes pad an epoch with samples that are delivered twice
    )
    loader: Loader = streaming.StreamingDataLoader(samples, batch_size=options.batch_size, **worker_settings(options))
    return loader


open_loader.keeps_order = False  # its bytes are not compared
