"""One row seen as a run of one row: for what only reads batches."""

from __future__ import annotations

from typing import Any


class SingleRow:
    """What `read_batch_into` writes to, over what `read_into` writes to.

    Args:
        out: views of one row (`RowOut`, `RaggedOut`).
    """

    def __init__(self, out: Any) -> None:
        self._out = out

    def reserve(self, name: str, lengths: Any) -> Any:
        """The writable view of a ragged field's only row, in one dimension."""
        (n,) = lengths
        return self._out.reserve(name, n).reshape(-1)

    def __getitem__(self, name: str) -> Any:
        return self._out[name][None]

    def __setitem__(self, name: str, value: Any) -> None:
        self._out[name] = value[0] if hasattr(value, "__getitem__") else value
