"""Bells ring, stay within their count, and are gone with their owner."""

from __future__ import annotations

import os

from shmload.shm.doorbell import Doorbell
from shmload.shm.group import Group


def test_a_ring_wakes_another_process() -> None:
    group = Group()
    there, back = group.doorbell("there"), group.doorbell("back")
    pid = os.fork()
    if pid == 0:
        attached = Doorbell.attach(there.name)
        if attached.wait(30):
            Doorbell.attach(back.name).post()
        os._exit(0)
    there.post()
    assert back.wait(30)
    os.waitpid(pid, 0)
    group.close()


def test_an_unrung_bell_is_not_waited_for_longer_than_asked() -> None:
    group = Group()
    assert not group.doorbell("ready").wait(0)
    group.close()


def test_posts_do_not_pile_up_beyond_their_count() -> None:
    group = Group()
    bell = group.doorbell("ready")
    for _ in range(5):
        bell.post_up_to(3)
    assert bell.value == 3
    bell.drain()
    assert bell.value == 0
    group.close()


def test_a_closed_bell_leaves_no_name() -> None:
    group = Group()
    bell = group.doorbell("ready")
    assert os.path.exists(f"/dev/shm/sem.{bell.name[1:]}")
    bell.close()
    bell.close()
    assert not os.path.exists(f"/dev/shm/sem.{bell.name[1:]}")
    group.close()
