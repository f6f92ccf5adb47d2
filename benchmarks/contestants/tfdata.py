"""tf.data: TFRecord files are read in order and decoded by Python functions in as many parallel calls as workers.

It uses no shuffle buffer, which is to its advantage. Batches reach torch without a copy, through DLPack.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import torch.utils.dlpack
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks.contestants.common import decoder, packed, unpacked, written
from shmload.formats import TFRecordWriter
from shmload.tools.bench.contestants import Loader, LoaderOptions

FILE = "samples.tfrecord"


def write(dataset: Any, folder: Path) -> None:
    with TFRecordWriter(folder / FILE) as writer:
        for index in range(len(dataset)):
            writer.write(packed(dataset, index))


def open_loader(dataset: Any, options: LoaderOptions) -> Loader:
    return Batches(dataset, options)


open_loader.keeps_order = False  # its bytes are not compared


class Batches:
    """Reads the same files in every epoch."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        folder = written(options, functools.partial(write, dataset))
        self.decoded = decoder(dataset)
        leaves, self.tree = tree_flatten(dataset[0])
        self.kinds = [np.asarray(leaf) for leaf in leaves]
        threads = max(1, options.num_workers)
        records = tf.data.TFRecordDataset(str(folder / FILE))
        samples = records.map(self.sample, num_parallel_calls=threads, deterministic=True)
        settings = tf.data.Options()
        settings.threading.private_threadpool_size = threads
        self.batches = samples.batch(options.batch_size).prefetch(options.prefetch_factor or 2).with_options(settings)

    def sample(self, record: Any) -> Any:
        leaves = tf.numpy_function(self.leaves, [record], [kind.dtype for kind in self.kinds], stateful=False)
        return tuple(tf.ensure_shape(leaf, kind.shape) for leaf, kind in zip(leaves, self.kinds, strict=True))

    def leaves(self, record: bytes) -> list[Any]:
        found, _ = tree_flatten(unpacked(record, self.decoded))
        return [np.asarray(leaf) for leaf in found]

    def __iter__(self) -> Iterator[Any]:
        for leaves in self.batches:
            yield tree_unflatten([torch.utils.dlpack.from_dlpack(leaf) for leaf in leaves], self.tree)
