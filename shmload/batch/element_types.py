"""Element types: one name each, and the equivalents in numpy, torch and DLPack.

Workers that do not use torch must not import it, so torch's dtypes are looked up by name, and only for existing tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class ElementType(NamedTuple):
    """An element type: name (shared by torch and numpy if both have it), size in bytes, DLPack code, and numpy dtype or None."""

    name: str
    itemsize: int
    code: int
    numpy: np.dtype[Any] | None


UINT_CODE, FLOAT8_CODE = 1, 10  # codes of DLPack; DLPack 1.1 uses the latter and those after it for eight-bit floats


def _table() -> dict[str, ElementType]:
    table = {}
    sizes = (8, 16, 32, 64)
    numbers = ((0, "int", sizes), (UINT_CODE, "uint", sizes), (2, "float", sizes[1:]), (5, "complex", (64, 128)))
    names = [(f"{kind}{bits}", code) for code, kind, sizes in numbers for bits in sizes]
    for name, code in [*names, ("bool", 6)]:
        table[name] = ElementType(name, np.dtype(name).itemsize, code, np.dtype(name))
    eights = [f"float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
    for name, nbytes, code in [("bfloat16", 2, 4), ("complex32", 4, 5), *((n, 1, FLOAT8_CODE + i) for i, n in enumerate(eights))]:
        table[name] = ElementType(name, nbytes, code, None)
    return table


ELEMENT_TYPES = _table()
_BY_NUMPY = {t.numpy: t for t in ELEMENT_TYPES.values() if t.numpy is not None}


def of_numpy(dtype: np.dtype[Any]) -> ElementType | None:
    """Return the element type of a native numpy dtype; None if torch lacks it."""
    return _BY_NUMPY.get(dtype) if dtype.isnative else None


def of_torch(dtype: Any) -> ElementType | None:
    """Return the element type of a torch dtype; None if a slot cannot hold it (quantized types, and those of less than a byte)."""
    return ELEMENT_TYPES.get(str(dtype).removeprefix("torch."))


def of_any(dtype: Any) -> ElementType:
    """Return the element type that a schema names: a torch dtype, or anything that numpy accepts as a dtype.

    Args:
        dtype: the type in the schema.
    Raises:
        TypeError: it is not a dtype, or not one that tensors can have.
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
