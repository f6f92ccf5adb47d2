"""The datasets of the built-in workloads, which workload_table.py describes.

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
from shmload.tools.bench.workload_table import FACTS

WORKLOADS = {
    name: Workload(name, FACTS[name].title, f"{dataset.__module__}:{dataset.__name__}", FACTS[name].batch_size, prepare, missing)
    for name, dataset, prepare, missing in (
        ("photos", Photos, prepare_photos, missing_codecs),
        ("records", Records, prepare_records, nothing_missing),
        ("rows", RowsWorkload, prepare_rows, nothing_missing),
        ("tokens", Tokens, prepare_tokens, nothing_missing),
        ("python", Plain, prepare_plain, nothing_missing),
    )
}
