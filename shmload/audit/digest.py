"""64 bits that stand for the content of a delivered batch.

The batch is walked in its own order. Every array gives its type, shape and the XXH64 of its elements in C order, so strides and
where the memory lies make no difference; numbers, text and containers give themselves. All of that is hashed once more. What has no
bytes of its own (a lambda, a C object) gives only its type, and the digest says so: it is then *partial*. Nothing is pickled: a
pickle depends on which of its parts happen to be the same object.

Cost: one read of the arrays at memory speed, without the GIL, and about 2 us per array; arrays with gaps are copied first.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Mapping, Set
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from shmload._core.digest import hash_at, hash_bytes

_NAMES_ONLY = (type, FunctionType, ModuleType)  # their attributes are no data


def digest_of(batch: Any) -> tuple[int, bool]:
    """(digest, whether it is partial) of a batch of any structure."""
    walk = _Walk()
    walk.value(batch)
    return hash_bytes(b"".join(walk.parts)), walk.is_partial


class _Walk:
    """Collects what a batch consists of, each part with its length or of a length that its tag tells."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_partial = False
        self._open: set[int] = set()  # objects being walked: one that holds itself is not walked again

    def value(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self.tensor(value)
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

    def holder(self, value: Any) -> None:
        """What holds other values, or is nothing that is known."""
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
            self.attributes(value, [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)])
        elif hasattr(value, "__dict__") and not isinstance(value, _NAMES_ONLY):
            self.attributes(value, sorted(vars(value).items()))
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
        for key, each in value.items():
            self.value(key)
            self.value(each)

    def sequence(self, name: str, value: Iterable[Any]) -> None:
        values = list(value)
        self.text(b"L", name.encode())
        self.parts.append(struct.pack("<Q", len(values)))
        for each in values:
            self.value(each)

    def attributes(self, value: Any, items: list[tuple[str, Any]]) -> None:
        self.named(b"O", value)
        self.mapping(dict(items))

    def array(self, value: np.ndarray[Any, Any]) -> None:
        dtype = value.dtype
        if dtype.hasobject:
            self.sequence("array", value.reshape(-1).tolist())
            self.value(list(value.shape))
        elif dtype.fields:  # between the fields may be bytes that nobody wrote
            self.mapping({name: value[name] for name in dtype.fields})
        else:
            dense = np.ascontiguousarray(value)
            content = hash_at(dense.ctypes.data, dense.nbytes)
            self.parts.append(b"A%b %b %d;" % (dtype.str.encode(), str(value.shape).encode(), content))

    def tensor(self, value: torch.Tensor) -> None:
        value = value.detach()
        if value.is_nested:
            parts: Any = (value.values(), value.offsets()) if value.layout is torch.jagged else value.unbind()  # type: ignore[attr-defined]  # a jagged one has offsets
            self.sequence("nested", parts)
            return
        if value.layout is torch.sparse_coo:
            value = value.coalesce()
            self.sequence("sparse", (list(value.shape), value.indices(), value.values()))
            return
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            self.is_partial = True
            self.named(b"?", value)
            return
        if value.device.type != "cpu":
            value = value.cpu()
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        if not value.is_contiguous():
            value = value.contiguous()
        content = hash_at(value.data_ptr(), value.nbytes)
        self.parts.append(b"T%b %b %d;" % (str(value.dtype).encode(), str(tuple(value.shape)).encode(), content))
