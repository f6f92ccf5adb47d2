"""Shards on an object store: packing a dataset into them, and reading it back."""

from __future__ import annotations

from shmload.storage.client import Client, make_client
from shmload.storage.urls import open_store

__all__ = ["Client", "make_client", "open_store"]
