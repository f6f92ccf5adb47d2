"""Start a rank in a new interpreter, with a function and arguments that multiprocessing pickles.

The start method "spawn" of multiprocessing only pickles the process, so arguments can be objects that it shares (queues, locks,
tensors). The process is started here, because it must begin with boot.py, and its output must be captured from the first line.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from multiprocessing import popen_spawn_posix, reduction, resource_tracker
from multiprocessing import spawn as spawning_tools
from multiprocessing.context import SpawnProcess, set_spawning_popen
from typing import Any

from shmload.launch import in_rank
from shmload.launch.rank_specs import Ends, RankSpec, booted
from shmload.processes.child import Child


class _Pickled(popen_spawn_posix.Popen):
    """A process that multiprocessing has pickled for a start by spawn; `start_spawned` starts it."""

    _fds: list[int]  # copies of the descriptors that pickled arguments refer to

    def duplicate_for_child(self, fd: int) -> int:
        # the pickled object may be temporary, such as the state of a torch generator, whose descriptor is closed with it
        return int(super().duplicate_for_child(os.dup(fd)))

    def _launch(self, process_obj: Any) -> None:
        self.job = io.BytesIO()
        # raises RuntimeError if the program starts ranks while it is being imported
        preparation = spawning_tools.get_preparation_data(process_obj.name)
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, self.job)
            reduction.dump(process_obj, self.job)
        except Exception as error:
            raise TypeError(
                f"ranks started by spawn need a function and arguments that can be pickled: {type(error).__name__}: {error}. "
                "Define the function at module level, create in it what cannot be pickled, or use start_method='fork'"
            ) from error
        finally:
            set_spawning_popen(None)


def start_spawned(fn: Callable[..., object], args: tuple[Any, ...], rank_spec: RankSpec, ends: Ends) -> Child:
    """Start a rank that calls `fn(local_rank, *args)`, in a new interpreter.

    Args:
        fn: the rank's function.
        args: its arguments after the local rank.
        rank_spec: the settings of the rank.
        ends: descriptors for its output.
    Raises:
        TypeError: `fn` or `args` cannot be pickled.
    """
    target = (fn, args, rank_spec.local_rank, ends.report)
    pickled = _Pickled(SpawnProcess(target=in_rank.main, args=target, name=f"shmload rank {rank_spec.rank}", daemon=False))
    tracker_fd: Any = resource_tracker.getfd()
    job_end, own_end = os.pipe()
    command = spawning_tools.get_command_line(tracker_fd=tracker_fd, pipe_handle=job_end)
    try:
        process = booted(command, rank_spec, ends, [*pickled._fds, tracker_fd, job_end, ends.report])
    except BaseException:
        os.close(own_end)
        raise
    finally:
        for fd in (job_end, *pickled._fds):
            os.close(fd)
    try:
        with open(own_end, "wb", closefd=False) as file:
            file.write(pickled.job.getbuffer())
    except BrokenPipeError:  # the rank has died already, which the watch reports
        pass

    def reap() -> int:
        code = process.wait()
        os.close(own_end)  # open until now, because multiprocessing in the rank takes its end for the parent's death
        return code

    return Child(process.pid, reap)
