"""Without a seed a dead worker ends the iteration as it does in torch's loader, unless max_restarts says otherwise."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from time import monotonic

import pytest
import torch
from torch.utils.data import DataLoader

from shmload import ShmLoader, WorkerDied
from tests.faults import torch_words
from tests.faults.faults_kit import Charges, Rows, Victims, digest, program_env

pytestmark = pytest.mark.slow(reason="each starts workers for its loaders, and in most cases some die")
BOUND_S = 20.0  # it takes 0.2 s; a death that nobody notices would take for ever


ENDS = [-signal.SIGKILL, -signal.SIGSEGV, 3]


def torchs_words(end: int) -> list[str]:
    """What torch says about a worker that ends so."""
    command = [sys.executable, torch_words.__file__, str(int(end))]
    for _ in range(20):
        ran = subprocess.run(command, capture_output=True, timeout=120, env=program_env())
        if ran.returncode == 0:  # else torch's SIGCHLD handler has raised where nobody expects it
            words: list[str] = json.loads(ran.stdout.splitlines()[-1])
            return words
    raise AssertionError(ran.stderr.decode())


@pytest.mark.parametrize("end", ENDS)
def test_a_dead_worker_is_told_in_torchs_words(end: int) -> None:
    began = monotonic()
    words = torch_words.words_of(ShmLoader, end)
    assert monotonic() - began < BOUND_S
    assert words[0] == "DataLoader worker (pid(s) PID) exited unexpectedly"
    assert torchs_words(end)[0] in words  # torch says the one or the other, as it happens, with several causes


@pytest.mark.parametrize("point", ["before_claim", "after_claim", "mid_decode", "before_finish", "after_finish", "before_post"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_death_at_any_point_ends_the_iteration_and_leaves_nothing(point: str, persistent: bool, charges: Charges) -> None:
    loader = ShmLoader(Rows(80), batch_size=4, num_workers=2, persistent_workers=persistent)
    began = monotonic()
    with pytest.raises(WorkerDied, match=r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"):
        for step, _ in enumerate(loader):
            if step == 3:
                charges.arm(point, signal.SIGKILL)
                began = monotonic()
    assert monotonic() - began < BOUND_S
    assert charges.num_spent == 1
    loader.close()
    assert loader._builder.last.pool.pids == []


def test_without_persistent_workers_the_next_iteration_works() -> None:
    loader = ShmLoader(Rows(80), batch_size=4, num_workers=2)
    with pytest.raises(WorkerDied):
        for _ in loader:
            Victims(loader._builder.last).kill(1)
    assert sum(1 for _ in loader) == 20


def test_an_iterator_outlives_its_loader_and_ends_with_a_closed_one() -> None:
    assert sum(1 for _ in ShmLoader(Rows(80), batch_size=4, num_workers=2)) == 20
    stream = iter(loader := ShmLoader(Rows(80), batch_size=4, num_workers=2))
    next(stream)
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        for _ in stream:
            pass


def test_a_broken_iteration_goes_on_saying_so() -> None:
    stream = iter(loader := ShmLoader(Rows(80), batch_size=4, num_workers=2))
    next(stream)
    Victims(loader._builder.last).kill(0)
    for _ in range(2):
        with pytest.raises(WorkerDied, match="exited unexpectedly"):
            for _ in stream:
                pass
    del stream
    loader.close()


def test_max_restarts_replaces_so_many_and_no_more() -> None:
    torch.manual_seed(1)
    expected = [digest(b["x"]) for b in DataLoader(Rows(160), batch_size=4, shuffle=True)]
    torch.manual_seed(1)
    loader = ShmLoader(Rows(160, 300), batch_size=4, shuffle=True, num_workers=2, max_restarts=3)
    got: list[str] = []
    with pytest.raises(WorkerDied):
        for step, batch in enumerate(loader):
            got.append(digest(batch["x"]))
            if step % 8 == 0:
                Victims(loader._builder.last).kill(step // 8 % 2)
    assert loader.stats()["num_restarts"] == 3
    assert 24 < len(got) <= 32
    assert expected[: len(got)] == got
    loader.close()


def test_replaced_workers_keep_torchs_order_and_their_own_batches() -> None:
    loader = ShmLoader(Rows(160, 100), batch_size=4, num_workers=2, max_restarts=20)
    expected = [digest(b["x"]) for b in DataLoader(Rows(160), batch_size=4)]
    got = []
    for step, batch in enumerate(loader):
        got.append(digest(batch["x"]))
        if step % 4 == 0:
            Victims(loader._builder.last).kill(step // 4 % 2)
    assert expected == got
    assert loader.stats()["num_restarts"] >= 8
