"""One name per element type, and what numpy, torch and DLPack call it.

Workers that never touch torch must not import it, so torch's dtypes are looked up by name only where a tensor is at hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class ElementType(NamedTuple):
    """An element type: its name (torch's and numpy's, where both have it), size in bytes, DLPack code, numpy dtype or None."""

    name: str
    itemsize: int
    code: int
    numpy: np.dtype[Any] | None


def _table() -> dict[str, ElementType]:
    table = {}
    for code, kind, sizes in ((0, "int", (8, 16, 32, 64)), (1, "uint", (8, 16, 32, 64)), (2, "float", (16, 32, 64))):
        for bits in sizes:
            table[f"{kind}{bits}"] = ElementType(f"{kind}{bits}", bits // 8, code, np.dtype(f"{kind}{bits}"))
    table["complex64"] = ElementType("complex64", 8, 5, np.dtype("complex64"))
    table["complex128"] = ElementType("complex128", 16, 5, np.dtype("complex128"))
    table["bool"] = ElementType("bool", 1, 6, np.dtype("bool"))
    table["bfloat16"] = ElementType("bfloat16", 2, 4, None)
    table["complex32"] = ElementType("complex32", 4, 5, None)
    for code, name in enumerate(("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"), start=10):  # DLPack 1.1's codes
        table[f"float8_{name}"] = ElementType(f"float8_{name}", 1, code, None)
    return table


ELEMENT_TYPES = _table()
_BY_NUMPY = {t.numpy: t for t in ELEMENT_TYPES.values() if t.numpy is not None}


def of_numpy(dtype: np.dtype[Any]) -> ElementType | None:
    """The element type of a native numpy dtype; None if torch has no such type."""
    return _BY_NUMPY.get(dtype) if dtype.isnative else None


def of_torch(dtype: Any) -> ElementType | None:
    """The element type of a torch dtype; None if a slot cannot hold it (quantised types, and those of less than a byte)."""
    return ELEMENT_TYPES.get(str(dtype).removeprefix("torch."))


def of_any(dtype: Any) -> ElementType:
    """The element type a schema names: a torch dtype, or anything numpy takes for one.

    Raises:
        TypeError: neither, or one that no tensor can have.
    """
    if type(dtype).__module__ == "torch":
        found = of_torch(dtype)
    elif isinstance(dtype, str) and dtype in ELEMENT_TYPES:
        found = ELEMENT_TYPES[dtype]
    else:
        found = of_numpy(np.dtype(dtype))
    if found is None:
        raise TypeError(f"a field needs one of {', '.join(ELEMENT_TYPES)}; got {dtype!r}")
    return found
