"""Other loaders as contestants on the built-in workloads: one table here, one module each.

A module has two functions: `write(dataset, folder)` puts every sample's stored form (`dataset.stored(index)`: bytes and a
number) in files of the peer's own format, and `open_loader(dataset, options)` reads them and delivers batches. Samples are
decoded by the workload's own `decoded(payload, number)`, so that contestants differ in their plumbing only. Nothing is
imported here: what is not installed is known without it.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One row of the table.

    Args:
        package: the module whose presence says that it is installed.
        install: what pip is given.
        keeps_order: whether it can be told torch's order; else an epoch's samples are compared as a set.
        has_files: whether it reads files in a format of its own.
        unable: workloads that it has no part in, and why.
    """

    name: str
    title: str
    package: str
    install: str
    keeps_order: bool = False
    has_files: bool = True
    unable: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return f"{__name__}.{self.name}_peer"

    def missing(self) -> str | None:
        """The pip command for what is not installed, None if it is there."""
        try:
            found = importlib.util.find_spec(self.package)
        except ModuleNotFoundError:  # the parent package of a dotted name
            found = None
        return None if found else f"needs {self.package}: pip install {self.install}"


TABLE = (
    Peer(
        name="webdataset",
        title="webdataset: tar shards in order, split over the workers of a torch DataLoader",
        package="webdataset",
        install="webdataset",
    ),
    Peer(
        name="spdl",
        title="SPDL: its pipeline, a thread per worker in the trainer",
        package="spdl.pipeline",
        install="spdl-core",
        keeps_order=True,
        has_files=False,
    ),
    Peer(
        name="grain",
        title="Grain: MapDataset in worker processes",
        package="grain",
        install="grain",
        keeps_order=True,
        has_files=False,
    ),
    Peer(
        name="litdata",
        title="litdata: StreamingDataset over local chunks, shuffled its own way",
        package="litdata",
        install="litdata",
    ),
    Peer(
        name="mosaicml",
        title="mosaicml-streaming: StreamingDataset over local MDS shards, shuffled its own way",
        package="streaming",
        install="mosaicml-streaming",
    ),
    Peer(
        name="tfdata",
        title="tf.data: TFRecord files in order, parallel calls of Python functions",
        package="tensorflow",
        install="tensorflow-cpu",
    ),
    Peer(
        name="dali",
        title="NVIDIA DALI on the CPU: a parallel external source",
        package="nvidia.dali",
        install="nvidia-dali-cuda120",
        keeps_order=True,
        has_files=False,
    ),
    Peer(
        name="ffcv",
        title="FFCV: a .beton file, threads of compiled pipelines",
        package="ffcv",
        install="ffcv",
        unable={
            "photos": "it decodes and crops by functions of its own, which numba compiles: the bytes would be others"
        },
    ),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in TABLE}
