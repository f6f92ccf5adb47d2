"""Formats that samples are stored in: read in place, write, index. Names are imported at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmload.world import lazy_names

if TYPE_CHECKING:
    from shmload.formats.arrays import ArrayDataset
    from shmload.formats.hdf5 import HDF5Dataset
    from shmload.formats.images.decoder import CenterCrop, ImageDecoder, RandomResizedCrop, Resize, with_restart_markers
    from shmload.formats.images.image_folder import ImageFolder
    from shmload.formats.images.normalize import Normalize
    from shmload.formats.parquet.parquet_dataset import ParquetDataset
    from shmload.formats.ray_blocks import RayDataset, RayStream
    from shmload.formats.safetensors import SafetensorsDataset
    from shmload.formats.tar.shards import TarDataset
    from shmload.formats.tar.stream import TarStream
    from shmload.formats.tar.writer import TarWriter
    from shmload.formats.tfrecord.tfrecord_dataset import TFRecordDataset
    from shmload.formats.tfrecord.tfrecord_writer import TFRecordWriter
    from shmload.formats.tokens import TokenDataset
    from shmload.formats.zarr import ZarrDataset

_MODULES = {
    "arrays": ("ArrayDataset",),
    "images.decoder": ("CenterCrop", "ImageDecoder", "RandomResizedCrop", "Resize", "with_restart_markers"),
    "images.image_folder": ("ImageFolder",),
    "images.normalize": ("Normalize",),
    "hdf5": ("HDF5Dataset",),
    "parquet.parquet_dataset": ("ParquetDataset",),
    "ray_blocks": ("RayDataset", "RayStream"),
    "safetensors": ("SafetensorsDataset",),
    "tar.shards": ("TarDataset",),
    "tar.stream": ("TarStream",),
    "tar.writer": ("TarWriter",),
    "tfrecord.tfrecord_dataset": ("TFRecordDataset",),
    "tfrecord.tfrecord_writer": ("TFRecordWriter",),
    "tokens": ("TokenDataset",),
    "zarr": ("ZarrDataset",),
}

__all__ = [
    "ArrayDataset",
    "CenterCrop",
    "HDF5Dataset",
    "ImageDecoder",
    "ImageFolder",
    "Normalize",
    "ParquetDataset",
    "RandomResizedCrop",
    "RayDataset",
    "RayStream",
    "Resize",
    "SafetensorsDataset",
    "TFRecordDataset",
    "TFRecordWriter",
    "TarDataset",
    "TarStream",
    "TarWriter",
    "TokenDataset",
    "ZarrDataset",
    "with_restart_markers",
]


__getattr__, __dir__ = lazy_names(__name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names})
