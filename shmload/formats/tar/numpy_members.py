"""Decode .npy and .npz members without allocating more memory than their contents need."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.formats.npy_header import npy_head_of
from shmload.formats.tar.member_compression import EXPANDED_LIMIT


def decode_npy(data: bytes) -> NDArray[Any]:
    """Decode a .npy payload into a new array.

    Raises:
        ValueError: it is invalid, contains objects, or its size does not match its header.
    """
    shape, is_fortran, dtype, begin = npy_head_of(data)
    if dtype.hasobject:
        raise ValueError("an .npy of objects is a pickle; store numbers, or give allow_pickle=True and the extension pkl")
    rest = len(data) - begin
    if math.prod(shape) * dtype.itemsize != rest:
        raise ValueError(f"its header says {dtype} of shape {shape}, and {rest} bytes follow")
    array = np.frombuffer(data, dtype, offset=begin) if rest else np.empty(0, dtype)
    return array.reshape(shape[::-1]).T.copy("K") if is_fortran else array.reshape(shape).copy()


def decode_npz(data: bytes) -> dict[str, NDArray[Any] | bytes]:
    """Decode the arrays of a .npz payload by name; members that are not .npy stay bytes, as in numpy.

    numpy's own reader would allocate whatever a header claims, and decompress without a limit.

    Raises:
        ValueError: it is damaged, would expand to more than 2 GiB, or contains something that `decode_npy` rejects.
    """
    found: dict[str, NDArray[Any] | bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            nbytes = sum(info.file_size for info in archive.infolist())
            if nbytes > EXPANDED_LIMIT:
                raise ValueError(
                    f"npz: expands to {nbytes} bytes, more than {EXPANDED_LIMIT}; store it as .npy, or give a decoder of your own"
                )
            for info in archive.infolist():
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"npz: {info.filename!r} is compressed by method {info.compress_type}; numpy writes 0 and 8")
                with archive.open(info) as member:
                    payload = member.read(info.file_size)  # the limit stops zipfile from inflating more
                is_array = payload.startswith(np.lib.format.MAGIC_PREFIX)
                found[info.filename.removesuffix(".npy")] = decode_npy(payload) if is_array else payload
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"npz: {error}") from error
    return found
