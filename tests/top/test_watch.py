"""Repeated looks at blocks that appear, disappear, or cannot be read."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from shmload.engine.ring_reader import ControlBlock, HostRings
from shmload.tools.top import watch
from shmload.tools.top.watch import HISTORY, Watch
from tests.top.live_kit import SECOND, snapshot_with

Blocks = dict[str, Any]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    """Returns the blocks of a host: path -> snapshot, or the exception of reading it. This process owns each."""
    there: Blocks = {}

    class Reader:
        """Replaces a RingReader."""

        def __init__(self, path: str) -> None:
            self.path = path
            if isinstance(there[path], Exception):
                raise there[path]

        open = classmethod(lambda cls, path: cls(path))
        pipeline_stages = None

        @staticmethod
        def find() -> HostRings:
            return HostRings([ControlBlock(p, p, 0, os.getpid(), "shm") for p in there], [])

        def snapshot(self, seen_pid: int) -> Any:
            return there[self.path]

    monkeypatch.setattr(watch, "RingReader", Reader)
    return there


def at(time_s: float, **words: Any) -> dict[str, Any]:
    return snapshot_with(time_s, owner_pid=os.getpid(), owner_start_ns=5 * SECOND, **words)


def test_look_covers_the_time_since_the_last_one(blocks: Blocks) -> None:
    watched = Watch()
    rates = []
    for time_s, samples in ((10, 100), (11, 107), (13, 107)):
        blocks["a"] = at(time_s, samples=samples)
        (found,) = watched.look()["loaders"]
        rates.append((found["interval_s"], found["samples_per_s"]))
    assert rates == [(5, 20), (1, 7), (2, 0)]
    assert found["history"] == [20, 7, 0]


def test_history_is_limited(blocks: Blocks) -> None:
    watched = Watch()
    for time_s in range(10, 20 + HISTORY):
        blocks["a"] = at(time_s)
        look = watched.look()
    assert len(look["loaders"][0]["history"]) == HISTORY


def test_loader_that_reappears_starts_from_zero(blocks: Blocks) -> None:
    watched = Watch()
    blocks["a"] = at(10)
    watched.look()
    blocks["a"] = FileNotFoundError()
    assert watched.look()["loaders"] == []
    blocks["a"] = at(15)
    (found,) = watched.look()["loaders"]
    assert (found["interval_s"], len(found["history"])) == (10, 1)


def test_unreadable_block_is_named_unless_it_is_another_users(blocks: Blocks) -> None:
    blocks.update(a=ValueError("layout version 77"), b=PermissionError(), c=OSError("no"), d=at(10))
    look = Watch().look()
    assert [(block["path"], block["why"]) for block in look["unreadable"]] == [("a", "layout version 77"), ("c", "no")]
    assert [loader["stem"] for loader in look["loaders"]] == ["d"]


@pytest.mark.parametrize(("pid", "num"), [(os.getpid(), 1), (os.getppid(), 1), (4194305, 0)], ids=["own", "parent", "nobody"])
def test_only_loaders_of_the_given_processes_are_shown(blocks: Blocks, pid: int, num: int) -> None:
    blocks["a"] = at(10)
    assert len(Watch([pid]).look()["loaders"]) == num


def test_pids_of_another_namespace_are_not_looked_up_in_this_one(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = at(10)
    mine["workers"][0]["pid"] = os.getppid()
    blocks.update(a=mine, b={**mine, "owner_pid": 7})
    known, unknown = (loader["workers"][0] for loader in Watch().look()["loaders"])
    assert known["rss_bytes"] > 0
    assert (unknown["pid"], unknown["rss_bytes"], unknown["is_stopped"]) == (os.getppid(), None, None)


def test_loaders_are_searched_rarely_and_read_every_time(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    now, took, searches = [100.0], [0.01], []
    find = watch.RingReader.find

    def searched() -> HostRings:
        searches.append(now[0])
        now[0] += took[0]
        return find()

    monkeypatch.setattr(watch.RingReader, "find", searched)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))
    watched = Watch()

    def looks(*times_s: float) -> list[float]:
        """Returns the times of the searches, given looks at these times."""
        searches.clear()
        for now[0] in times_s:
            blocks["a"] = at(now[0])
            (found,) = watched.look()["loaders"]
            assert found["age_s"] == now[0] - 5 or found["interval_s"] > 0
        return list(searches)

    assert looks(100, 100.5, 101, 101.5, 102, 102.5, 103, 104) == [100, 102, 104]
    took[0] = 1.0
    assert looks(107, 110, 120, 126, 128, 140) == [107, 128]
