"""Shards on an object store: packing a dataset into them, and reading it back. Names are imported at first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmload.remote.manifest import Manifest
    from shmload.remote.upload import upload_cv_dataset
    from shmload.storage.client import Client, make_client

_PLACES = {
    "Client": "shmload.storage.client",
    "Manifest": "shmload.remote.manifest",
    "make_client": "shmload.storage.client",
    "upload_cv_dataset": "shmload.remote.upload",
}

__all__ = ["Client", "Manifest", "make_client", "upload_cv_dataset"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'shmload.remote' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
