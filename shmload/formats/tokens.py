r"""TokenDataset: windows of a flat array of tokens: at a stride, within documents, or packed with several documents each.

The contents of window i are fixed when the dataset is created, so a loader shuffles and resumes windows like any other samples. If
windows depend on documents, native code computes a plan (src/tokens.pyx), which workers share. A plan lists pieces of documents,
window by window, in three arrays: `ends`, the number of pieces up to the end of each window; `starts`, the first token of each
piece; and `lengths`, its number of tokens.

Documents can be read from Megatron-LM's index: a .idx file next to the .bin file of tokens contains the tokens' type and the
beginnings of documents. It is little-endian without padding: `MMIDIDX\0\0`, u64 version 1, u8 type of the tokens, u64 number of
sequences, u64 number of document boundaries; then i32 tokens of each sequence, i64 its byte offset in the .bin, i64 number of
sequences before each boundary (from 0 to all), and for multimodal data i8 per sequence.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from glob import has_magic
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.tokens import WindowReader, by_window, check_offsets, cross, cut, document_offsets
from shmload._core.tokens import pack as _pack
from shmload.batch.array_rows import place_of
from shmload.errors import ShardCorrupt
from shmload.formats.arrays import ArrayPlace, HeldArrays, HeldDataset
from shmload.formats.paths import check_file, check_local, expanded
from shmload.schedule.permutation import Permutation

MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_LLMC_NBYTES, _LLMC = 1024, struct.Struct("<iii")  # the header of llm.c: magic, version, number of tokens
_LLMC_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # magic -> (version, dtype): GPT-2's and Llama 3's tokens
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def read_index(path: str | os.PathLike[str]) -> tuple[str, NDArray[np.int64]]:
    """Read a .idx file. Return the tokens' type, and the first token of each document, followed by the end of the last one.

    Raises:
        ShardCorrupt: it is not a .idx file, its size does not match its header, or its sequences are not contiguous.
    """
    path = os.fspath(path)
    with open(path, "rb") as file:
        nbytes, head = os.fstat(file.fileno()).st_size, file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise ShardCorrupt(f"{path}, offset 0: this is not the header of a Megatron index")
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
        columns = (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_boundaries))
        lengths, pointers, boundaries = (np.frombuffer(file.read(int(kind[2]) * count), kind) for kind, count in columns)
    # starts: number of tokens before each sequence, and the total
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    wrong = np.flatnonzero((lengths < 0) | (pointers != starts[:-1] * np.dtype(_DTYPES[code]).itemsize))
    if len(wrong):
        at = _HEAD.size + 4 * num_sequences + 8 * wrong[0]
        raise ShardCorrupt(
            f"{path}, offset {at}: sequence {wrong[0]} of {lengths[wrong[0]]} tokens begins at byte {pointers[wrong[0]]}; "
            "sequences must be contiguous"
        )
    is_sound = num_boundaries and boundaries[0] == 0 and boundaries[-1] == num_sequences
    if not is_sound or (np.diff(boundaries) < 0).any():
        raise ShardCorrupt(
            f"{path}, offset {_HEAD.size + 12 * num_sequences}: document boundaries do not ascend from 0 to the "
            f"{num_sequences} sequences"
        )
    return _DTYPES[code], starts[boundaries]


def checked_offsets(index: Any, num_tokens: int, source: str = "") -> NDArray[np.int64]:
    """Check and return the offsets of a document index, given as an array or the path of a .npy file.

    Args:
        index: the offsets, in ascending order and between 0 and `num_tokens`; or the path of a .npy file of them.
        num_tokens: number of tokens.
        source: path of the file from which an array was read; empty for a user's array.
    Raises:
        ShardCorrupt: the offsets in a file are invalid.
        ValueError: the offsets in an array are invalid.
    """
    if isinstance(index, (str, os.PathLike)):
        source = os.fspath(index)
    given = np.asarray(index) if isinstance(index, list) else index
    found = HeldArrays({"document_index": given}).arrays["document_index"].array
    refusal, place = (ShardCorrupt, f"{source}, ") if source else (ValueError, "")
    if found.ndim != 1 or found.dtype.kind not in "iu" or len(found) < 1:
        raise refusal(f"{place}a document_index is one axis of integers, at least 1; got {found.dtype} of shape {found.shape}")
    offsets = np.ascontiguousarray(found, np.int64)
    bad = check_offsets(offsets, num_tokens)
    if bad >= 0:
        raise refusal(f"{place}document offset {bad} is {offsets[bad]}: offsets ascend from 0 to the {num_tokens} tokens")
    return offsets


_NONE = np.empty(0, np.int64)


class TokenDataset(HeldDataset):
    """Windows of tokens, widened directly into the batch.

    Without documents, window i begins at token `i * stride`, and a short rest at the end is dropped. With documents (`separator`,
    which is part of the document that it ends, or `document_index`), no window crosses a document boundary, every token is in a
    window, and the rest of a window is filled with `pad`. With `cross_documents`, windows have the same positions as without
    documents. With `pack`, whole documents share windows by best fit, so that each token occurs exactly once. Both add fields that
    distinguish documents: `segment_ids` numbers those of a window from 1 (0 is padding), and `position_ids` begins at 0 in each. If
    a window boundary cuts a document, positions begin again in each part.

    Several files (shards) are read one after the other, as in llm.c: no window and no document crosses from one file to the next,
    but with `pack`, documents of different files may share a window. The last tokens of each file that do not fill a window are
    dropped, as for a single file.

    Args:
        tokens: a `.npy` path, the path of a raw little-endian file with its `dtype`, a memmap, or an array of integers with one
            axis. Megatron-LM's `.bin` needs no dtype if `document_index` is its `.idx`, and files with llm.c's header never need
            one. Or several of these: a list, or a pattern with `*`, `?` or `[` such as "fineweb_train_*.bin", whose files are
            sorted by name.
        window: tokens per sample: one more than a model that predicts the next token sees.
        stride: distance between windows in tokens; by default the window's length, and with documents at most that.
        dtype: dtype of a raw file's tokens, such as "uint16": int8 to int64 or uint8 to uint32.
        out_dtype: dtype of the batch, "int64" or "int32".
        separator: the token that ends a document.
        document_index: offsets of the documents' first tokens, followed by the end of the last one: an array, a `.npy` path, or the
            path of Megatron-LM's `.idx`. Tokens before the first and after the last offset are dropped. For several files, one for
            each: a list, or a pattern.
        cross_documents: let windows cross document boundaries.
        pack: put several whole documents into each window.
        pad: the token that fills the rest of a window.
        seed: with `pack`, shuffles which documents share windows; None keeps their order.
        block: with `pack`, the number of documents that are packed together.
    Raises:
        FileNotFoundError: a file does not exist, or a pattern matches none.
        ShardCorrupt: a file does not match its header or has a wrong size.
        ValueError, TypeError: arguments contradict each other, or tokens are not a contiguous array of integers.
    Cost: one pass over the tokens for separators; planning is linear in the documents. Each file is open while the dataset lives.
    Thread/process safety: any number of readers; a pickled dataset of an array is valid as long as the original exists.
    Source: H. Ding et al., Fewer truncations improve language modeling, ICML 2024 (packing).
    Example:
        >>> import numpy as np
        >>> from shmload.formats import TokenDataset
        >>> dataset = TokenDataset(np.arange(100, dtype=np.uint16), 9, stride=8)
        >>> len(dataset), dataset[1]["tokens"].tolist()
        (12, [8, 9, 10, 11, 12, 13, 14, 15, 16])
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
        cross_documents: bool = False,
        pack: bool = False,
        pad: int = 0,
        seed: int | None = None,
        block: int = 1 << 16,
    ) -> None:
        stride = window if stride is None else stride
        has_documents = separator is not None or document_index is not None
        _check(locals())
        self._has_segments = has_documents and (pack or cross_documents)
        self.window, self.stride, self.pad, self.out_dtype = window, stride, pad, out_dtype
        files, indexes = _paired(tokens, document_index)
        stored: list[Any] = [None] * len(files)
        for i, index in enumerate(indexes):
            if isinstance(index, (str, os.PathLike)) and os.fspath(index).endswith(".idx"):
                check_local(index, "TokenDataset")
                stored[i], offsets = read_index(index)
                indexes[i] = _IndexFile(os.fspath(index), offsets)
        self._names = [f"tokens of file {i}" for i in range(len(files))] if len(files) > 1 else ["tokens"]
        opened = (_opened(file, dtype or kind) for file, kind in zip(files, stored, strict=True))
        self._held = HeldArrays(dict(zip(self._names, opened, strict=True)))
        flats = [self._held.arrays[name].array for name in self._names]
        _check_tokens(flats, files, out_dtype)
        if has_documents:
            offsets_of = [
                document_offsets(flat, separator) if separator is not None else _offsets_of(index, len(flat))
                for flat, index in zip(flats, indexes, strict=True)
            ]
            begins = _begins(map(len, flats))
            if cross_documents:
                plan = _joined([cross(offsets, window, stride) for offsets in offsets_of], begins)
            else:
                offsets, order = _documents(offsets_of, begins)
                if seed is not None and len(order):
                    numbers = np.asarray(Permutation(len(order), seed=seed).take(np.arange(len(order))), np.int64)
                    order = numbers if len(files) == 1 else order[numbers]
                starts, lengths = cut(offsets, order, window, stride)
                plan = np.arange(1, len(starts) + 1), starts, lengths
                if pack:
                    plan = by_window(*_pack(lengths, window, block), starts, lengths)
            self._held.add(dict(zip(("ends", "starts", "lengths"), plan, strict=True)))
        self._bind()

    def _bind(self) -> None:
        arrays = {name: a.array for name, a in self._held.arrays.items()}
        flats = [arrays[name] for name in self._names]
        if "ends" in arrays:
            window_begins, num_windows, stride = _NONE, len(arrays["ends"]), 0
        else:
            window_begins = _begins(max((len(flat) - self.window) // self.stride + 1, 0) for flat in flats)
            num_windows, stride = int(window_begins[-1]), self.stride
        self._reader = WindowReader(
            np.array([flat.__array_interface__["data"][0] for flat in flats], np.int64),
            _begins(map(len, flats)),
            window_begins,
            flats[0].dtype.kind + str(flats[0].dtype.itemsize),
            self.window,
            num_windows,
            stride,
            arrays.get("ends", _NONE),
            arrays.get("starts", _NONE),
            arrays.get("lengths", np.empty(0, np.int32)),
            self.pad,
            self.out_dtype == "int64",
            flats,
        )
        fields = {"tokens": self.out_dtype}
        if self._has_segments:
            fields |= {"segment_ids": "int32", "position_ids": "int32"}
        self.schema = {name: (dtype, (self.window,)) for name, dtype in fields.items()}

    @property
    def density(self) -> float:
        """Return the fraction of the windows' positions that contain tokens, 0 to 1; the rest is padding."""
        lengths = self._held.arrays.get("lengths")
        if lengths is None or not len(self):
            return 1.0
        return float(lengths.array.sum(dtype=np.int64) / (len(self) * self.window))

    def __len__(self) -> int:
        return self._reader.num_windows

    def __getitem__(self, index: int) -> dict[str, Any]:
        out = {name: np.empty((1, *shape), dtype) for name, (dtype, shape) in self.schema.items()}
        self.read_batch_into([operator.index(index)], out)  # a float would be truncated
        return {name: rows[0] for name, rows in out.items()}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        """Write the windows with these indices to rows.

        Args:
            indices: integers, shape `(rows,)`.
            out: an array for each field of the schema, C-contiguous, shape `(rows, window)`.
        """
        indices = np.ascontiguousarray(indices, np.int64)
        self._held.check([self._names[file] for file in self._reader.files_of(indices)])
        address, nbytes = place_of("tokens", out["tokens"])
        segments = positions = 0
        if self._has_segments:
            segments, positions = (_place(name, out[name], len(indices) * self.window) for name in ("segment_ids", "position_ids"))
        self._reader.into(address, segments, positions, nbytes, indices)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} windows of {self.window} tokens, density {self.density:.4f}>"


def _place(name: str, rows: Any, count: int) -> int:
    address, nbytes = place_of(name, rows)
    if nbytes != count * 4:
        raise ValueError(f"field {name!r}: {count} int32 are written; got room of {nbytes} bytes")
    return address


def _check(given: Mapping[str, Any]) -> None:
    """Check the arguments of a dataset, which are the local variables of its constructor."""
    window, stride, block = given["window"], given["stride"], given["block"]
    if not (1 <= window < 1 << 31 and stride >= 1 and block >= 1):
        raise ValueError(
            f"window, stride and block must be at least 1, and a window less than 2**31; got {window}, {stride}, {block}"
        )
    if given["out_dtype"] not in ("int64", "int32"):
        raise ValueError(f"out_dtype must be 'int64' or 'int32', got {given['out_dtype']!r}")
    bits = int(given["out_dtype"].removeprefix("int"))
    if not -(1 << bits - 1) <= given["pad"] < 1 << bits - 1:
        raise ValueError(f"pad is a token of {given['out_dtype']}; got {given['pad']}")
    if given["separator"] is not None and given["document_index"] is not None:
        raise ValueError("pass separator= or document_index=, not both")
    has_documents, crosses = given["has_documents"], given["cross_documents"]
    if given["pack"] and (not has_documents or stride != window):
        raise ValueError("pack=True puts whole documents into windows: give separator= or document_index=, and no stride")
    if crosses and (not has_documents or given["pack"]):
        raise ValueError("cross_documents=True numbers a window's documents: give separator= or document_index=, and no pack")
    if has_documents and not crosses and stride > window:
        raise ValueError(f"windows of {window} tokens cover documents at strides up to {window}; got {stride}")


class _IndexFile(NamedTuple):
    """The path and the offsets of a .idx file."""

    path: str
    offsets: NDArray[np.int64]


def _offsets_of(index: Any, num_tokens: int) -> NDArray[np.int64]:
    return (
        checked_offsets(index.offsets, num_tokens, index.path)
        if isinstance(index, _IndexFile)
        else checked_offsets(index, num_tokens)
    )


def _paired(tokens: Any, document_index: Any) -> tuple[list[Any], list[Any]]:
    """Return the token files, or arrays, and the document index of each.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: no file was given, or the number of indexes differs from that of the files.
    """
    files = _several(tokens)
    if files is None:
        return [tokens], [document_index]
    if not files:
        raise ValueError("tokens is an empty list; give at least one file")
    if document_index is None:
        return files, [None] * len(files)
    indexes = _several(document_index)
    if indexes is None or len(indexes) != len(files):
        found = "a single index" if indexes is None else f"{len(indexes)} indexes"
        raise ValueError(f"document_index must have one index for each of the {len(files)} token files, as a list; got {found}")
    return files, indexes


def _several(given: Any) -> list[Any] | None:
    """Return the files that a list or a pattern names; None if `given` is one file or one array."""
    if isinstance(given, (str, os.PathLike)):
        path = os.fspath(given)
        return list(expanded(path, "Token")) if has_magic(path) and not os.path.exists(path) else None
    if isinstance(given, (list, tuple)) and not any(isinstance(one, (int, float, np.number)) for one in given):
        return list(given)
    return None


def _begins(lengths: Iterable[int]) -> NDArray[np.int64]:
    """Return the beginning of each of several consecutive runs, given their lengths, followed by the end of the last one."""
    return np.cumsum([0, *lengths], dtype=np.int64)


def _documents(offsets_of: list[NDArray[np.int64]], begins: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the offsets of all files' documents among all tokens, and the numbers of those that begin a document.

    The last offset of a file is an end.

    Args:
        offsets_of: the offsets of each file.
        begins: number of tokens before each file.
    """
    if len(offsets_of) == 1:
        return offsets_of[0], np.arange(len(offsets_of[0]) - 1)
    before = _begins(map(len, offsets_of))
    numbers = [np.arange(begin, end - 1) for begin, end in pairwise(before.tolist())]
    return np.concatenate([o + b for o, b in zip(offsets_of, begins, strict=False)]), np.concatenate(numbers)


def _joined(plans: list[Any], begins: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
    """Merge the plans of several files; `begins` has the number of tokens before each file."""
    if len(plans) == 1:
        return tuple(plans[0])
    pieces = _begins(len(lengths) for _, _, lengths in plans)
    ends = np.concatenate([ends + before for (ends, _, _), before in zip(plans, pieces, strict=False)])
    starts = np.concatenate([starts + begin for (_, starts, _), begin in zip(plans, begins, strict=False)])
    return ends, starts, np.concatenate([lengths for _, _, lengths in plans])


def _opened(tokens: Any, dtype: Any) -> Any:
    if not isinstance(tokens, (str, os.PathLike)) or os.fspath(tokens).endswith(".npy"):
        return tokens
    check_file(tokens, "TokenDataset", 'give a pattern such as "train_*.bin", or a list of paths')
    path = os.path.abspath(tokens)
    if (after_header := _after_header(path, dtype)) is not None:
        return after_header
    if dtype is None:
        raise ValueError(f"{path}: a raw file does not contain the type of its tokens: pass dtype='uint16', for example")
    nbytes, kind = os.path.getsize(path), np.dtype(dtype)
    if kind.byteorder != ">":  # big-endian is rejected later, as for arrays
        kind = kind.newbyteorder("<")
    if nbytes % kind.itemsize or not nbytes:
        raise ShardCorrupt(f"{path}, offset {nbytes}: {nbytes} bytes are not a whole number of {kind} tokens, at least one")
    return ArrayPlace(path, 0, (nbytes // kind.itemsize,), (kind.itemsize,), kind.str, kind.name)


def _after_header(path: str, dtype: Any) -> Any:
    """Find the tokens of a file with llm.c's header: 256 int32, which begin with a magic, a version and the number of tokens.

    Returns:
        the tokens' place, or None if the file has no such header.
    Raises:
        ShardCorrupt: the file's size differs from the header's.
        ValueError: the version is unknown, or `dtype` differs from the header's.
    Source: llm.c, llmc/dataloader.h and dev/data/data_common.py.
    """
    with open(path, "rb") as file:
        head, nbytes = file.read(_LLMC_NBYTES), os.fstat(file.fileno()).st_size
    if len(head) < _LLMC.size:
        return None
    magic, version, count = _LLMC.unpack_from(head)
    if magic not in _LLMC_KINDS:
        return None
    known, name = _LLMC_KINDS[magic]
    if version != known:
        raise ValueError(
            f"{path}, offset 4: llm.c's header has version {version}, and version {known} can be read; if the file has no header, "
            "give its tokens as numpy.memmap(path, dtype, 'r')"
        )
    kind = np.dtype(name).newbyteorder("<")
    if dtype is not None and np.dtype(dtype) != kind:
        raise ValueError(f"{path}: llm.c's header says that tokens are {kind}, and dtype is {dtype!r}; leave dtype out")
    needed = _LLMC_NBYTES + kind.itemsize * count
    if count < 1 or nbytes != needed:
        raise ShardCorrupt(
            f"{path}, offset 8: llm.c's header says {count} tokens of {kind}, which need {needed} bytes; there are {nbytes}"
        )
    return ArrayPlace(path, _LLMC_NBYTES, (count,), (kind.itemsize,), kind.str, kind.name, head)


def _check_tokens(flats: Sequence[Any], files: Sequence[Any], out_dtype: str) -> None:
    for i, (flat, file) in enumerate(zip(flats, files, strict=True)):
        name = (
            "tokens" if len(flats) == 1 else f"file {i} of tokens" if not isinstance(file, (str, os.PathLike)) else os.fspath(file)
        )
        is_known = flat.dtype.kind in "iu" and flat.dtype.isnative and flat.dtype != np.uint64
        if flat.ndim != 1 or not is_known or not flat.flags.c_contiguous or not flat.flags.aligned:
            raise TypeError(
                f"{name}: tokens are one aligned run of int8 to int64 or uint8 to uint32 in this machine's byte order; got "
                f"{flat.dtype.str}, shape {flat.shape}, strides {flat.strides}"
            )
        if not np.can_cast(flat.dtype, out_dtype):
            raise TypeError(f"{name}: tokens of {flat.dtype} do not all fit {out_dtype}: leave out_dtype at 'int64'")
        if flat.dtype != flats[0].dtype:
            raise TypeError(f"{name}: tokens are {flat.dtype}, and those of the first file {flats[0].dtype}; files need one dtype")
