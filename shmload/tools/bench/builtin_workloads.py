"""The table of built-in workloads.

A workload names its dataset as `module:class`, like a user's own, and prepares its arguments once in the parent: generated files
are in a temporary folder.
"""

from shmload.tools.bench.generated_data import (
    Plain,
    Records,
    RowsWorkload,
    Tokens,
    prepare_plain,
    prepare_records,
    prepare_rows,
    prepare_tokens,
)
from shmload.tools.bench.photos import Photos, missing_codecs, prepare_photos
from shmload.tools.bench.workload import Workload, nothing_missing

WORKLOADS = {
    name: Workload(name, title, f"{dataset.__module__}:{dataset.__name__}", batch_size, prepare, missing)
    for name, title, dataset, batch_size, prepare, missing in (
        ("photos", "JPEG photos of 500x375, cropped to 224 and flipped", Photos, 64, prepare_photos, missing_codecs),
        ("records", "raw float32 records of 1 MiB from a file in the page cache", Records, 16, prepare_records, nothing_missing),
        ("rows", "rows of 64 float32 and a label from memory, shuffled", RowsWorkload, 1024, prepare_rows, nothing_missing),
        ("tokens", "windows of 1,025 uint16 tokens of a mapped file, as int64", Tokens, 32, prepare_tokens, nothing_missing),
        ("python", "a plain Python dataset of (uint8 3x224x224, int)", Plain, 64, prepare_plain, nothing_missing),
    )
}
