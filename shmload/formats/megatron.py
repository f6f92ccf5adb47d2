"""The format of Megatron-LM's tokens: a `.bin` file of tokens and the `.idx` file next to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shmload.errors import ShardCorrupt
from shmload.formats import tokens
from shmload.formats.column_format import ColumnFormat
from shmload.formats.head import Head
from shmload.formats.summary import Sizes, Summary


class MegatronTokens(ColumnFormat):
    """A pair of token files, for `shmload inspect`, which shows documents as samples. `TokenDataset` reads windows of them."""

    name: ClassVar[str] = "tokens"
    title: ClassVar[str] = "tokens"

    def open(self, path: Path, names: Sequence[str] | None = None) -> Any:
        raise NotImplementedError("a TokenDataset needs the length of its windows")

    def recognize(self, head: Head) -> bool:
        if head.is_folder or head.compression:
            return False
        if head.begin.startswith(tokens.MAGIC):
            return True
        beside = head.path.with_suffix(".idx")
        if not head.is_local or head.path.suffix != ".bin" or not beside.is_file():
            return False
        with open(beside, "rb") as file:
            return file.read(len(tokens.MAGIC)) == tokens.MAGIC

    def describe(self, head: Head, num_samples: int) -> Summary:
        idx, bin = head.path.with_suffix(".idx"), head.path.with_suffix(".bin")
        if head.begin.startswith(tokens.MAGIC):
            idx = head.path  # its name may have any ending
        name, offsets = tokens.read_index(idx)
        dtype, nbytes, num = np.dtype(name), os.path.getsize(bin), int(offsets[-1])
        if num * dtype.itemsize != nbytes:
            raise ShardCorrupt(f"{idx}: its {num:,} tokens of {dtype} do not make the {nbytes:,} bytes of {bin}")
        count = len(offsets) - 1
        every = np.memmap(bin, dtype, "r") if nbytes else np.empty(0, dtype)
        return Summary(
            str(head.path),
            "tokens, Megatron",
            nbytes + os.path.getsize(idx),
            count,
            {"tokens": f"{dtype} (any,)"},
            Sizes.of(np.diff(offsets) * dtype.itemsize),
            [{"tokens": np.array(every[offsets[i] : offsets[i + 1]])} for i in range(min(num_samples, count))],
            [f"{num:,} tokens in {count:,} documents, which are the samples here"],
        )
