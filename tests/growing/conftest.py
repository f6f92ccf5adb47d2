"""Makes the helpers of this folder importable for the tests and their processes, and opens and closes caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shmload.growing import SampleCache


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[Callable[..., SampleCache]]:
    """Returns a function that opens the test's cache, by default of 64 KiB with files of 1 KiB. All caches are closed after the
    test.
    """
    with ExitStack() as stack:

        def make(capacity_bytes: int = 1 << 16, **options: Any) -> SampleCache:
            options = {"file_nbytes": 1024, **options}
            return stack.enter_context(SampleCache(tmp_path / "cache", capacity_bytes, **options))

        yield make


@pytest.fixture
def cache(make_cache: Callable[..., SampleCache]) -> SampleCache:
    return make_cache()
