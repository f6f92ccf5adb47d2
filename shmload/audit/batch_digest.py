"""A 64-bit digest of the content of a delivered batch.

The batch is walked in its own order. Every array contributes its type, shape and the XXH64 of its elements in C order, so strides
and addresses make no difference; numbers, text and containers contribute themselves. The sequence is then hashed once more. An
object without bytes of its own (a lambda, a C object) contributes only its type, and the digest is marked as partial. Nothing is
pickled, because a pickle depends on which parts happen to be the same object.

Cost: one read of the arrays at memory speed, without the GIL, and about 2 us per array; arrays with gaps are copied first.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Collection, Mapping, Set
from enum import Enum
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from shmload._core.digest import hash_at, hash_bytes
from shmload.batch.array_rows import is_masked

_NAMES_ONLY = (type, FunctionType, ModuleType)  # objects whose attributes are not data
_SUBCLASSED = (torch.Tensor, list, tuple, dict, str, bytes, bytearray, int, float, complex)
_WITHOUT_ATTRIBUTES = frozenset(_SUBCLASSED)  # of these types themselves, attributes are not delivered
_EXACT = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
}  # conversions of a subclass to its value


class _Plain:
    """A class whose instances contain nothing but their attributes."""


def digest_of(batch: Any) -> tuple[int, bool]:
    """Return the digest of a batch of any structure, and whether it is partial."""
    walk = _Walk()
    walk.value(batch)
    return hash_bytes(b"".join(walk.parts)), walk.is_partial


class _Walk:
    """Collects the parts of a batch, each with its length unless its tag implies it."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_partial = False
        self._open: set[int] = set()  # IDs of the objects being walked, because an object may contain itself

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind not in _WITHOUT_ATTRIBUTES and isinstance(value, _SUBCLASSED) and id(value) not in self._open:
            self.attributes(value)
        if isinstance(value, torch.Tensor):
            self.tensor(value)
        elif is_masked(value):
            self.sequence("masked", (np.asarray(value), np.ma.getmaskarray(value)))
        elif isinstance(value, (np.ndarray, np.generic)):
            self.array(np.asarray(value))
        elif value is None or kind is bool:
            self.parts.append(b"N" if value is None else b"1" if value else b"0")
        elif kind is int:
            self.text(b"i", b"%d" % value)
        elif kind is float:
            self.parts.append(b"f" + struct.pack("<d", value))
        elif kind is complex:
            self.parts.append(b"c" + struct.pack("<dd", value.real, value.imag))
        elif kind is str:
            self.text(b"s", value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, (bytes, bytearray, memoryview)):
            self.text(b"b", bytes(value))
        elif id(value) in self._open:
            self.named(b"^", value)
        else:
            self._open.add(id(value))
            try:
                self.holder(value)
            finally:
                self._open.discard(id(value))

    def attributes(self, value: Any) -> None:
        """Walk the attributes of an instance of a subclass, such as a picture's size in a tensor of boxes."""
        is_nested = isinstance(value, torch.Tensor) and value.is_nested  # its attributes include the name of a new symbol
        found = getattr(value, "__dict__", None)
        if found and not (is_nested or isinstance(value, Enum)):
            self._open.add(id(value))
            self.named(b"O", value)
            self.mapping(dict(sorted(found.items())))
            self._open.discard(id(value))

    def holder(self, value: Any) -> None:
        """Walk a container, or an object of unknown type."""
        if isinstance(value, Mapping):
            self.mapping(value)
        elif isinstance(value, (list, tuple)):
            self.sequence(type(value).__name__, value)
        elif isinstance(value, Set):
            self.named(b"{", value)
            digests = [digest_of(each) for each in value]
            self.is_partial = self.is_partial or any(is_partial for _, is_partial in digests)
            self.parts += sorted(struct.pack("<Q", digest) for digest, _ in digests)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.named(b"O", value)
            self.mapping({f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)})
        elif base := next((base for base in _EXACT if isinstance(value, base)), None):
            self.named(b"O", value)
            self.value(_EXACT[base](value))
        elif hasattr(value, "__dict__") and not isinstance(value, _NAMES_ONLY):
            self.named(b"O", value)
            self.mapping(dict(sorted(vars(value).items())))
            kind = type(value)  # a class with slots, or one derived from a C class, contains more
            self.is_partial |= kind.__basicsize__ > _Plain.__basicsize__ or kind.__itemsize__ > 0
        else:
            self.is_partial = True
            self.named(b"?", value)

    # ------------------------------------------------------------ parts

    def text(self, tag: bytes, text: bytes) -> None:
        self.parts.append(tag + struct.pack("<Q", len(text)) + text)

    def named(self, tag: bytes, value: Any) -> None:
        self.text(tag, type(value).__qualname__.encode())

    def mapping(self, value: Mapping[Any, Any]) -> None:
        self.parts.append(b"D" + struct.pack("<Q", len(value)))
        for pair in value.items():
            for each in pair:
                self.value(each)

    def sequence(self, name: str, value: Collection[Any]) -> None:
        self.text(b"L", name.encode())
        self.parts.append(struct.pack("<Q", len(value)))
        for each in value:
            self.value(each)

    def array(self, value: np.ndarray[Any, Any]) -> None:
        dtype = value.dtype
        if dtype.hasobject:
            self.sequence("array", value.reshape(-1).tolist())
            self.value(list(value.shape))
        elif dtype.fields:  # there may be uninitialized bytes between the fields
            self.mapping({name: value[name] for name in dtype.fields})
        else:
            dense = np.ascontiguousarray(value)
            content = hash_at(dense.ctypes.data, dense.nbytes)
            self.parts.append(b"A%b %b %d;" % (dtype.str.encode(), str(value.shape).encode(), content))

    def tensor(self, value: torch.Tensor) -> None:
        if value.requires_grad:
            value = value.detach()
        if value.is_nested:
            parts: Any = (value.values(), value.offsets()) if value.layout is torch.jagged else value.unbind()  # type: ignore[attr-defined]  # a jagged tensor has offsets
            self.sequence("nested", parts)
            return
        if value.layout is torch.sparse_coo:
            value = value.coalesce()
            self.sequence("sparse", (list(value.shape), value.indices(), value.values()))
            return
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            self.is_partial = True
            self.named(b"?", value)
            return
        value = value.cpu().resolve_conj().resolve_neg().contiguous()
        self.parts.append(_label(value.dtype, value.shape) + b"%d;" % hash_at(value.data_ptr(), value.nbytes))


@lru_cache(maxsize=256)
def _label(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return b"T%b %b " % (str(dtype).encode(), str(tuple(shape)).encode())
