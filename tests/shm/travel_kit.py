"""What goes through a parcel, as it does between a trainer and an actor."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.shm import pickling


def parcel_of(value: Any) -> pickling.Parcel:
    def dump(value: Any, take: Any) -> bytes:
        pickled = io.BytesIO()
        pickler = pickle.Pickler(pickled, protocol=5, buffer_callback=take)
        pickler.dispatch_table = pickling.reducers()
        pickler.dump(value)
        return pickled.getvalue()

    return pickling.Parcel(value, dump)


def sent(value: Any) -> NDArray[np.uint8]:
    """A parcel as it arrives elsewhere: what it was made of may be gone, and what it lies in is read-only."""
    return arrived(parcel_of(value))


def arrived(parcel: pickling.Parcel) -> NDArray[np.uint8]:
    """What is sent of a parcel."""
    fd = os.memfd_create("shmload-test")
    try:
        os.ftruncate(fd, parcel.nbytes)
        parcel.write(fd)
        return np.frombuffer(os.pread(fd, parcel.nbytes, 0), np.uint8)
    finally:
        os.close(fd)
