"""What each loader says when a sample, or a signal, ends its worker: a program, because torch's SIGCHLD handler may raise anywhere.

Argument: "torch" or "shmload". Prints a line of JSON for each way to end: the type of what is raised, its text and its cause, without
the pids, whether the pid it names was a worker's, and whether the worker prints a traceback.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import Numbers, as_list


def die_of(number: int) -> Callable[[], None]:
    """Ends the process by that signal."""

    def die() -> None:
        faulthandler.disable()
        os.kill(os.getpid(), number)

    return die


def throw(error: BaseException) -> Callable[[], None]:
    """Raises that."""

    def do() -> None:
        raise error

    return do


WAYS: dict[str, Callable[[], None]] = {
    "SIGKILL": die_of(signal.SIGKILL),
    "SIGSEGV": die_of(signal.SIGSEGV),
    "SIGBUS": die_of(signal.SIGBUS),
    "SIGABRT": os.abort,
    "SIGTERM": die_of(signal.SIGTERM),
    "_exit 3": lambda: os._exit(3),
    "_exit 0": lambda: os._exit(0),
    "sys.exit 4": lambda: sys.exit(4),
    "sys.exit text": lambda: sys.exit("a text"),
    "sys.exit": sys.exit,
    "KeyboardInterrupt": throw(KeyboardInterrupt()),
    "GeneratorExit": throw(GeneratorExit()),
    "BaseException": throw(BaseException("base")),
}


class Ending(Numbers):
    """Sample 9 ends its worker."""

    def __init__(self, way: str) -> None:
        super().__init__(24)
        self.way = way

    def __getitem__(self, index: int) -> int:
        if index == 9:
            WAYS[self.way]()
        return index


def words_of(kind: type[DataLoader[Any]], way: str) -> dict[str, Any]:
    """What the loader raises, and what it has delivered before."""
    pids: list[int] = []
    delivered: list[int] = []
    stream = None
    try:
        stream = iter(kind(Ending(way), batch_size=2, num_workers=2, collate_fn=as_list))  # a tensor would need its sender alive
        pids += [worker.pid for worker in stream._workers]
        for batch in stream:
            delivered += batch
    except BaseException as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler goes on raising
        named = [int(number) for number in re.findall(r"pids?\D* (\d+)", str(error))]
        return {
            "kinds": [one.__name__ for one in type(error).__mro__],
            "text": re.sub(r"\b\d{3,}\b", "PID", str(error)),
            "cause": re.sub(r"\b\d{3,}\b", "PID", str(error.__cause__)),
            "names a worker": set(named) <= set(pids) and len(named) == 1,
            "in order": delivered == list(range(len(delivered))) and len(delivered) <= 8,
        }
    return {"text": "nothing was raised"}


def main(name: str) -> None:
    """Forks for each way, so that none disturbs another."""
    if name == "torch":  # which looks for quiet deaths this often
        _MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.2,)
    kind = {"torch": DataLoader, "shmload": ShmLoader}[name]
    for way in WAYS:
        for _ in range(5):  # torch's handler may also raise where nobody catches it, or where its loader then waits forever
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                pid = os.fork()
                if pid == 0:
                    signal.alarm(15)
                    os.dup2(err.fileno(), 2)
                    try:
                        os.write(out.fileno(), json.dumps(words_of(kind, way)).encode())
                    finally:
                        os._exit(0)
                os.waitpid(pid, 0)
                out.seek(0), err.seek(0)
                told, printed = out.read(), err.read()
            if told:
                break
        print(json.dumps([way, json.loads(told) | {"prints": b"Traceback" in printed}]))


if __name__ == "__main__":
    main(sys.argv[1])
