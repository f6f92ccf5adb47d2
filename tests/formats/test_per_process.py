"""Files opened once per process also open in a forked child, whatever the parent's threads were doing at the fork."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload.formats import TarDataset, TarWriter
from shmload.formats.per_process import PerProcess


class BlockedCall:
    """A function that blocks its thread until it is released."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self) -> Any:
        self.reached.set()
        self.released.wait()
        return "parent's"


def exit_status_of_child_forked_while_blocked(
    blocked: BlockedCall, in_thread: Callable[[], object], in_child: Callable[[], bool]
) -> int:
    """Forks a child while a thread is blocked.

    Returns:
        the child's exit status: 0 if `in_child` returned true, a signal if it blocked.
    """
    thread = threading.Thread(target=in_thread)
    thread.start()
    blocked.reached.wait()
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os._exit(0 if in_child() else 1)
        finally:
            os._exit(2)
    try:
        return os.waitpid(pid, 0)[1]
    finally:
        blocked.released.set()
        thread.join()


@pytest.mark.parametrize("is_inherited", [False, True])
def test_child_does_not_wait_for_a_thread_that_was_opening_a_file(is_inherited: bool) -> None:
    opened: PerProcess[Any] = PerProcess(is_inherited)
    blocked = BlockedCall()
    assert (
        exit_status_of_child_forked_while_blocked(
            blocked, lambda: opened.get(blocked), lambda: opened.get(lambda: "child's") == "child's"
        )
        == 0
    )
    assert opened.get(lambda: "another") == "parent's"


def test_child_does_not_wait_for_a_thread_that_was_mapping_a_shard(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "cls": 3})
    dataset, blocked = TarDataset(tmp_path / "a.tar", schema={"cls": "int64"}), BlockedCall()
    samples = dataset._opened()
    plain = list(samples._alternatives)

    class Alternatives(list[Any]):
        def __len__(self) -> int:
            blocked()
            return len(plain)

    samples._alternatives = Alternatives(plain)

    def in_child() -> bool:
        samples._alternatives = plain
        return bool(dataset[0]["cls"] == np.int64(3))

    assert exit_status_of_child_forked_while_blocked(blocked, lambda: dataset[0], in_child) == 0
    assert dataset[0]["cls"] == 3


def test_single_shard_is_indexed_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "cls": 3})
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread was started"))
    assert len(TarDataset(tmp_path / "a.tar", cache=False)) == 1
