"""Lets the tests here, and the processes they spawn, import their helpers; makes caches and closes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shmload.growing import SampleCache


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[Callable[..., SampleCache]]:
    """Opens the test's cache: 64 KiB, files of 1 KiB, unless said otherwise. All are closed behind the test."""
    with ExitStack() as stack:

        def make(capacity_bytes: int = 1 << 16, **options: Any) -> SampleCache:
            options = {"file_nbytes": 1024, **options}
            return stack.enter_context(SampleCache(tmp_path / "cache", capacity_bytes, **options))

        yield make


@pytest.fixture
def cache(make_cache: Callable[..., SampleCache]) -> SampleCache:
    return make_cache()
