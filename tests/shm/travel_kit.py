"""Sends values as parcels, as a trainer and an actor do."""

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


def received(value: Any) -> NDArray[np.uint8]:
    """Returns a parcel as received elsewhere: the original may be gone, and the memory is read-only."""
    return arrived(parcel_of(value))


def arrived(parcel: pickling.Parcel) -> NDArray[np.uint8]:
    """Returns the bytes that are sent of a parcel."""
    fd = os.memfd_create("shmload-test")
    try:
        os.ftruncate(fd, parcel.nbytes)
        parcel.write(fd)
        return np.frombuffer(os.pread(fd, parcel.nbytes, 0), np.uint8)
    finally:
        os.close(fd)
