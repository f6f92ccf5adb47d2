"""From the bytes of a packed batch (`packed.py`) back to its objects; arrays and tensors stay where they are."""

from __future__ import annotations

import io
import marshal
import pickle
from typing import Any, Protocol

import torch

from shmload import faults
from shmload.batch.delivered import Jagged, Padded
from shmload.batch.packed import (
    ARRAY,
    DICT,
    FOREIGN,
    JAGGED,
    LIST,
    NAMED,
    NESTED,
    PADDED,
    RECORD,
    ROWS,
    SPARSE,
    TENSOR,
    TEXT,
    TUPLE,
    TUPLED,
    VALUE,
)


class Source(Protocol):
    """Memory that holds a packed batch."""

    def meta(self) -> bytes:
        """Its last part, which says what the others are."""

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """A C-order tensor over it."""

    def text(self, count: int, nbytes: int, offset: int, kind: int) -> list[Any]:
        """The column that lies there, as objects of their own."""


@faults.at("mapping")
def unpack(source: Source) -> Any:
    """The batch in a source."""
    return _Builder(source).build(marshal.loads(source.meta()))


class _Builder:
    """Turns nodes back into objects. A class and not a closure that calls itself: that would be a reference cycle, and hold the
    lease until the garbage collector comes by."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def build(self, node: tuple[Any, ...]) -> Any:
        kind = node[0]
        if kind == VALUE:
            return node[1]
        if kind in (TENSOR, ARRAY):
            return self._array(node)
        if kind == TEXT:
            return self._source.text(*node[1:])
        if kind == TUPLED:
            return tuple(self.build(node[1]))
        if kind == DICT:
            return {k: self.build(n) for k, n in zip(node[1], node[2], strict=True)}
        if kind == LIST:
            return [self.build(n) for n in node[1]]
        if kind == TUPLE:
            return tuple([self.build(n) for n in node[1]])
        if kind == ROWS:
            return self._rows(*node[1:])
        if kind == PADDED:
            return Padded(self.build(node[1]), self.build(node[2]))
        if kind == JAGGED:
            return Jagged(self.build(node[1]), self.build(node[2]))
        if kind == NESTED:
            return torch.nested.nested_tensor_from_jagged(
                self.build(node[1]), self.build(node[2]), min_seqlen=node[3], max_seqlen=node[4]
            )
        if kind == NAMED:
            return pickle.loads(node[1])(*[self.build(n) for n in node[2]])
        if kind == RECORD:
            return self._record(pickle.loads(node[1]), node[2], node[3])
        if kind == SPARSE:
            return self._sparse(*node[1:])
        assert kind == FOREIGN
        return _ForeignUnpickler(node[1], self).load()

    def _array(self, node: tuple[Any, ...]) -> Any:
        kind, dtype, shape, strides, offset = node
        tensor = self._tensor(dtype, shape, offset)
        if strides is not None:
            tensor = tensor.as_strided(shape, strides)
        return tensor if kind == TENSOR else tensor.numpy()

    def _tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return self._source.tensor(dtype, shape, offset)

    def _rows(self, dtype: str, numels: list[int], shapes: list[tuple[int, ...]] | None, offset: int) -> list[Any]:
        parts = self._tensor(dtype, (sum(numels),), offset).split(numels)  # type: ignore[no-untyped-call]  # torch's own
        return list(parts) if shapes is None else [part.view(s) for part, s in zip(parts, shapes, strict=True)]

    def _sparse(
        self, layout: str, shape: tuple[int, ...], is_coalesced: bool, indices: list[Any], values: tuple[Any, ...]
    ) -> torch.Tensor:
        parts: list[torch.Tensor] = [*map(self.build, indices), self.build(values)]
        if layout == "sparse_coo":
            return torch.sparse_coo_tensor(parts[0], parts[1], shape, is_coalesced=is_coalesced, check_invariants=False)
        return torch.sparse_compressed_tensor(
            parts[0], parts[1], parts[2], shape, layout=getattr(torch, layout), check_invariants=False
        )

    def _record(self, kind: type, names: list[str], nodes: list[tuple[Any, ...]]) -> Any:
        """A dataclass of columns. Its __init__ and __post_init__ are for samples, and are not run."""
        record: Any = object.__new__(kind)
        for name, node in zip(names, nodes, strict=True):
            object.__setattr__(record, name, self.build(node))  # also where it is frozen
        return record


class _ForeignUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, builder: _Builder) -> None:
        super().__init__(io.BytesIO(pickled))
        self._builder = builder

    def persistent_load(self, node: tuple[Any, ...]) -> Any:
        return self._builder.build(node)
