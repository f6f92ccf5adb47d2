from __future__ import annotations

import os
import pickle
from typing import Any

from shmload.remote.pass_counter import PassCounter


def copy(passes: PassCounter) -> Any:
    """As a spawned worker has it."""
    return pickle.loads(pickle.dumps(passes))


def test_workers_of_a_pass_agree_and_the_next_pass_is_the_next() -> None:
    board = PassCounter()
    first, second = copy(board), copy(board)
    assert [first.begin(11), second.begin(11), first.begin(22), second.begin(22)] == [0, 0, 1, 1]


def test_persistent_workers_count_their_turns() -> None:
    board = PassCounter()
    first, second = copy(board), copy(board)
    assert [first.begin(11) for _ in range(3)] == [0, 1, 2]
    assert [second.begin(11) for _ in range(3)] == [0, 1, 2]


def test_a_late_worker_of_a_broken_pass_moves_nobody() -> None:
    board = PassCounter()
    first, second, late = copy(board), copy(board), copy(board)
    assert first.begin(11) == 0
    assert copy(board).begin(22) == 1
    assert late.begin(11) == 0
    assert copy(board).begin(33) == 2  # of a pass that broke off before anyone else had begun it
    assert second.begin(22) == 1


def test_the_trainer_alone_counts_each_iterator() -> None:
    board = PassCounter()
    assert [board.begin(None), board.begin(None)] == [0, 1]
    assert board.next == 2


def test_set_next_is_seen_by_workers_that_live_already() -> None:
    board = PassCounter()
    worker = copy(board)
    assert worker.begin(11) == 0
    board.set_next(7)
    assert [worker.begin(11), worker.begin(11)] == [7, 8]


def test_a_pass_that_was_set_is_that_one_although_it_has_the_seed_of_one_before() -> None:
    board = PassCounter()
    first, late = copy(board), copy(board)
    assert first.begin(11) == 0
    for number in (5, 3):
        board.set_next(number)
        assert [copy(board).begin(11), copy(board).begin(11), board.next] == [number, number, number + 1]
    assert (late.begin(11), board.next) == (0, 4)


def test_a_forked_worker_shares_the_board() -> None:
    board = PassCounter()
    pid = os.fork()
    if pid == 0:
        os._exit(10 + board.begin(11))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10
    assert board.begin(11) == 0
    assert board.next == 1


def test_the_newest_passes_are_remembered_however_many_there_were() -> None:
    board = PassCounter()
    worker = copy(board)
    assert list(range(600)) == [worker.begin(seed) for seed in range(600)]
    assert [copy(board).begin(599), copy(board).begin(400)] == [599, 400]


def test_a_copy_without_its_board_goes_on_from_the_next_pass() -> None:
    board = PassCounter()
    board.begin(None)
    sent = pickle.dumps(board)
    fd = board._fd
    del board
    other = PassCounter(40)  # may have the same descriptor by now: it is told apart by its nonce
    found = pickle.loads(sent)
    assert [found.begin(None), found.begin(None)] == [1, 2]
    assert (other.next, fd >= 0) == (40, True)
