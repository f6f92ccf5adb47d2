"""Check the first sample that a reader decodes into its row: that every field is written, and that the sample is not returned."""

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
    """

    def __init__(self, in_place: InPlace, name: str, layout: Layout, make_out: Callable[[Any], Any], dataset: Any) -> None:
        self._in_place, self._name, self._make_out, self._dataset = in_place, name, make_out, dataset
        self._layout, self._names = layout, [f.name for f in layout.fields if not f.is_ragged]
        self._read: Callable[[Any, Any], Any] = getattr(in_place, name)
        setattr(in_place, name, self)

    def __call__(self, key: Any, out: Any) -> None:
        if getattr(self._in_place, self._name) is not self:  # the batch with the checked sample calls it for its other samples, too
            self._read(key, out)
            return
        fields = {name: _bytes_of(out[name]) for name in self._names}
        unfilled = [] if self._layout.zero_fill else [name for name, raw in fields.items() if len(raw)]
        for name in unfilled:
            for part in _edges(fields[name]):
                part[...] = PATTERNS[0]
        if kind := self._kind_of_sample(self._read(key, out), fields):
            raise TypeError(f"{self._name} must write into `out` and return None; it returned {kind}")
        unwritten = [name for name in unfilled if all((part == PATTERNS[0]).all() for part in _edges(fields[name]))]
        if unwritten and (unwritten := self._unwritten_again(key, unwritten)):
            which = f"sample {key}" if self._name == "read_into" else f"samples {key!s:.200}"
            raise SampleError(
                f"{self._in_place.name}: {self._name} did not write field {unwritten[0]!r} of {which}, which would keep "
                f"bytes of an earlier batch: write out[{unwritten[0]!r}] for every sample, or give the schema zero_fill = True "
                "(docs/own_format.md)"
            )
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
        if self._layout.is_ragged or any(_begins_in(returned, raw) for raw in fields.values()):
            return ""
        return "an array" if is_array else "a tensor"

    def _unwritten_again(self, key: Any, names: list[str]) -> list[str]:
        """Read again, and return those of the fields that keep another pattern; none if the second read raises."""
        out = self._make_out(key)
        fields = {name: _bytes_of(out[name]) for name in names}
        for raw in fields.values():
            raw[...] = PATTERNS[1]
        with generators_kept(), OwnGenerators(self._dataset).kept():
            try:
                self._read(key, out)
            except Exception:  # a dataset that can read each sample once
                return []
        return [name for name, raw in fields.items() if (raw == PATTERNS[1]).all()]


def check_first_calls(in_place: InPlace, layout: Layout, make_out: Callable[[Any, bool], Any], dataset: Any) -> None:
    """Let a reader's methods check the first sample, or batch, that each of them reads.

    Args:
        in_place: the reader.
        layout: layout of the rows.
        make_out: (key or keys, whether they are several) -> the `out` for another read of them, in private memory.
        dataset: the dataset.
    Raises:
        TypeError: (when called) the method returned the sample.
        SampleError: (when called) the method did not write a field.
    """
    if in_place.read_into is not None:
        FirstCall(in_place, "read_into", layout, lambda key: make_out(key, False), dataset)
    if in_place.read_batch_into is not None:
        FirstCall(in_place, "read_batch_into", layout, lambda keys: make_out(keys, True), dataset)


def _bytes_of(rows: Any) -> NDArray[np.uint8]:
    """Return the bytes of a row or of several, an array or a tensor, as an array over the same memory."""
    if isinstance(rows, np.ndarray):
        return rows.reshape(-1).view(np.uint8)
    import torch

    found: NDArray[np.uint8] = rows.reshape(-1).view(torch.uint8).numpy()
    return found


def _edges(raw: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return raw[:_EDGE_NBYTES], raw[-_EDGE_NBYTES:]


def _begins_in(values: Any, raw: NDArray[np.uint8]) -> bool:
    """Return whether an array or tensor begins in the memory of a field."""
    address = values.__array_interface__["data"][0] if isinstance(values, np.ndarray) else values.data_ptr()
    start = raw.__array_interface__["data"][0]
    return bool(start <= address < start + len(raw))
