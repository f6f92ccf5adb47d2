"""Exceptions in worker and trainer at the worst moments are raised, and the loader can still be used or closed."""

from __future__ import annotations

import signal

import pytest

from shmload import ShmLoader
from tests.faults.faults_kit import FaultFolder, Rows, digest

pytestmark = pytest.mark.slow(reason="each starts workers and fails during their work")


def test_another_worker_takes_over_the_layout_after_an_exception(fault_folder: FaultFolder) -> None:
    with ShmLoader(Rows(48), batch_size=4, seed=3) as quiet:
        expected = [digest(batch) for batch in quiet]
    fault_folder.arm("while_asking_layout", "MemoryError")
    with ShmLoader(Rows(48), batch_size=4, seed=3, num_workers=2) as loader:
        stream = iter(loader)
        with pytest.raises(MemoryError, match="injected fault at while_asking_layout"):
            next(stream)
        assert expected[1:] == [digest(batch) for batch in stream]
        assert loader.stats()["num_restarts"] == 0


@pytest.mark.parametrize("seed", [3, None])
def test_interrupted_close_ends_every_worker(seed: int | None, fault_folder: FaultFolder) -> None:
    loader = ShmLoader(Rows(48), batch_size=4, seed=seed, num_workers=2)
    stream = iter(loader)
    next(stream)
    fault_folder.arm("closing", "KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    assert loader._builder.last.pool.pids == []
    loader.close()


def test_worker_that_cannot_be_replaced_at_once_is_replaced_later(fault_folder: FaultFolder) -> None:
    """Tests a single worker: without a replacement the loader would block forever."""
    with ShmLoader(Rows(48), batch_size=4, seed=3) as quiet:
        expected = [digest(batch) for batch in quiet]
    got = []
    with ShmLoader(Rows(48), batch_size=4, seed=3, num_workers=1) as loader:
        stream = iter(loader)
        got.append(digest(next(stream)))
        fault_folder.arm("replacing", "OSError")
        fault_folder.arm("after_claim", signal.SIGKILL)
        with pytest.raises(OSError, match="injected fault at replacing"):
            while True:
                got.append(digest(next(stream)))
        got += [digest(batch) for batch in stream]
        assert loader.stats()["num_restarts"] == 1
    assert expected == got
