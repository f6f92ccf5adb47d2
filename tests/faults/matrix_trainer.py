"""The trainer of one cell of the fault matrix: reads three epochs while a fault hits it or a worker, and reports every event.

It runs in a child that the driver forked, and writes one line of JSON per event.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
from pathlib import Path
from time import time
from typing import Any

import psutil
import torch

from shmload import ShmLoader, WorkerDied
from shmload._core.trainer import harm_at_release
from shmload.shm.names import SHM_DIR, process_stem
from shmload.worker.template import template_for
from tests.faults.faults_kit import FaultFolder, digest
from tests.faults.matrix_cells import HARMS, Cell
from tests.faults.matrix_data import BATCH, NUM_BATCHES_READ, NUM_WORKERS, Growing, Rows, as_list

ARMED_AT = {  # (epoch, step) before which the fault is armed; step -1 is before the iterator is made. All others: in the stream
    "start": (0, -1),
    "before_layout": (0, -1),
    "while_asking_layout": (0, -1),
    "waiting_layout": (0, -1),
    "starting": (0, -1),
    "making_memory": (0, -1),
    "epoch_change": (1, -1),
    "abandoning": (2, -1),
}
IN_THE_STREAM = (0, 2)
LAST = (0, NUM_BATCHES_READ[0])
ON_CLOSE = ("closing", "leaving")
GROWING = ("opening_memory", "waiting_grant")  # points that are reached only when slots grow
MAX_ERRORS = 5


def loader_of(point: str, mode: str, num_workers: int, method: str | None) -> ShmLoader[Any]:
    """Returns the loader of a cell, or without workers one that no fault can hit."""
    is_seed, is_growing = mode == "seed", point in GROWING
    return ShmLoader(
        (Growing if is_growing else Rows)(draws=is_seed),
        batch_size=BATCH,
        shuffle=not is_growing,
        seed=5 if is_seed else None,
        generator=None if is_seed else torch.Generator(),
        collate_fn=as_list if is_growing else None,
        num_workers=num_workers,
        multiprocessing_context=method,
        prefetch_factor=2 if num_workers else None,
    )


def begin(loader: ShmLoader[Any], epoch: int) -> Any:
    """Returns an iterator. In torch mode the epoch seeds it, so that it can be made again."""
    if loader.generator is not None:
        loader.generator.manual_seed(100 + epoch)
    return iter(loader)


def expected(point: str, mode: str) -> list[list[str]]:
    """Returns the undisturbed stream, epoch by epoch."""
    with loader_of(point, mode, 0, None) as quiet:
        return [[digest(batch) for batch in begin(quiet, epoch)] for epoch in range(len(NUM_BATCHES_READ))]


class Trainer:
    """Runs one cell.

    Args:
        report: file descriptor for the events.
        is_quiet: run without a fault.
    """

    def __init__(self, cell: Cell, folder: Path, report: int, *, is_quiet: bool) -> None:
        self.cell, self.report, self.is_quiet = cell, report, is_quiet
        self._fault_folder = FaultFolder(folder)
        self._place = LAST if cell.point in ON_CLOSE and cell.mode == "torch" else ARMED_AT.get(cell.point, IN_THE_STREAM)
        self._is_armed = is_quiet
        self._num_errors = 0

    def say(self, kind: str, **what: Any) -> None:
        """Writes a line."""
        os.write(self.report, json.dumps({"kind": kind, "at": time(), **what}).encode() + b"\n")

    def run(self) -> None:
        """Runs the cell, from making the loader to comparing the footprints."""
        if self.cell.method != "fork":
            template_for(self.cell.method)  # it lives as long as the process
        self.say("stem", stem=process_stem())
        logging.getLogger("shmload").addHandler(_DeathLogHandler(self))
        before = footprint()
        loader = loader_of(self.cell.point, self.cell.mode, NUM_WORKERS, self.cell.method)
        for epoch, num_batches in enumerate(NUM_BATCHES_READ):
            self._read(loader, epoch, num_batches)
        gc.collect()
        if loader.seed is not None:
            self.say("slots", **loader.stats()["slots"], pool=len(loader._builder.last.pool.pids))
        if self.cell.point in ON_CLOSE:
            self._arm()
        for _ in range(2):
            try:
                loader.close()
                break
            except Exception as error:
                self._error(error)
        del loader
        gc.collect()
        after = footprint()
        self.say("left", **{name: after[name] for name in after if after[name] != before[name]})

    def _read(self, loader: ShmLoader[Any], epoch: int, num_batches: int) -> None:
        self.say("epoch", epoch=epoch)
        stream = None
        step = -1
        while step < num_batches or num_batches == NUM_BATCHES_READ[0]:
            if (epoch, step) == self._place:
                self._arm()
            try:
                if stream is None:
                    stream = begin(loader, epoch)
                    step = max(step, 0)
                    continue
                batch = next(stream)
            except StopIteration:
                self.say("end")
                return
            except Exception as error:
                self._error(error)
                if self._num_errors > MAX_ERRORS or (isinstance(error, WorkerDied) and self.cell.mode == "torch"):
                    return
            else:
                self.say("batch", digest=digest(batch))
                step += 1
                del batch

    def _arm(self) -> None:
        if self._is_armed:
            return
        self._is_armed = True
        if self.cell.point == "releasing":
            harm_at_release(int(HARMS[self.cell.harm]))
            return
        self._fault_folder.arm(self.cell.point, HARMS[self.cell.harm])
        if self.cell.point == "replacing":
            self._fault_folder.arm("after_claim", HARMS["SIGKILL"])

    def _error(self, error: BaseException) -> None:
        self._num_errors += 1
        self.say("error", type=type(error).__name__, text=str(error), cause=str(error.__cause__))


class _DeathLogHandler(logging.Handler):
    """Reports when the loader logs a death."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    def emit(self, record: logging.LogRecord) -> None:
        """Reports a replaced worker."""
        if "it is replaced" in record.getMessage():
            self._trainer.say("noticed", text=record.getMessage())


def footprint() -> dict[str, Any]:
    """Returns everything that a loader must restore: descriptors, mappings, threads, children, names."""
    with open("/proc/self/maps") as file:
        maps = sorted({line.split()[-1] for line in file if "shmload-" in line})
    fds = sorted(filter(None, map(_target, os.listdir("/proc/self/fd"))))
    return {
        "fds": fds,
        "maps": maps,
        "threads": threading.active_count(),
        "children": [child.pid for child in psutil.Process().children(recursive=True)],
        "names": [name for name in os.listdir(SHM_DIR) if process_stem() in name],
    }


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""
