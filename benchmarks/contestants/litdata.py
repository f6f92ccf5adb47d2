"""litdata: a StreamingDataset over local chunks, shuffled by itself, in its own DataLoader."""

import functools
from pathlib import Path
from typing import Any

import litdata

from benchmarks.contestants.common import decoder, packed, unpacked, worker_settings, written
from shmload.tools.bench.contestants import Loader, LoaderOptions


def write(dataset: Any, folder: Path) -> None:
    litdata.optimize(
        fn=functools.partial(packed, dataset),
        inputs=list(range(len(dataset))),
        output_dir=str(folder),
        chunk_bytes="16MB",
        num_workers=1,
        mode="overwrite",
    )


class Decoded(litdata.StreamingDataset):
    """A StreamingDataset that decodes samples with the same functions as the other contestants."""

    def __init__(self, decoded: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.decoded = decoded

    def __getitem__(self, index: Any) -> Any:
        return unpacked(super().__getitem__(index), self.decoded)


def open_loader(dataset: Any, options: LoaderOptions) -> Loader:
    folder = written(options, functools.partial(write, dataset))
    samples = Decoded(decoder(dataset), input_dir=str(folder), shuffle=True, drop_last=False, seed=options.seed)
    loader: Loader = litdata.StreamingDataLoader(samples, batch_size=options.batch_size, **worker_settings(options))
    return loader


open_loader.keeps_order = False  # its bytes are not compared
