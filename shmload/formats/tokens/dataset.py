"""Windows of a flat array of tokens: at a stride, of single documents, or packed with several documents each.

What window i holds is fixed when the dataset is made, so a loader shuffles and resumes windows as it does any samples. Where windows
follow documents, a native pass makes the plan (src/tokens.pyx) and workers share it.
"""

from __future__ import annotations

import os
from typing import Any, Self

import numpy as np

from shmload._core.tokens import WindowReader, by_window, check_offsets, cut, document_offsets, pack
from shmload.batch.array_rows import place_of
from shmload.errors import ShardCorrupt
from shmload.formats.arrays.held import HeldArrays
from shmload.schedule.permutation import Permutation

_NONE = np.empty(0, np.int64)


class TokenDataset:
    """Windows of tokens, widened straight into the batch.

    Without documents, window i begins at token `i * stride` and a short tail is left out. With documents (`separator`, which
    belongs to the document it ends, or `document_index`) no window crosses from one to another and every token is in a window;
    what a window has left is filled with `pad`. With `pack` documents share windows by best fit: each token is there exactly once,
    `segment_ids` number the documents of a window from 1 (0 is padding), `position_ids` begin at 0 in each. A document longer
    than a window is cut into windows first, and positions begin again in each part.

    Args:
        tokens: a `.npy` path, the path of a raw little-endian file with its `dtype`, a memmap or an array of integers, one axis.
        stride: tokens from one window to the next; the window's length by default. With documents at most that.
        out_dtype: "int64" or "int32" of the batch.
        document_index: offsets of tokens where documents begin, and behind them the last one's end: an array or a `.npy` path.
        seed: with `pack`, which documents meet: None takes them as they lie.
        block: with `pack`, documents that are packed together.
    Raises:
        ShardCorrupt: a file is not what its head or its size says.
    Cost: one pass over the tokens for separators; planning is linear in the documents.
    Source: H. Ding et al., Fewer truncations improve language modeling, ICML 2024 (packing).
    """

    def __init__(
        self,
        tokens: Any,
        window: int = 1025,
        *,
        stride: int | None = None,
        dtype: Any = None,
        out_dtype: str = "int64",
        separator: int | None = None,
        document_index: Any = None,
        pack: bool = False,
        pad: int = 0,
        seed: int | None = None,
        block: int = 1 << 16,
    ) -> None:
        stride = window if stride is None else stride
        if window < 1 or stride < 1 or block < 1:
            raise ValueError(f"window, stride and block are at least 1; got {window}, {stride} and {block}")
        if out_dtype not in ("int64", "int32"):
            raise ValueError(f"out_dtype is 'int64' or 'int32'; got {out_dtype!r}")
        if separator is not None and document_index is not None:
            raise ValueError("documents are told by a separator or by a document_index; both were given")
        has_documents = separator is not None or document_index is not None
        if pack and (not has_documents or stride != window):
            raise ValueError(
                "pack=True puts whole documents into windows: give separator= or document_index=, and no stride"
            )
        if has_documents and stride > window:
            raise ValueError(f"windows of {window} tokens cover documents at strides up to {window}; got {stride}")
        self.window, self.stride, self.pad, self.is_packed = window, stride, pad, pack
        self.out_dtype, self._has_plan = out_dtype, has_documents
        self._held = HeldArrays({"tokens": _opened(tokens, dtype)})
        flat = self._held.arrays["tokens"].array
        _check_tokens(flat, out_dtype)
        if has_documents:
            offsets = (
                document_offsets(flat, separator) if separator is not None else _offsets(document_index, len(flat))
            )
            self._held.add(dict(zip(("ends", "starts", "lengths"), self._plan(offsets, seed, block), strict=True)))
        self._bind()

    def _plan(self, offsets: Any, seed: int | None, block: int) -> tuple[Any, Any, Any]:
        count = len(offsets) - 1
        order = np.arange(count)
        if seed is not None and count:
            order = np.asarray(Permutation(count, seed=seed).take(order), np.int64)
        starts, lengths = cut(offsets, order, self.window, self.stride)
        if not self.is_packed:
            return np.arange(1, len(starts) + 1), starts, lengths
        window_of, num_windows = pack(lengths, self.window, block)
        return by_window(window_of, num_windows, starts, lengths)

    def _bind(self) -> None:
        arrays = {name: a.array for name, a in self._held.arrays.items()}
        flat = arrays["tokens"]
        if self._has_plan:
            num_windows, stride = len(arrays["ends"]), 0
        else:
            num_windows, stride = max((len(flat) - self.window) // self.stride + 1, 0), self.stride
        plan = [arrays.get(name, _NONE) for name in ("ends", "starts")]
        lengths = arrays.get("lengths", np.empty(0, np.int32))
        address, is_long = flat.__array_interface__["data"][0], self.out_dtype == "int64"
        kind = flat.dtype.kind + str(flat.dtype.itemsize)
        self._reader = WindowReader(
            address, len(flat), kind, self.window, num_windows, stride, *plan, lengths, self.pad, is_long, flat
        )
        names = {"tokens": self.out_dtype} | (
            {"segment_ids": "int32", "position_ids": "int32"} if self.is_packed else {}
        )
        self.schema = {name: (dtype, (self.window,)) for name, dtype in names.items()}

    @property
    def density(self) -> float:
        """The share of the windows' places that hold tokens."""
        if not self._has_plan or not len(self):
            return 1.0
        return float(self._held.arrays["lengths"].array.sum(dtype=np.int64) / (len(self) * self.window))

    def __len__(self) -> int:
        return self._reader.num_windows

    def __getitem__(self, index: int) -> dict[str, Any]:
        out = {name: np.empty((1, *shape), dtype) for name, (dtype, shape) in self.schema.items()}
        self.read_batch_into([index], out)
        return {name: rows[0] for name, rows in out.items()}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        """Writes the windows of these numbers to rows."""
        address, nbytes = place_of("tokens", out["tokens"])
        extra = [0, 0]
        if self.is_packed:
            for i, name in enumerate(("segment_ids", "position_ids")):
                extra[i], given = place_of(name, out[name])
                if given != len(indices) * self.window * 4:
                    raise ValueError(
                        f"field {name!r}: {len(indices)} windows of {self.window} int32; got {given} bytes"
                    )
        self._reader.into(address, *extra, nbytes, np.ascontiguousarray(indices, np.int64))

    def __getstate__(self) -> dict[str, Any]:
        self._held.share()
        self._bind()
        return {name: value for name, value in vars(self).items() if name != "_reader"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bind()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} windows of {self.window} tokens, density {self.density:.4f}>"


def _opened(tokens: Any, dtype: Any) -> Any:
    if not isinstance(tokens, (str, os.PathLike)) or os.fspath(tokens).endswith(".npy"):
        return tokens
    if dtype is None:
        raise ValueError(f"{tokens}: a raw file does not say what its tokens are: give dtype='uint16' or the like")
    nbytes, kind = os.path.getsize(tokens), np.dtype(dtype).newbyteorder("<")
    if nbytes % kind.itemsize or not nbytes:
        raise ShardCorrupt(
            f"{tokens}, offset {nbytes}: {nbytes} bytes are no whole number of {kind} tokens, at least one"
        )
    return np.memmap(tokens, kind, "r")


def _check_tokens(flat: Any, out_dtype: str) -> None:
    is_known = flat.dtype.kind in "iu" and flat.dtype.isnative and flat.dtype != np.uint64
    if flat.ndim != 1 or not is_known or not flat.flags.c_contiguous or not flat.flags.aligned:
        raise TypeError(
            f"tokens are one aligned run of int8 to int64 or uint8 to uint32 in this machine's byte order; got {flat.dtype.str}, "
            f"shape {flat.shape}, strides {flat.strides}"
        )
    if not np.can_cast(flat.dtype, out_dtype):
        raise TypeError(f"tokens of {flat.dtype} do not all fit {out_dtype}: leave out_dtype at 'int64'")


def _offsets(index: Any, num_tokens: int) -> Any:
    is_file = isinstance(index, (str, os.PathLike))
    found = (
        HeldArrays({"document_index": np.asarray(index) if isinstance(index, list) else index})
        .arrays["document_index"]
        .array
    )
    refusal = ShardCorrupt if is_file else ValueError
    source = f"{index}: " if is_file else ""
    if found.ndim != 1 or found.dtype.kind not in "iu" or len(found) < 1:
        raise refusal(f"{source}a document_index is one axis of integers, at least 1; got {found.dtype} {found.shape}")
    offsets = np.ascontiguousarray(found, np.int64)
    bad = check_offsets(offsets, num_tokens)
    if bad >= 0:
        raise refusal(
            f"{source}document offset {bad} is {offsets[bad]}: offsets ascend from 0 to the {num_tokens} tokens"
        )
    return offsets
