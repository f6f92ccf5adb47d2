"""Print what each loader raises when a sample or signal ends its worker: a program, because torch's SIGCHLD handler may raise
anywhere.

The argument is "torch" or "shmload". Prints a line of JSON for each way to end: the type of the exception, its text and cause
without
pids, whether it names a worker's pid, and whether the worker prints a traceback.
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


def end_by_signal(number: int) -> Callable[[], None]:
    """Returns a function that ends the process by a signal."""

    def die() -> None:
        faulthandler.disable()
        os.kill(os.getpid(), number)

    return die


def raiser(error: BaseException) -> Callable[[], None]:
    """Returns a function that raises the error."""

    def do() -> None:
        raise error

    return do


WAYS: dict[str, Callable[[], None]] = {
    "SIGKILL": end_by_signal(signal.SIGKILL),
    "SIGSEGV": end_by_signal(signal.SIGSEGV),
    "SIGBUS": end_by_signal(signal.SIGBUS),
    "SIGABRT": os.abort,
    "SIGTERM": end_by_signal(signal.SIGTERM),
    "_exit 3": lambda: os._exit(3),
    "_exit 0": lambda: os._exit(0),
    "sys.exit 4": lambda: sys.exit(4),
    "sys.exit text": lambda: sys.exit("a text"),
    "sys.exit": sys.exit,
    "KeyboardInterrupt": raiser(KeyboardInterrupt()),
    "GeneratorExit": raiser(GeneratorExit()),
    "BaseException": raiser(BaseException("base")),
}


class Ending(Numbers):
    """A dataset whose sample 9 ends its worker."""

    def __init__(self, way: str) -> None:
        super().__init__(24)
        self.way = way

    def __getitem__(self, index: int) -> int:
        if index == 9:
            WAYS[self.way]()
        return index


def result_of(kind: type[DataLoader[Any]], way: str) -> dict[str, Any]:
    """Returns what the loader raises, and what it has delivered before."""
    pids: list[int] = []
    delivered: list[int] = []
    stream = None
    try:
        stream = iter(kind(Ending(way), batch_size=2, num_workers=2, collate_fn=as_list))  # a tensor would need its sender to live
        pids += [worker.pid for worker in stream._workers]
        for batch in stream:
            delivered += batch
    except BaseException as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise again
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
    """Forks for each way to end, so that none affects the others."""
    if name == "torch":  # torch checks for workers that exited silently this often
        _MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.2,)
    kind = {"torch": DataLoader, "shmload": ShmLoader}[name]
    for way in WAYS:
        for _ in range(5):  # torch's handler may also raise where nothing catches it, or where its loader then blocks forever
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                pid = os.fork()
                if pid == 0:
                    signal.alarm(15)
                    os.dup2(err.fileno(), 2)
                    try:
                        os.write(out.fileno(), json.dumps(result_of(kind, way)).encode())
                    finally:
                        os._exit(0)
                os.waitpid(pid, 0)
                out.seek(0), err.seek(0)
                reported, printed = out.read(), err.read()
            if reported:
                break
        print(json.dumps([way, json.loads(reported) | {"prints": b"Traceback" in printed}]))


if __name__ == "__main__":
    main(sys.argv[1])
