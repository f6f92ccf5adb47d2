"""Shards on an object store: packing a dataset into them, and reading it back. Names are imported at first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmload.remote.manifest import Manifest
    from shmload.remote.upload import upload_cv_dataset

_PLACES = {
    "Manifest": "shmload.remote.manifest",
    "upload_cv_dataset": "shmload.remote.upload",
}

__all__ = ["Manifest", "upload_cv_dataset"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'shmload.remote' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
