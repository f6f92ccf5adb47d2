"""Makes index_kit importable from these tests and the processes they spawn."""

from collections.abc import Iterator

import pytest

from shmload.shm.segment_group import SegmentGroup


@pytest.fixture(autouse=True, scope="module")
def one_reaper() -> Iterator[None]:
    """Keeps the reaper running between indexes, because starting one for every example of a property takes most of the time."""
    group = SegmentGroup()
    yield
    group.close()
