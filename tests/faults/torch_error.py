"""Print the error of torch's loader when a sample kills its worker: a program, because torch's SIGCHLD handler may raise anywhere.

The argument is the negative number of a signal, or an exit code. Prints message and cause as JSON, without the pids.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
from typing import Any

from torch.utils.data import DataLoader

from tests.faults.faults_kit import Rows


class Deadly(Rows):
    """A dataset in which one sample ends its worker, by a signal or with an exit code."""

    def __init__(self, n: int, deadly: int, end: int) -> None:
        super().__init__(n)
        self.deadly, self.end = deadly, end

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.deadly and self.end < 0:
            faulthandler.disable()
            os.kill(os.getpid(), -self.end)
        if index == self.deadly:
            os._exit(self.end)
        return super().__getitem__(index)


def error_of(kind: type[DataLoader[Any]], end: int) -> list[str]:
    """Returns message and cause of the loader's error."""
    try:
        for _ in kind(Deadly(64, 20, end), batch_size=4, num_workers=2):
            pass
    except RuntimeError as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise again
        return [re.sub(r"\b\d{2,}\b", "PID", text) for text in (str(error), str(error.__cause__))]
    raise AssertionError("nothing was raised")


if __name__ == "__main__":
    print(json.dumps(error_of(DataLoader, int(sys.argv[1]))), flush=True)
    os._exit(0)
