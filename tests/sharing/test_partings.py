"""Ranks that stop, die or go elsewhere: the others get a clear error soon, and nothing remains."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest

import shmload
from shmload import RankLeft
from shmload.sharing.rank_group import RankGroup, RankInfo
from tests.sharing.sharing_kit import BATCH, NUM_SAMPLES, digest, digests, loader_of, run_ranks

SOON_S = 60.0  # noticed within 0.02 s of waiting, but other programs may use the machine
NUM_STEPS = NUM_SAMPLES // BATCH
NUM_SLOTS = 10  # of three ranks' ring with one worker: 2 batches ahead, 2 more, and 3 for each follower
NUM_FREE = NUM_SLOTS - 3 + 1  # batches that a leader can read while its one follower has read and released the first


def die_holding(rank: int, log: Path, dying: int, barrier: Any) -> Any:
    """Kills one rank while it holds a batch; the others continue to read."""
    with loader_of(log, timeout=SOON_S) as loader:  # without a notice they also end, but with another error
        batches = iter(loader)
        next(batches)
        kept = next(batches)
        barrier.wait(30)
        if rank == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        began, found = monotonic(), 2
        with pytest.raises(RankLeft) as told:
            for _ in range(3):  # batches that are ready may be read before the kernel reports a death
                for _ in batches:
                    found += 1
                batches = iter(loader)
        del kept
        return found, monotonic() - began, str(told.value)


@pytest.mark.parametrize("dying", [0, 1])
def test_other_ranks_fail_soon_after_a_rank_is_killed_while_holding_a_batch(tmp_path: Path, dying: int) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(3)
    outcomes = run_ranks(die_holding, 3, tmp_path / "log", dying, barrier)
    assert outcomes[dying].exitcode == -signal.SIGKILL
    for outcome in (outcome for rank, outcome in enumerate(outcomes) if rank != dying):
        assert outcome.text == ""
        found, took_s, told = outcome.given
        assert 2 <= found < 2 + NUM_SLOTS
        assert took_s < SOON_S
        assert told.startswith("local rank ")
        assert 'which shares a ring with this rank (share="node"), has ' in told
        assert f"batches since they began together, and this one wants its batch {found + 1}." in told


def stop_early(rank: int, log: Path, stopping: int, barrier: Any) -> Any:
    with loader_of(log) as loader:
        for step, _ in enumerate(loader):
            if rank == stopping and step == 1:
                break
            if rank != stopping and step == 1:
                barrier.wait(30)  # otherwise this rank could reach the epoch's end before the other leaves
            if rank != stopping and step == NUM_STEPS - 1:
                return step
        barrier.wait(30)
        barrier.wait(30)  # the other rank lives and has its loader
        return None


def stop_early_and_report(rank: int, log: Path, stopping: int, barrier: Any) -> Any:
    try:
        return stop_early(rank, log, stopping, barrier)
    except RankLeft as error:
        barrier.wait(30)
        return str(error)


@pytest.mark.parametrize("stopping", [0, 1])
def test_rank_that_leaves_the_loop_early_is_an_error_in_the_others(tmp_path: Path, stopping: int) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2)
    outcomes = run_ranks(stop_early_and_report, 2, tmp_path / "log", stopping, barrier)
    assert [outcome.text for outcome in outcomes] == ["", ""]
    told = outcomes[1 - stopping].given
    assert f"local rank {stopping} (pid " in told
    assert "has left the loop over its loader: it has read 2 batches" in told
    assert told.endswith("let all of them break, resume and close at the same step")


def close_early(rank: int, log: Path, closing: int, barrier: Any) -> Any:
    with loader_of(log) as loader:
        batches = iter(loader)
        found = [digest(next(batches)) for _ in range(2)]
        if rank == closing:
            loader.close()
            barrier.wait(30)
            return found
        barrier.wait(30)  # otherwise this rank could be at the epoch's end by then
        with pytest.raises(RankLeft) as told:
            found += [digest(batch) for batch in batches]
        return found, str(told.value)


@pytest.mark.parametrize("closing", [0, 1])
def test_rank_that_closes_its_loader_early_ends_the_others_at_its_step(tmp_path: Path, closing: int) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2)
    outcomes = run_ranks(close_early, 2, tmp_path / "log", closing, barrier)
    assert [outcome.text for outcome in outcomes] == ["", ""]
    found, told = outcomes[1 - closing].given
    assert found == outcomes[closing].given
    assert "has closed its loader: it has read 2 batches" in told


def wait_for_the_slow(rank: int, log: Path, barrier: Any) -> list[str]:
    """Reads rank 1's first batch, and the rest once rank 0 can go no further."""
    found = []
    with loader_of(log, timeout=0.4 if rank == 0 else 20) as loader:
        if rank == 1:
            batches = iter(loader)
            found.append(digest(next(batches)))
            barrier.wait(30)
            return found + digests(batches)
        batches = iter(loader)
        while len(found) < NUM_FREE:
            try:
                found.append(digest(next(batches)))
            except StopIteration:
                batches = iter(loader)
            except RuntimeError as error:
                assert "timed out" in str(error)  # noqa: PT017  # a batch may take so long to make on a busy machine
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.4 seconds"):
            next(batches)
        barrier.wait(30)
    return found


def test_slow_rank_delays_the_others_once_the_ring_is_full(tmp_path: Path) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2)
    first, second = run_ranks(wait_for_the_slow, 2, tmp_path / "log", barrier)
    assert (first.text, second.text) == ("", "")
    assert second.given == first.given[:NUM_STEPS]


def start_elsewhere(rank: int, log: Path) -> Any:
    with loader_of(log, timeout=SOON_S) as loader:
        if rank == 1:
            loader.set_epoch(4)
        next(iter(loader))


def test_ranks_that_begin_at_different_positions_raise(tmp_path: Path) -> None:
    outcomes = run_ranks(start_elsewhere, 2, tmp_path / "log")
    assert [outcome.error for outcome in outcomes] == ["RankLeft", "RankLeft"]
    first = next(outcome.text for outcome in outcomes if "must read the same batches" in outcome.text)
    assert "step 0 of epoch 4" in first
    assert "step 0 of epoch 0" in first
    assert first.endswith("Break, load states and set epochs in all ranks alike")


def go_elsewhere(rank: int, log: Path) -> Any:
    with loader_of(log) as loader:
        batches = iter(loader)
        for _ in range(2 + rank):
            next(batches)
        loader.set_epoch(3)
        return digests(loader)


def test_ranks_that_break_off_at_different_steps_raise(tmp_path: Path) -> None:
    outcomes = run_ranks(go_elsewhere, 2, tmp_path / "log")
    assert [outcome.error for outcome in outcomes] == ["RankLeft", "RankLeft"]
    assert any("having read 2 since they began together last" in o.text or "has read" in o.text for o in outcomes)


class Board:
    """A board on which a ring is announced after some time."""

    def __init__(self) -> None:
        self.begun, self.num_looks = monotonic(), 0

    def locked_board(self) -> Any:
        return nullcontext()

    def read(self) -> str:
        self.num_looks += 1
        return json.dumps({"rings": {"0": {"path": "there"}} if monotonic() > self.begun + 0.2 else {}})

    def leave(self) -> None: ...


def test_wait_for_an_ended_rank_does_not_spin() -> None:
    members = [RankInfo(rank, 1, "", (rank, 3), {}, []) for rank in range(3)]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in (["cat"], ["true"])]
    pidfds = {number: os.pidfd_open(child.pid) for number, child in zip((0, 2), children, strict=True)}
    board: Any = Board()
    try:
        os.waitid(os.P_PIDFD, pidfds[2], os.WEXITED | os.WNOWAIT)
        rank_group = RankGroup(members, 1, pidfds, board, cast(Any, None))
        assert rank_group.ring() == {"path": "there"}
        assert board.num_looks < 100
    finally:
        for child, pidfd in zip(children, pidfds.values(), strict=True):
            child.communicate()
            os.close(pidfd)


ENDS_FIRST = """
import atexit, os, sys
from pathlib import Path
from time import monotonic
import torch
from shmload import ShmLoader
from shmload.sharing.follower import FollowingEngine

ending = Path(sys.argv[1])

def map_late(self, slot):
    segment, deadline = Path(self._ring.payload(slot)[1].decode()), monotonic() + 60
    while not ending.exists() and monotonic() < deadline:
        pass
    deadline = monotonic() + 0.5
    while segment.exists() and monotonic() < deadline:
        pass
    return map_segment(self, slot)

map_segment, FollowingEngine._map = FollowingEngine._map, map_late
loader = ShmLoader(torch.arange(12), 4, seed=3, shuffle=True, num_workers=1, rank=0, world_size=1, share="node")
for batch in loader:
    print(batch.tolist(), flush=True)
if os.environ["RANK"] == "0":
    atexit.register(ending.touch)
"""


def test_rank_that_ends_with_its_loader_open_waits_for_the_others(tmp_path: Path) -> None:
    """The leader's program ends when the other rank has not opened the memory of its first batch."""
    (tmp_path / "program.py").write_text(ENDS_FIRST)
    command = [sys.executable, "-m", "shmload", "launch", "--nprocs", "2", "program.py", "ending"]
    env = {**os.environ, "PYTHONPATH": str(Path(shmload.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    both = [[line[9:] for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}] ")] for rank in range(2)]
    assert both[0] == both[1]
    assert len(both[0]) == 3
