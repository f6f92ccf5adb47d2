"""Fixtures of the storage tests: stores, their servers, and proxies that inject faults."""

from __future__ import annotations

from tests.storage.store_fixtures import pauses, proxy, server

__all__ = ["pauses", "proxy", "server"]
