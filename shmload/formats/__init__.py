"""Shards on disk as datasets that decode into the batch, and their writers. Names are imported at first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmload.formats.tfrecord.dataset import TFRecordDataset
    from shmload.formats.tfrecord.writer import TFRecordWriter

_PLACES = {
    "TFRecordDataset": "shmload.formats.tfrecord.dataset",
    "TFRecordWriter": "shmload.formats.tfrecord.writer",
}

__all__ = ["TFRecordDataset", "TFRecordWriter"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'shmload.formats' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
