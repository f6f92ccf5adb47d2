from __future__ import annotations

import copy
import fcntl
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shmload.remote import pass_counter
from shmload.remote.pass_counter import PassCounter
from tests.formats.test_per_process import BlockedCall, exit_status_of_child_forked_while_blocked


def unpickled_copy(passes: PassCounter) -> Any:
    """Returns the passes as a spawned worker has them."""
    return pickle.loads(pickle.dumps(passes))


def test_workers_of_a_pass_agree_on_its_number() -> None:
    board = PassCounter()
    first, second = unpickled_copy(board), unpickled_copy(board)
    assert [first.begin(11), second.begin(11), first.begin(22), second.begin(22)] == [0, 0, 1, 1]


def test_each_persistent_worker_counts_its_passes() -> None:
    board = PassCounter()
    first, second = unpickled_copy(board), unpickled_copy(board)
    assert [first.begin(11) for _ in range(3)] == [0, 1, 2]
    assert [second.begin(11) for _ in range(3)] == [0, 1, 2]


def test_each_worker_thread_counts_its_passes() -> None:
    board, found = PassCounter(), {}

    def begin_passes(name: str) -> None:
        found[name] = [board.begin(seed) for seed in (11, 11, 22)]

    for name in ("first", "second"):
        thread = threading.Thread(target=begin_passes, args=(name,))
        thread.start()
        thread.join()
    assert found == {"first": [0, 1, 2], "second": [0, 1, 2]}


def test_late_worker_of_an_abandoned_pass_does_not_affect_other_workers() -> None:
    board = PassCounter()
    first, second, late = unpickled_copy(board), unpickled_copy(board), unpickled_copy(board)
    assert first.begin(11) == 0
    assert unpickled_copy(board).begin(22) == 1
    assert late.begin(11) == 0
    assert unpickled_copy(board).begin(33) == 2  # after a pass that broke off before another worker had begun it
    assert second.begin(22) == 1


def test_the_trainer_alone_counts_each_iterator() -> None:
    board = PassCounter()
    assert [board.begin(None), board.begin(None)] == [0, 1]
    assert board.next == 2


def test_set_next_affects_running_workers() -> None:
    board = PassCounter()
    worker = unpickled_copy(board)
    assert worker.begin(11) == 0
    board.set_next(7)
    assert [worker.begin(11), worker.begin(11)] == [7, 8]


def test_set_next_overrides_an_earlier_pass_with_the_same_seed() -> None:
    board = PassCounter()
    first, late = unpickled_copy(board), unpickled_copy(board)
    assert first.begin(11) == 0
    for number in (5, 3):
        board.set_next(number)
        assert [unpickled_copy(board).begin(11), unpickled_copy(board).begin(11), board.next] == [number, number, number + 1]
    assert (late.begin(11), board.next) == (0, 4)


def test_forked_worker_shares_the_pass_numbers() -> None:
    board = PassCounter()
    pid = os.fork()
    if pid == 0:
        os._exit(10 + board.begin(11))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10
    assert board.begin(11) == 0
    assert board.next == 1


def test_child_forked_while_a_thread_begins_a_pass_begins_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    board, blocked, lockf = PassCounter(), BlockedCall(), fcntl.lockf

    def lock_file(fd: int, kind: int) -> None:
        if threading.current_thread() is not threading.main_thread() and kind == fcntl.LOCK_EX:
            blocked()
        lockf(fd, kind)

    monkeypatch.setattr(pass_counter.fcntl, "lockf", lock_file)
    assert exit_status_of_child_forked_while_blocked(blocked, lambda: board.begin(11), lambda: board.begin(22) == 0) == 0
    assert board.next == 2


def test_newest_passes_are_remembered_after_many_passes() -> None:
    board = PassCounter()
    worker = unpickled_copy(board)
    assert list(range(600)) == [worker.begin(seed) for seed in range(600)]
    assert [unpickled_copy(board).begin(599), unpickled_copy(board).begin(400)] == [599, 400]


def test_copy_without_shared_memory_continues_from_the_next_pass() -> None:
    board = PassCounter()
    board.begin(None)
    sent = pickle.dumps(board)
    fd = board._fd
    del board
    other = PassCounter(40)  # may have reused the descriptor: the nonce differs
    found = pickle.loads(sent)
    assert [found.begin(None), found.begin(None)] == [1, 2]
    assert (other.next, fd >= 0) == (40, True)


def test_worker_thread_that_is_late_for_an_abandoned_pass_takes_no_other_number() -> None:
    counter = PassCounter()
    with ThreadPoolExecutor(1) as early, ThreadPoolExecutor(1) as late:
        copies = [(worker, copy.copy(counter)) for worker in (early, late)]  # as each has one when it starts

        def begun(worker: int) -> int:
            thread, of_worker = copies[worker]
            return thread.submit(of_worker.begin, 5).result()

        assert begun(0) == 0
        counter.set_next(2)
        assert begun(1) == 0  # the pass that the other has begun
        assert [begun(1), begun(0), counter.next] == [2, 2, 3]
