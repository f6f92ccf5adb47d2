"""Run one sampler in the process that the supervisor has forked for it."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from shmload._core.watch import die_with
from shmload.growing.cache_writer import CacheWriter
from shmload.growing.timely_publisher import TimelyPublisher

Sampler = Callable[[int, int], Iterable[Any]]
MakeWriter = Callable[[str], CacheWriter]
TEXT_NBYTES = 65536  # size of a sampler's report; a traceback may take half of it


class AskedToEnd(BaseException):
    """Raised in a supervisor or sampler that is asked to end."""


is_asked_to_end = False  # set in addition to raising `AskedToEnd`, because an exception raised while a finalizer runs is lost
_writing: CacheWriter | None = None  # in a sampler, while it writes a record


def stop(number: int, frame: Any) -> None:
    """Handle SIGTERM in a supervisor or sampler."""
    global is_asked_to_end
    is_asked_to_end = True
    if _writing is None or _writing.is_waiting:  # an exception within `write` could leave a record written but not counted
        raise AskedToEnd


def run_sampler(supervisor: int, sampler: Sampler, worker_id: int, num_workers: int, text: int, make_writer: MakeWriter) -> None:
    """Run one sampler in this process, which was forked for it, and end the process.

    Args:
        supervisor: the id of the parent process.
        sampler: the sampler.
        worker_id: its number.
        num_workers: number of samplers.
        text: descriptor of the report: its first byte is set to "1" once a file is published; the traceback of a failure follows.
        make_writer: opens the cache under a role.
    """
    global _writing
    code = 1
    try:
        die_with(supervisor)
        _draw_other_numbers()
        writer = make_writer(f"sampler {worker_id} of {num_workers}")
        in_time = TimelyPublisher(writer)
        try:
            for record in sampler(worker_id, num_workers):
                with in_time.turn:
                    _writing = writer
                    writer.write(record)
                    _writing = None
                in_time.written()
                if writer.num_files:
                    os.pwrite(text, b"1", 0)
                if is_asked_to_end:
                    break
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with in_time.turn:
                writer.close()  # publishes the samples so far
        code = 0
    except AskedToEnd:
        code = 0
    except BaseException:
        os.pwrite(text, b"sampler %d: " % worker_id + traceback.format_exc().encode()[-TEXT_NBYTES // 2 :], 1)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also if a log cannot be written: an exception would run the supervisor's code here, which ends all samplers
            os._exit(code)


def _draw_other_numbers() -> None:
    """Reseed this process's random generators, because a fork copies the parent's."""
    import random

    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
