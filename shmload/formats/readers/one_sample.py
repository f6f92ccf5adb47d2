"""One sample, written the way a batch is: what a dataset that reads batches answers `__getitem__` with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shmload.batch.dtypes import of_any


class OneSample:
    """The `out` of a batch of one row.

    Args:
        schema: mapping name -> (dtype, shape), or str or bytes.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._fields: dict[str, Any] = {}
        for name, spec in schema.items():
            if isinstance(spec, tuple) and None not in spec[1]:
                self._fields[name] = _empty(spec[0], (1, *spec[1]))

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __setitem__(self, name: str, values: Any) -> None:
        self._fields[name] = values

    def reserve(self, name: str, lengths: Any) -> Any:
        """The memory of a ragged row."""
        dtype, shape = self._schema[name]
        (length,) = lengths
        values = self._fields[name] = _empty(dtype, (1, length, *shape[1:]))
        return values.reshape(-1)

    def sample(self) -> dict[str, Any]:
        """The fields: arrays, numpy's scalars, text."""
        found = {name: self._fields[name][0] for name in self._schema}
        return {
            name: value[()] if isinstance(value, np.ndarray) and not value.ndim else value
            for name, value in found.items()
        }


def _empty(dtype: Any, shape: tuple[int, ...]) -> Any:
    element = of_any(dtype)
    if element.numpy is not None:
        return np.empty(shape, element.numpy)
    import torch

    return torch.empty(shape, dtype=getattr(torch, element.name))
