"""Programs with unusual handling of child signals or descriptors, which then use a loader and print its batches."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

from shmload import ShmLoader


class Numbers:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def reap(*_: Any) -> None:
    """Waits for every child that has ended, as servers do."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main(habit: str, method: str, seeds: str, kills: str) -> None:
    """Reads two epochs with each seed (in torch mode for None); with `kills`, ends a worker in the first."""
    warnings.simplefilter("error")
    if habit == "ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    elif habit == "handler":
        signal.signal(signal.SIGCHLD, reap)
    for seed in seeds.split():
        read(habit, method, None if seed == "None" else int(seed), kills)


def read(habit: str, method: str, seed: int | None, kills: str) -> None:
    """Reads two epochs."""
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method, "seed": seed}
    if habit == "closes":
        with ShmLoader(Numbers(), 2, **options) as loader:
            assert len(list(loader)) == 4
        os.closerange(3, 4096)
        kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]  # other files now have the same numbers
    with ShmLoader(Numbers(), 2, **options) as loader:
        for epoch in range(2):
            for step, batch in enumerate(loader):
                print(batch.tolist(), end=" ")
                if habit == "waitpid":
                    reap()
                if kills == "kills" and (epoch, step) == (0, 1):
                    pid = loader._builder.last.pool.pids[0]
                    pidfd = os.pidfd_open(pid)
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    os.close(pidfd)
    if habit == "closes":
        assert [os.path.samestat(os.fstat(fd), os.stat(os.devnull)) for fd in kept] == [True] * 64
    if kills == "kills":
        loader.close()
        print("killed", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
