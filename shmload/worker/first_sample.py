"""Check the first sample that a reader decodes into its row: that every field is written, and that the sample is not returned.

With `shmload.debug.enable()`, every sample is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.batch.layout import Layout
from shmload.errors import SampleError
from shmload.worker.in_place_dataset import InPlace
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import generators_kept

PATTERNS = 0xA5, 0x5A
_EDGE_NBYTES = 4096  # a field's first and last bytes that the first read is compared in


class FirstCall:
    """A method of a reader in place, which checks its calls until one passes, and then puts the method itself back.

    A field whose bytes are still those that it was filled with may contain such data. So the sample is then read once more, over
    another pattern in private memory; the first read stays the result, and no random number of later samples changes.

    Args:
        in_place: the reader.
        name: name of the method: "read_into" or "read_batch_into".
        layout: layout of the rows.
        make_out: key or keys -> the `out` for another read of them, in private memory.
        dataset: the dataset, whose generators are kept.
        always: check every call.
    """

    def __init__(
        self, in_place: InPlace, name: str, layout: Layout, make_out: Callable[[Any], Any], dataset: Any, always: bool
    ) -> None:
        self._in_place, self._name, self._make_out, self._dataset, self._always = in_place, name, make_out, dataset, always
        self._layout, self._names = layout, [f.name for f in layout.fields if not f.is_ragged]
        self._read: Callable[[Any, Any], Any] = getattr(in_place, name)
        setattr(in_place, name, self)

    def __call__(self, key: Any, out: Any) -> None:
        if getattr(self._in_place, self._name) is not self:  # the batch with the checked sample calls it for its other samples, too
            self._read(key, out)
            return
        keys = [key] if self._name == "read_into" else list(key)
        fields = {name: _bytes_of(out[name], len(keys)) for name in self._names}
        unfilled = [] if self._layout.zero_fill else [name for name, rows in fields.items() if rows.size]
        for name in unfilled:
            for part in _edges(fields[name]):
                part[...] = PATTERNS[0]
        if kind := self._kind_of_sample(self._read(key, out), fields):
            raise TypeError(f"{self._name} must write into `out` and return None; it returned {kind}")
        unwritten = {name: at for name in unfilled if len(at := _rows_with(PATTERNS[0], *_edges(fields[name])))}
        if unwritten:
            unwritten = self._unwritten_again(key, len(keys), unwritten)
        for name, rows in unwritten.items():
            raise SampleError(
                f"{self._in_place.name}: {self._name} did not write field {name!r} of {_samples(keys, rows)}, which would keep "
                f"bytes of an earlier batch: write out[{name!r}] for every sample, or give the schema zero_fill = True "
                "(docs/own_format.md)"
            )
        if not self._always:
            setattr(self._in_place, self._name, self._read)

    def _kind_of_sample(self, returned: Any, fields: dict[str, NDArray[np.uint8]]) -> str:
        """Return the kind of a returned value that is a sample; empty for anything else."""
        if isinstance(returned, dict | tuple | list):
            return f"a {next(kind for kind in (dict, tuple, list) if isinstance(returned, kind)).__name__}"
        torch = sys.modules.get("torch")
        is_array = isinstance(returned, np.ndarray)
        if not (is_array or (torch is not None and isinstance(returned, torch.Tensor))):
            return ""
        # functions with an argument `out` return it; an unwritten ragged field is an error of its own, when the row ends
        if self._layout.is_ragged or any(_begins_in(returned, rows) for rows in fields.values()):
            return ""
        return "an array" if is_array else "a tensor"

    def _unwritten_again(self, key: Any, num_rows: int, unwritten: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """Read again, and return the rows of each field that keep another pattern; none if the second read raises."""
        out = self._make_out(key)
        fields = {name: _bytes_of(out[name], num_rows) for name in unwritten}
        for rows in fields.values():
            rows[...] = PATTERNS[1]
        with generators_kept(), OwnGenerators(self._dataset).kept():
            try:
                self._read(key, out)
            except Exception:  # a dataset that can read each sample once
                return {}
        both = {name: np.intersect1d(unwritten[name], _rows_with(PATTERNS[1], rows)) for name, rows in fields.items()}
        return {name: rows for name, rows in both.items() if len(rows)}


def check_first_calls(
    in_place: InPlace, layout: Layout, make_out: Callable[[Any, bool], Any], dataset: Any, *, always: bool
) -> None:
    """Let a reader's methods check the first sample, or batch, that each of them reads.

    Args:
        in_place: the reader.
        layout: layout of the rows.
        make_out: (key or keys, whether they are several) -> the `out` for another read of them, in private memory.
        dataset: the dataset.
        always: check all samples.
    Raises:
        TypeError: (when called) the method returned the sample.
        SampleError: (when called) the method did not write a field.
    """
    if in_place.read_into is not None:
        FirstCall(in_place, "read_into", layout, lambda key: make_out(key, False), dataset, always)
    if in_place.read_batch_into is not None:
        FirstCall(in_place, "read_batch_into", layout, lambda keys: make_out(keys, True), dataset, always)


def _bytes_of(values: Any, num_rows: int) -> NDArray[np.uint8]:
    """Return the bytes of rows, an array or a tensor, as an array `(num_rows, bytes per row)` over the same memory."""
    if isinstance(values, np.ndarray):
        return values.reshape(-1).view(np.uint8).reshape(num_rows, -1) if values.size else np.empty((num_rows, 0), np.uint8)
    import torch

    found: NDArray[np.uint8] = values.reshape(-1).view(torch.uint8).numpy().reshape(num_rows, -1)
    return found


def _edges(rows: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return rows[:, :_EDGE_NBYTES], rows[:, -_EDGE_NBYTES:]


def _rows_with(pattern: int, *parts: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the numbers of the rows that have the pattern in all bytes of all parts."""
    return np.flatnonzero(np.logical_and.reduce([(part == pattern).all(axis=1) for part in parts]))


def _samples(keys: list[Any], rows: NDArray[np.int64]) -> str:
    """Return the words for the samples of these rows."""
    if len(rows) == 1:
        return f"sample {keys[rows[0]]}"
    return f"samples {', '.join(str(keys[row]) for row in rows[:10].tolist())}{', ...' if len(rows) > 10 else ''}"


def _begins_in(values: Any, rows: NDArray[np.uint8]) -> bool:
    """Return whether an array or tensor begins in the memory of a field."""
    address = values.__array_interface__["data"][0] if isinstance(values, np.ndarray) else values.data_ptr()
    start = rows.__array_interface__["data"][0]
    return bool(start <= address < start + rows.size)
