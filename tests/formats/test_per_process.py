"""What is opened once a process: in a forked child, too, whatever the parent's threads were at when it was forked."""

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


class Held:
    """Something that a thread is held up at until it is let go."""

    def __init__(self) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()

    def __call__(self) -> Any:
        self.reached.set()
        self.let_go.wait()
        return "parent's"


def of_a_child_forked_meanwhile(held: Held, in_thread: Callable[[], object], in_child: Callable[[], bool]) -> int:
    """The exit status of a child that is forked while a thread is held up: 0 if it was true there, a signal if it waited for ever."""
    thread = threading.Thread(target=in_thread)
    thread.start()
    held.reached.wait()
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
        held.let_go.set()
        thread.join()


@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_child_does_not_wait_for_a_thread_that_was_opening(is_inherited: bool) -> None:
    opened: PerProcess[Any] = PerProcess(is_inherited)
    held = Held()
    assert of_a_child_forked_meanwhile(held, lambda: opened.get(held), lambda: opened.get(lambda: "child's") == "child's") == 0
    assert opened.get(lambda: "another") == "parent's"


def test_a_child_does_not_wait_for_a_thread_that_was_mapping_a_shard(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "cls": 3})
    dataset, held = TarDataset(tmp_path / "a.tar", schema={"cls": "int64"}), Held()
    samples = dataset._opened()
    plain = list(samples._alternatives)

    class Alternatives(list[Any]):
        def __len__(self) -> int:
            held()
            return len(plain)

    samples._alternatives = Alternatives(plain)

    def in_child() -> bool:
        samples._alternatives = plain
        return bool(dataset[0]["cls"] == np.int64(3))

    assert of_a_child_forked_meanwhile(held, lambda: dataset[0], in_child) == 0
    assert dataset[0]["cls"] == 3


def test_a_single_shard_is_indexed_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "cls": 3})
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread was started"))
    assert len(TarDataset(tmp_path / "a.tar", cache=False)) == 1
