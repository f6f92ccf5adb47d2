"""Find the collate functions that a program has registered with torch's default collate, in place of those that torch ships."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

_OF_ROWS = (dict, list, tuple, int, float, np.generic, np.ndarray)  # with Tensor, the types of samples that have fixed rows


class RegisteredFunctions:
    """The user's changes to `default_collate_fn_map`, torch's table of collate functions.

    Attributes:
        table: copy of the table when it was read.
        concern_rows: whether a changed entry may apply to a sample, or a part of one, that would be written into a row. Then the
            batch is not rows of the samples, and no sample may be written before the function has seen it.
    """

    def __init__(self, torchs: Any) -> None:
        self.table: dict[Any, Any] = dict(torchs.default_collate_fn_map)
        entries = self.table.keys() | _SHIPPED.keys() | {torchs.torch.Tensor, np.ndarray}
        self._changed = {kind for kind in entries if not _is_shipped(kind, self.table.get(kind), torchs)}
        of_rows = (*_OF_ROWS, torchs.torch.Tensor)
        self.concern_rows = any(_may_apply(kind, of_rows) for kind in self._changed)
        self._concerns_tensors = torchs.torch.Tensor in self._changed

    def __bool__(self) -> bool:
        return bool(self._changed)

    def function_of(self, head: Any) -> Callable[[Any], Any] | None:
        """Return the user's function for values of which the first is `head`, by torch's rules; None if torch's own applies."""
        kind: Any = type(head)
        if kind not in self.table:
            kind = next((registered for registered in self.table if isinstance(head, registered)), None)
        # torch's function for arrays makes tensors of them and collates those by the table
        is_users = kind in self._changed or (kind is np.ndarray and self._concerns_tensors)
        return partial(self.table[kind], collate_fn_map=self.table) if is_users and kind in self.table else None


_SHIPPED: dict[Any, str] = {  # the entries of torch's table, by the names of their functions; `_is_shipped` knows two more
    float: "collate_float_fn",
    int: "collate_int_fn",
    str: "collate_str_fn",
    bytes: "collate_str_fn",
    (np.bool_, np.number, np.object_): "collate_numpy_scalar_fn",
    np.ndarray: "collate_numpy_array_fn",
}


def _is_shipped(kind: Any, function: Any, torchs: Any) -> bool:
    """Return whether torch's table has this function for this type as it is shipped."""
    name = "collate_tensor_fn" if kind is torchs.torch.Tensor else _SHIPPED.get(kind)
    return name is not None and function is getattr(torchs, name, None)


def _may_apply(kind: Any, types: tuple[type, ...]) -> bool:
    """Return whether an entry for `kind` may apply to an instance of one of these types, or of a subclass."""
    if isinstance(kind, tuple):
        return any(_may_apply(one, types) for one in kind)
    return not isinstance(kind, type) or any(issubclass(kind, one) or issubclass(one, kind) for one in types)


_last_seen: RegisteredFunctions | None = None  # created again when torch's table has changed


def registered_functions() -> RegisteredFunctions | None:
    """Return the collate functions that the user has registered with torch; None if there are none. Takes less than 1 us."""
    global _last_seen
    torchs = sys.modules.get("torch.utils.data._utils.collate")
    if torchs is None:
        return None
    if _last_seen is None or _last_seen.table != torchs.default_collate_fn_map:
        _last_seen = RegisteredFunctions(torchs)
    return _last_seen or None


def collates_as_shipped() -> bool:
    """Return whether the user has left torch's collation of samples with fixed rows unchanged."""
    functions = registered_functions()
    return functions is None or not functions.concern_rows
