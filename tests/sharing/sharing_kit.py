"""Runs ranks as forked processes of the test, and hashes what they read."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import secrets
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import shmload
from shmload import ShmLoader, WorkerDied
from shmload._core.filler import WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.trainer import Order, TrainerRing, control_nbytes

DEADLINE_S = 90.0
NUM_SAMPLES, BATCH = 24, 4
_fork = multiprocessing.get_context("fork")


class Logged:
    """Samples with noise from `sample_rng`; each read appends a line (epoch, index) to a file. Sample `bad` raises, or kills its
    process.
    """

    def __init__(self, log: Path, bad: int = -1, *, kills: bool = False) -> None:
        self._log, self._bad, self._kills = str(log), bad, kills

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{shmload.sample_info().epoch} {index}\n".encode())
        os.close(log)
        if index == self._bad and self._kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self._bad:
            raise KeyError(f"no sample {index}")
        return {"x": np.full((32, 32), index, np.int64), "noise": np.random.rand(3)}


def loader_of(log: Path, *, share: str | None = "node", **others: Any) -> ShmLoader[Any]:
    """Returns a loader with the same arguments on all ranks."""
    arguments = {"num_workers": 1, "multiprocessing_context": "fork", "shuffle": True, "seed": 3, **others}
    dataset = Logged(log, arguments.pop("bad", -1), kills=arguments.pop("kills", False))
    return ShmLoader(dataset, arguments.pop("batch_size", BATCH), rank=0, world_size=1, share=share, **arguments)


def digest(batch: dict[str, Any]) -> str:
    """Returns the hash of a batch's bytes."""
    return hashlib.sha256(batch["x"].numpy().tobytes() + np.stack(list(batch["noise"])).tobytes()).hexdigest()


def digests_or_deaths(batches: Iterator[Any], num_steps: int, digest: Callable[[Any], str]) -> list[str]:
    """Returns for each step the batch's digest, or the message about workers that died."""
    found = []
    for _ in range(num_steps):
        try:
            found.append(digest(next(batches)))
        except WorkerDied as error:
            found.append(str(error))
    return found


def digests(batches: Iterable[Any]) -> list[str]:
    """Returns the digest of each batch; no batch is kept."""
    return [digest(batch) for batch in batches]


class Outcome:
    """The outcome of a rank: the result of its function, or its error."""

    def __init__(self, given: Any, error: str, text: str, exitcode: int | None) -> None:
        self.given, self.error, self.text, self.exitcode = given, error, text, exitcode


def run_ranks(function: Callable[..., Any], num_ranks: int = 2, *args: Any, num_told: int | None = None) -> list[Outcome]:
    """Runs function(rank, *args) in `num_ranks` ranks of one node.


    Args:
        function: runs in each rank.
        num_ranks: the number of processes.
        args: further arguments of `function`.
        num_told: the number of ranks in their environment, if it differs.
    """
    run_id = secrets.token_hex(8)
    ends = [_fork.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        _fork.Process(target=_main, args=(function, rank, num_told or num_ranks, run_id, ends[rank][1], args))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for _, sender in ends:
        sender.close()
    outcomes = []
    for process, (receiver, _) in zip(processes, ends, strict=True):
        assert receiver.poll(DEADLINE_S), "a rank did not end in time"
        try:
            told = receiver.recv()
        except EOFError:  # the rank was killed
            told = (None, "", "")
        process.join(DEADLINE_S)
        outcomes.append(Outcome(*told, process.exitcode))
        receiver.close()
        process.close()
    return outcomes


def _main(function: Callable[..., Any], rank: int, num_ranks: int, run_id: str, sender: Any, args: tuple[Any, ...]) -> None:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks), TORCHELASTIC_RUN_ID=run_id)
    try:
        sender.send((function(rank, *args), "", ""))
    except Exception as error:
        sender.send((None, type(error).__name__, str(error)))
        traceback.clear_frames(error.__traceback__)


class RingWithHelper:
    """A ring of four slots with one worker and room for one helper, all in this process."""

    def __init__(self) -> None:
        sizes = {"order_capacity": 64, "text_capacity": 64, "layout_capacity": 64}
        nbytes = control_nbytes(4, 2, **sizes)
        fd = os.memfd_create("crowd")
        os.ftruncate(fd, nbytes)
        self.control = Mapping(fd, nbytes)
        os.close(fd)
        self.trainer = TrainerRing(self.control, num_slots=4, num_workers=2, **sizes)
        self.trainer.num_wanted = 1
        self.worker, self.helper = self.worker_ring(0), self.worker_ring(1)

    def worker_ring(self, record: int) -> WorkerRing:
        """Returns the worker's end of the ring for a record."""
        return WorkerRing(self.control, record)

    def order(self, step: int) -> None:
        """Publishes a batch of one chunk."""
        assert self.trainer.post(Order(0, step, np.array([step], np.int64)), is_packed=True)
