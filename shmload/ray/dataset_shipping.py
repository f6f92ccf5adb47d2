"""Pickle a job (the dataset, collate_fn and worker_init_fn) for actors on other machines."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

from shmload.shm import pickling
from shmload.worker.job import Job


def pickle_job_by_value(job: Job) -> pickling.Parcel:
    """Return the pickled job for actors, with the functions and classes of the trainer's own program, which actors cannot import.

    Raises:
        TypeError: the job cannot be pickled; the message names the cause.
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # Ray has no types for it
        dispatch_table = cloudpickle.CloudPickler.dispatch_table.new_child(pickling.reducers())

    def dump(value: Any, take: Callable[[pickle.PickleBuffer], bool]) -> memoryview:
        pickled = io.BytesIO()
        Pickler(pickled, protocol=5, buffer_callback=take).dump(value)
        return pickled.getbuffer()

    # in a process that the program has spawned, such as a rank, its classes belong to __mp_main__, which cloudpickle does not know
    if (program := sys.modules.get("__mp_main__")) is not None and program.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(program)
    try:
        return pickling.Parcel(job, dump)
    except Exception as error:
        raise TypeError(
            'backend="ray" sends the dataset, collate_fn and worker_init_fn to other machines, and they cannot be pickled: '
            f"{type(error).__name__}: {error}. Open files, locks and connections at first use in the worker"
        ) from error
