"""Megatron-LM's index of a .bin file of tokens: a .idx file beside it says their type and where documents begin.

Little-endian, without padding: `MMIDIDX\\0\\0`, u64 version 1, u8 type of the tokens, u64 number of sequences, u64 number of
document boundaries; then i32 tokens of each sequence, i64 its byte offset in the .bin, i64 sequences before each boundary (from 0
to all), and in multimodal sets i8 a sequence.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import os
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt

MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class MegatronIndex(NamedTuple):
    """What a .idx file says: the tokens' type, and the offsets in tokens where documents begin, the last one's end behind them."""

    dtype: str
    offsets: NDArray[np.int64]


def read_index(path: str | os.PathLike[str]) -> MegatronIndex:
    """Reads a .idx file.

    Raises:
        ShardCorrupt: it is none, its size is not what its head says, or its sequences do not lie end to end.
    """
    path = os.fspath(path)
    with open(path, "rb") as file:
        nbytes, head = os.fstat(file.fileno()).st_size, file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise ShardCorrupt(f"{path}, offset 0: the head is not a Megatron index's")
        _, version, code, num_sequences, num_boundaries = _HEAD.unpack(head)
        if version != 1 or code not in _DTYPES:
            raise ShardCorrupt(
                f"{path}, offset 9: version {version} with tokens of type {code}; needs version 1 and one of {_DTYPES}"
            )
        needed = _HEAD.size + 12 * num_sequences + 8 * num_boundaries
        if nbytes not in (needed, needed + num_sequences):
            raise ShardCorrupt(
                f"{path}, offset 18: {num_sequences} sequences and {num_boundaries} boundaries need {needed} bytes, or "
                f"{needed + num_sequences} with modes; there are {nbytes}"
            )
        lengths, pointers, boundaries = (
            _column(file, dtype, count)
            for dtype, count in (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_boundaries))
        )
    # starts: the tokens before each sequence and, last, all of them
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    wrong = np.flatnonzero((lengths < 0) | (pointers != starts[:-1] * np.dtype(_DTYPES[code]).itemsize))
    if len(wrong):
        at = _HEAD.size + 4 * num_sequences + 8 * wrong[0]
        raise ShardCorrupt(
            f"{path}, offset {at}: sequence {wrong[0]} of {lengths[wrong[0]]} tokens begins at byte {pointers[wrong[0]]}; "
            "sequences lie end to end"
        )
    is_sound = num_boundaries and boundaries[0] == 0 and boundaries[-1] == num_sequences
    if not is_sound or (np.diff(boundaries) < 0).any():
        raise ShardCorrupt(
            f"{path}, offset {_HEAD.size + 12 * num_sequences}: document boundaries do not ascend from 0 to the "
            f"{num_sequences} sequences"
        )
    return MegatronIndex(_DTYPES[code], starts[boundaries])


def _column(file: Any, dtype: str, count: int) -> NDArray[Any]:
    return np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype)
