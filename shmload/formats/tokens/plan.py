"""Where documents lie among tokens, and which pieces of them each window holds.

A plan is three arrays: where each window's pieces end among all pieces, and where each piece begins in the tokens and how long
it is.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.tokens import by_window, check_offsets, cross, cut, pack
from shmload.errors import ShardCorrupt
from shmload.formats.arrays.held import HeldArrays
from shmload.schedule.permutation import Permutation

Plan = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]


class Windows(Enum):
    """What a window may hold."""

    FLAT = "tokens as they lie"
    DOCUMENT = "one document"
    CROSSED = "tokens as they lie, and which document each is of"
    PACKED = "whole documents"


def planned(
    windows: Windows, offsets: NDArray[np.int64], window: int, stride: int, seed: int | None, block: int
) -> Plan:
    """The plan of windows that follow documents."""
    if windows is Windows.CROSSED:
        return cross(offsets, window, stride)
    count = len(offsets) - 1
    order = np.arange(count)
    if seed is not None and count:
        order = np.asarray(Permutation(count, seed=seed).take(order), np.int64)
    starts, lengths = cut(offsets, order, window, stride)
    if windows is Windows.DOCUMENT:
        return np.arange(1, len(starts) + 1), starts, lengths
    window_of, num_windows = pack(lengths, window, block)
    return by_window(window_of, num_windows, starts, lengths)


def checked_offsets(index: Any, num_tokens: int, source: str = "") -> NDArray[np.int64]:
    """The offsets of an index that was given, as an array or the path of a .npy file.

    Args:
        source: of an array that was read of a file, that file's path.
    Raises:
        ShardCorrupt: a file's offsets do not lie in order among the tokens; ValueError: an array's do not.
    """
    if isinstance(index, (str, os.PathLike)):
        source = os.fspath(index)
    given = np.asarray(index) if isinstance(index, list) else index
    found = HeldArrays({"document_index": given}).arrays["document_index"].array
    refusal, place = (ShardCorrupt, f"{source}, ") if source else (ValueError, "")
    if found.ndim != 1 or found.dtype.kind not in "iu" or len(found) < 1:
        raise refusal(
            f"{place}a document_index is one axis of integers, at least 1; got {found.dtype} of shape {found.shape}"
        )
    offsets = np.ascontiguousarray(found, np.int64)
    bad = check_offsets(offsets, num_tokens)
    if bad >= 0:
        raise refusal(
            f"{place}document offset {bad} is {offsets[bad]}: offsets ascend from 0 to the {num_tokens} tokens"
        )
    return offsets
