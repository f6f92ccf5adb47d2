"""Pickle a job once for all workers, and find the parts of it that only multiprocessing can pickle."""

from __future__ import annotations

import dataclasses
import io
import pickle
import types
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import context as spawning
from multiprocessing import reduction
from typing import Any

from shmload.introspect.abilities import parts_of
from shmload.shm import pickling
from shmload.worker.job import Job

# reducers that multiprocessing registers for objects that plain pickle handles, too
_PLAIN = {getattr(reduction, name) for name in ("_reduce_method", "_reduce_method_descriptor", "_reduce_partial")}


class _ModuleRecorder(pickling.LocalPickler):
    """A pickler for all workers, which records the modules of the pickled objects.

    Attributes:
        needs_process: whether a part of it must be pickled by multiprocessing while a process starts: shared memory, a socket, or
            an object with a reducer of the user's that was registered with `multiprocessing.reduction.ForkingPickler`.
    """

    def __init__(self, file: io.BytesIO, modules: set[str]) -> None:
        super().__init__(file)
        self._modules = modules
        self._reducers = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # private
        self.needs_process = False

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, (type, types.FunctionType)) else type(value)
        self._modules.add(kind.__module__)
        reducer = self._reducers.get(type(value))
        if reducer is not None and reducer not in _PLAIN:
            is_torchs = reducer.__module__ == "torch.multiprocessing.reductions"
            self.needs_process |= not is_torchs or _is_shared(value)
        return NotImplemented


def _is_shared(value: Any) -> bool:
    """Return whether a tensor or storage is in shared memory, which workers are to share."""
    try:
        return bool(getattr(value, "_untyped_storage", value).is_shared())  # a TypedStorage warns if it is asked itself
    except (AttributeError, NotImplementedError, RuntimeError):  # a sparse tensor
        return False


class _TrialProcess:
    """A stand-in for the process that is being started, to find out whether multiprocessing can pickle an object."""

    DupFd = staticmethod(int)

    def duplicate_for_child(self, fd: int) -> int:
        return fd


def _pickling_error(value: Any) -> Exception | None:
    """Return why multiprocessing cannot send an object to a process that it starts; None if it can."""
    spawning.set_spawning_popen(_TrialProcess())  # type: ignore[arg-type]  # it has the methods that reducers call
    try:
        reduction.ForkingPickler.dumps(value)
    except Exception as error:
        return error
    finally:
        spawning.set_spawning_popen(None)
    return None


def pickled_once(job: Job, modules: set[str]) -> bytes | None:
    """Return the job as bytes for all workers; None if it must be pickled by multiprocessing for each process separately.

    Args:
        job: the job.
        modules: the modules that a worker imports to unpickle the job are added to this set.
    Raises:
        TypeError: the job cannot be pickled; the message names the attributes.
    """
    pickled = io.BytesIO()
    pickler = _ModuleRecorder(pickled, modules)
    try:
        pickler.dump(job)
        return None if pickler.needs_process else pickled.getvalue()
    except Exception:
        error = _pickling_error(job)
        if error is None:
            return None
        # (attribute path, object) that neither pickle nor multiprocessing can pickle, deepest first: ("dataset.fn", <lambda>)
        culprits = [found for part in dataclasses.fields(job) for found in _refused(getattr(job, part.name), part.name, set())]
        where = "; ".join(f"{path} ({type(value).__qualname__})" for path, value in culprits) or "the dataset"
        raise TypeError(
            "workers started by spawn or forkserver receive the dataset, collate_fn and worker_init_fn as pickles, and "
            f"{where} cannot be pickled: {type(error).__name__}: {error}. Create it at first use in the worker, "
            'define functions at module level, or use multiprocessing_context="fork"'
        ) from error


def _refused(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or len(seen) > 10_000:
        return
    seen.add(id(value))
    with suppress(Exception):
        pickle.dumps(value, protocol=5)
        return
    if _pickling_error(value) is None:
        return
    found = False
    for name, part in parts_of(value):
        for culprit in _refused(part, path + name, seen):
            found = True
            yield culprit
    if not found:
        yield path, value
