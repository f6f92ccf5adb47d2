"""Parse the header of .npy files."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np


def npy_head(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a .npy file. Return (shape, whether it is in Fortran order, dtype).

    Raises:
        ValueError, and any error of numpy's parser for a malicious header: it is not valid.
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its version {version} is not 1.0, 2.0 or 3.0")
    return (np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0)(file)


def npy_head_of(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Parse the header in the bytes of a .npy file. Return (shape, whether it is in Fortran order, dtype, size of the header).

    Results are cached, because the samples of a dataset often have the same header.

    Raises:
        The same as npy_head.
    """
    at = 10 if data[6:7] == b"\1" else 12
    return _parsed_head(bytes(data[: at + int.from_bytes(data[8:at], "little")]))


@lru_cache(maxsize=256)
def _parsed_head(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    file = io.BytesIO(head)
    return *npy_head(file), file.tell()
