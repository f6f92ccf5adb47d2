"""Exceptions at the worst moments, of worker and trainer: they are told, and the loader can be used, or closed, all the same."""

from __future__ import annotations

import signal

import pytest

from shmload import ShmLoader
from tests.faults.faults_kit import Charges, Rows, digest

pytestmark = pytest.mark.slow(reason="each starts workers, and fails in the midst of their work")


def test_a_worker_that_fails_over_the_layout_lets_another_describe_it(charges: Charges) -> None:
    with ShmLoader(Rows(48), batch_size=4, seed=3) as quiet:
        expected = [digest(batch) for batch in quiet]
    charges.arm("while_asking_layout", "MemoryError")
    with ShmLoader(Rows(48), batch_size=4, seed=3, num_workers=2) as loader:
        stream = iter(loader)
        with pytest.raises(MemoryError, match="injected fault at while_asking_layout"):
            next(stream)
        assert expected[1:] == [digest(batch) for batch in stream]
        assert loader.stats()["num_restarts"] == 0


@pytest.mark.parametrize("seed", [3, None])
def test_an_interrupted_close_ends_every_worker(seed: int | None, charges: Charges) -> None:
    loader = ShmLoader(Rows(48), batch_size=4, seed=seed, num_workers=2)
    stream = iter(loader)
    next(stream)
    charges.arm("closing", "KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    assert loader._builder.last.pool.pids == []
    loader.close()


def test_a_worker_that_cannot_be_replaced_at_once_is_replaced_later(charges: Charges) -> None:
    """The only one: else nobody would do its work, and the loader would wait for ever."""
    with ShmLoader(Rows(48), batch_size=4, seed=3) as quiet:
        expected = [digest(batch) for batch in quiet]
    got = []
    with ShmLoader(Rows(48), batch_size=4, seed=3, num_workers=1) as loader:
        stream = iter(loader)
        got.append(digest(next(stream)))
        charges.arm("replacing", "OSError")
        charges.arm("after_claim", signal.SIGKILL)
        with pytest.raises(OSError, match="injected fault at replacing"):
            while True:
                got.append(digest(next(stream)))
        got += [digest(batch) for batch in stream]
        assert loader.stats()["num_restarts"] == 1
    assert expected == got
