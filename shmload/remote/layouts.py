"""The formats that `layout=` of RemoteDataset accepts, by name or as an object with options.

    layout     object                           a sample is
    tar        .tar                             the members of one key, as bytes
    tfrecord   .tfrecord, .tfrecords            a record, with the features of its Example
    jsonl      .jsonl, .ndjson                  a line: the fields of its object
    npy        .npy                             a row of the first axis, as "data"
    parquet    .parquet                         a row: its columns
    mds        .mds, listed in an index.json    a sample of MosaicML Streaming
    litdata    .bin, listed in an index.json    an item of LitData
    files      an image, a sound, anything      the object itself, under its extension

`BlockFormat`, `RecordIndex` and `register` are for formats of your own (docs/own_format.md).
"""

from __future__ import annotations

from shmload._core.records import example_features
from shmload.formats.block_format import BlockFormat
from shmload.formats.block_index import RecordIndex
from shmload.formats.json_lines import JsonLines
from shmload.formats.known_formats import layout_named, layout_of, register
from shmload.formats.litdata.litdata_format import LitData
from shmload.formats.mds import Mds
from shmload.formats.npy import NumpyRows
from shmload.formats.parquet.parquet_format import Parquet
from shmload.formats.plain_files import PlainFiles
from shmload.formats.tar.tar_format import Tar
from shmload.formats.tfrecord.tfrecord_format import TFRecords

__all__ = [
    "BlockFormat",
    "JsonLines",
    "LitData",
    "Mds",
    "NumpyRows",
    "Parquet",
    "PlainFiles",
    "RecordIndex",
    "TFRecords",
    "Tar",
    "example_features",
    "layout_named",
    "layout_of",
    "register",
]
