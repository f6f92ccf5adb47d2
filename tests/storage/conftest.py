"""Stores to test, servers behind them, and faults in between."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from store_fixtures import pauses, proxy, server  # the path comes first

__all__ = ["pauses", "proxy", "server"]
