"""Read, write and index samples in files and shards of many formats. Names are imported at first use.

A format (format.py) recognizes its files, finds the samples in them, decodes and describes them. known_formats.py lists the
formats for `inspect`, `index`, `pack` and `RemoteDataset`. Local datasets follow one pattern: a library or native code finds the
bytes of each row, and one loop without the GIL copies the rows of a batch into the slot.

* Bytes that are contiguous in a file (.npy, safetensors, plain HDF5, Arrow) are mapped and gathered like any array.
* Compressed bytes are decoded in blocks (row groups, chunks) into a cache limited in bytes, and a batch is one gather over the
  cached blocks. A batch that needs more blocks than the cache can hold is copied block by block.
* Rows of 256 KiB and more are written past the processor's caches (src/streamed.h), because such a batch does not fit in them and
  an ordinary copy would first fetch every line that it overwrites.

An index that is kept next to a file is trusted only if its checksum, the file's size and time, and every bound are valid, because
its numbers become addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmload.lazy_imports import lazy_names

if TYPE_CHECKING:
    from shmload.formats.arrays import ArrayDataset
    from shmload.formats.hdf5 import HDF5Dataset
    from shmload.formats.images.crops import CenterCrop, RandomResizedCrop, Resize
    from shmload.formats.images.decoder import ImageDecoder
    from shmload.formats.images.image_folder import ImageFolder
    from shmload.formats.images.mask_decoder import MaskDecoder
    from shmload.formats.images.normalize import Normalize
    from shmload.formats.images.restart_markers import with_restart_markers
    from shmload.formats.parquet.parquet_dataset import ParquetDataset
    from shmload.formats.ray_blocks import RayDataset, RayStream
    from shmload.formats.safetensors import SafetensorsDataset
    from shmload.formats.tar.stream import TarStream
    from shmload.formats.tar.tar_dataset import TarDataset
    from shmload.formats.tar.writer import TarWriter
    from shmload.formats.tfrecord.tfrecord_dataset import TFRecordDataset
    from shmload.formats.tfrecord.tfrecord_writer import TFRecordWriter
    from shmload.formats.tokens import TokenDataset
    from shmload.formats.zarr import ZarrDataset

_MODULES = {
    "arrays": ("ArrayDataset",),
    "images.crops": ("CenterCrop", "RandomResizedCrop", "Resize"),
    "images.decoder": ("ImageDecoder",),
    "images.image_folder": ("ImageFolder",),
    "images.mask_decoder": ("MaskDecoder",),
    "images.normalize": ("Normalize",),
    "images.restart_markers": ("with_restart_markers",),
    "hdf5": ("HDF5Dataset",),
    "parquet.parquet_dataset": ("ParquetDataset",),
    "ray_blocks": ("RayDataset", "RayStream"),
    "safetensors": ("SafetensorsDataset",),
    "tar.tar_dataset": ("TarDataset",),
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
    "MaskDecoder",
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
