"""Stores to test, servers behind them, and faults in between."""

from __future__ import annotations

from tests.storage.store_fixtures import pauses, proxy, server

__all__ = ["pauses", "proxy", "server"]
