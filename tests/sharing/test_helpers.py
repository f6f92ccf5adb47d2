"""The records by which helpers enter a ring, tested on the real code in one process."""

from __future__ import annotations

import os

import numpy as np
import pytest

from shmload._core.filler import DONE
from shmload._core.peer_status import PeerStatus
from shmload.processes.identity import own_identity, pid_and_start, pidfd_of, start_of
from shmload.sharing.balancing import NodeBell, PeerPool
from shmload.shm.segment_group import SegmentGroup
from tests.sharing.sharing_kit import RingWithHelper

MINE, ANOTHERS = own_identity(), own_identity() + 1


@pytest.fixture
def crowd() -> RingWithHelper:
    """Returns a ring with one worker and one helper."""
    return RingWithHelper()


def test_helper_enters_only_after_the_trainer_accepts_it(crowd: RingWithHelper) -> None:
    assert crowd.trainer.requests() == []
    assert not crowd.helper.request(MINE)
    assert not crowd.helper.request(MINE)
    assert crowd.trainer.requests() == [(1, MINE)]
    crowd.trainer.accept(1, MINE)
    assert crowd.trainer.requests() == []
    assert crowd.helper.request(MINE)


def test_next_helper_waits_until_the_record_is_cleared(crowd: RingWithHelper) -> None:
    crowd.helper.request(MINE)
    crowd.trainer.accept(1, MINE)
    assert not crowd.helper.request(ANOTHERS)
    assert crowd.trainer.requests() == []
    crowd.trainer.release(1)
    assert not crowd.helper.request(ANOTHERS)
    assert crowd.trainer.requests() == [(1, ANOTHERS)]


def test_chunks_beyond_the_number_of_idle_workers_are_unattended(crowd: RingWithHelper) -> None:
    assert crowd.trainer.num_unattended == 0
    crowd.order(0)
    crowd.order(1)
    assert crowd.trainer.num_unattended == 2
    crowd.worker.waiting(True)
    assert crowd.trainer.num_unattended == 1
    crowd.helper.waiting(True)  # the helper is not of the worker pool
    assert crowd.trainer.num_unattended == 1
    crowd.worker.waiting(False)
    crowd.worker.claim()
    assert crowd.trainer.num_unattended == 1


def test_idle_neighbors_are_woken_if_the_pool_is_busy(crowd: RingWithHelper) -> None:
    group, peer = SegmentGroup(), RingWithHelper()
    theirs = group.doorbell("theirs")
    bell = NodeBell.attach(group.doorbell("mine").name)
    bell.ring, bell.peer_pools = crowd.trainer, {1: PeerPool(PeerStatus(peer.control), theirs)}
    crowd.order(0)
    bell.post_up_to(1)
    assert (bell.value, theirs.value) == (1, 0)
    peer.worker.waiting(True)
    bell.post_up_to(1)
    assert (bell.value, theirs.value) == (1, 1)
    theirs.drain()
    crowd.worker.waiting(True)
    bell.post_up_to(1)
    assert theirs.value == 0
    group.close()


def test_chunk_that_ended_a_worker_is_left_to_the_pool(crowd: RingWithHelper) -> None:
    crowd.order(0)
    assert crowd.helper.claim()
    assert crowd.trainer.recover(1) >= 0
    crowd.trainer.release(1)
    successor = crowd.worker_ring(1)
    assert not successor.claim()
    crowd.order(1)
    assert successor.claim()
    assert successor.step == 1
    assert crowd.worker.claim()
    assert crowd.worker.step == 0
    crowd.worker.finish(DONE)


def test_identity_distinguishes_processes_with_the_same_process_id() -> None:
    pid, began = pid_and_start(MINE)
    assert (os.getpid(), start_of(os.getpid())) == (pid, began)
    pidfd = pidfd_of(pid, began)
    assert pidfd >= 0
    os.close(pidfd)
    assert pidfd_of(pid, str(int(began) + 1)) == -1
    assert np.uint64(MINE) == MINE  # an identity fits its word
