"""Build the batch that the trainer receives from a leased slot: from fixed rows, or from a packed batch (`packed_batch.py`).

Each array is a DLPack capsule over the slot; torch's storage owns the capsule and with it the lease, so whatever aliases the
storage (a slice, `.numpy()`, a parameter, an autograd graph) keeps the slot from being used again.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import marshal
import math
import pickle
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shmload import faults
from shmload._core.outline import join, split
from shmload._core.text import read_text
from shmload._core.trainer import Lease
from shmload.batch.element_types import ELEMENT_TYPES, FLOAT8_CODE, UINT_CODE, ElementType
from shmload.batch.layout import Layout, filled, is_sequence, sequence_like, structure
from shmload.batch.packed_batch import INDICES_OF, PackedBatch, is_plain_record, placed
from shmload.torch_names import DLPACK_HAS_FLOAT8, NestedTensor, from_dlpack, without_torch_function


class Padded(NamedTuple):
    """The rows of a ragged field, padded with zeros to the longest of the batch: `ragged="pad"`.

    Attributes:
        values: shape `(batch_size, longest, ...)`, the samples' dtype; aliases the slot as every tensor of a batch does.
        lengths: length of each row, int64, shape `(batch_size,)`; `(batch_size, k)` if the schema has k ragged dimensions.
    Example:
        >>> import numpy as np
        >>> from shmload import ShmLoader
        >>> (batch,) = ShmLoader([np.arange(1), np.arange(3)], batch_size=2, ragged="pad")
        >>> batch.values.tolist(), batch.lengths.tolist()
        ([[0, 0, 0], [0, 1, 2]], [1, 3])
    """

    values: torch.Tensor
    lengths: torch.Tensor


class Jagged(NamedTuple):
    """The rows of a ragged field, end to end: `ragged="jagged"`, the form used by attention over sequences of varying length.

    Row i is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: shape `(sum of lengths, ...)`, the samples' dtype; aliases the slot as every tensor of a batch does.
        offsets: offset of each row and the end of the last one; int64, shape `(batch_size + 1,)`.
    Example:
        >>> import numpy as np
        >>> from shmload import ShmLoader
        >>> (batch,) = ShmLoader([np.arange(1), np.arange(3)], batch_size=2, ragged="jagged")
        >>> batch.values.tolist(), batch.offsets.tolist()
        ([0, 0, 1, 2], [0, 1, 4])
    """

    values: torch.Tensor
    offsets: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """Return the length of each row, int64, shape `(batch_size,)`."""
        return self.offsets.diff()


@faults.at("mapping")
def deliver_rows(layout: Layout, lease: Lease, nrows: int) -> tuple[Any, int]:
    """Return the batch of `nrows` fixed rows in a leased slot, whose tensors alias the slot and keep the lease; and its size."""
    plan, nbytes, viewed = _plan(layout, nrows)
    names = layout.names
    if names is not None and not viewed:
        return lease.tensors(plan, from_dlpack, names), nbytes
    tensors = lease.tensors(plan, from_dlpack)
    for number, dtype in viewed:
        tensors[number] = tensors[number].view(dtype)
    return tensors[0] if layout.tree[0] == "leaf" else structure(layout.tree, tensors), nbytes


@functools.lru_cache(maxsize=64)
def _plan(layout: Layout, nrows: int) -> tuple[tuple[tuple[Any, ...], ...], int, tuple[tuple[int, torch.dtype], ...]]:
    """Return for each field the arguments of its capsule (offset, DLPack code, bits, shape) or of an empty tensor; the total size
    in bytes; and the fields that must be viewed as another dtype.
    """
    offsets, nbytes = layout.place(nrows)
    plan = tuple(
        (at, _code(f.element), f.element.itemsize * 8, (nrows, *f.shape))
        if nrows * f.row_nbytes
        else (-1, torch.empty, (nrows, *f.shape), getattr(torch, f.dtype))
        for f, at in zip(layout.fields, offsets, strict=True)
    )
    viewed = tuple((n, getattr(torch, f.dtype)) for n, f in enumerate(layout.fields) if _code(f.element) != f.element.code)
    return plan, nbytes, viewed


def _code(element: ElementType) -> int:
    """Return the DLPack code of the capsule. Eight-bit floats are passed as bytes if this torch lacks their codes."""
    return element.code if element.code < FLOAT8_CODE or DLPACK_HAS_FLOAT8 else UINT_CODE


class LeasedBatch:
    """A packed batch in a leased slot. `meta()` returns its last part, which describes the others."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.meta = lease.meta

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a tensor over the slot at `offset`; the tensor keeps the lease."""
        element = ELEMENT_TYPES[dtype]
        code = _code(element)
        tensor = from_dlpack(self._lease.capsule(offset, code, element.itemsize * 8, shape))
        return tensor if code == element.code else tensor.view(getattr(torch, dtype))

    def text(self, count: int, nbytes: int, offset: int, kind: int) -> list[Any]:
        """Return the text column of `count` values and `nbytes` bytes at `offset` as independent objects; `kind`: src/text.pyx."""
        lease = self._lease
        if offset + nbytes > lease.nbytes:
            raise ValueError(f"a text column of {nbytes} bytes at {offset} ends beyond the slot of {lease.nbytes}")
        return read_text(lease.address + offset, nbytes, count, kind)


class PrivateBatch:
    """A packed batch in private memory, used if there is no ring."""

    def __init__(self, packed: PackedBatch) -> None:
        self._room, self._meta = np.empty(packed.nbytes, np.uint8), packed.meta
        packed.write(self._room)

    def meta(self) -> bytes:
        """Return its last part, which describes the others."""
        return self._meta

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a tensor over the memory, which keeps it alive."""
        nbytes = math.prod(shape) * ELEMENT_TYPES[dtype].itemsize
        return torch.from_numpy(self._room[offset : offset + nbytes]).view(getattr(torch, dtype)).view(shape)

    def text(self, count: int, nbytes: int, offset: int, kind: int) -> list[Any]:
        """Return a column of text as independent objects."""
        return read_text(self._room.ctypes.data + offset, nbytes, count, kind)


def copied(batch: Any) -> Any:
    """Return the batch with every tensor and array copied to private memory, so that its slot can be released at once."""
    return mapped(batch, _cloned, _copied_leaf)


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor.clone()
    try:
        return copy.deepcopy(tensor)  # clone() of a leaf that requires grad is not a leaf, and clone() of a Parameter is a Tensor
    except RuntimeError:  # torch deep-copies a user's class only if that class returns empty tensors of itself
        with without_torch_function():
            private = tensor.detach().clone().as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)
        private.__dict__.update(copy.deepcopy(tensor.__dict__))
        return private


def _copied_leaf(leaf: Any) -> Any:
    return leaf.copy(order="K") if isinstance(leaf, np.ndarray) else copy.deepcopy(leaf)


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return whether the tensor consists of several tensors (see `parts_of`)."""
    return str(tensor.layout) in INDICES_OF


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that a tensor consists of: itself if it is dense, else its values and then its indices."""
    names = INDICES_OF.get(str(tensor.layout))
    if names is None:
        return [tensor] if tensor.layout is torch.strided else []
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return [values, *(getattr(tensor, name)() for name in names)]


def made_sparse(layout: str, shape: tuple[int, ...], is_coalesced: bool, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Build a sparse tensor from its parts, which it aliases; `parts` is as returned by `parts_of`."""
    values, *indices = parts
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(indices[0], values, shape, is_coalesced=is_coalesced, check_invariants=False)
    return torch.sparse_compressed_tensor(
        indices[0], indices[1], values, shape, layout=getattr(torch, layout), check_invariants=False
    )


def mapped(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor], of_leaf: Callable[[Any], Any]) -> Any:
    """Build the same structure around other leaves.

    Args:
        batch: the structure.
        of_tensor: maps each tensor; a nested tensor is rebuilt from its mapped parts.
        of_leaf: maps everything that is neither a tensor nor a structure. Not called for None, numbers and short text.
    """
    if isinstance(batch, NestedTensor):
        values, offsets, lengths = batch._values, batch._offsets, batch._lengths
        return torch.nested.nested_tensor_from_jagged(  # clone() would share the offsets
            of_tensor(values), of_tensor(offsets), None if lengths is None else of_tensor(lengths), batch._ragged_idx
        )
    if isinstance(batch, torch.Tensor):
        return of_tensor(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(v, of_tensor, of_leaf) for v in batch))
    if type(batch) in (list, tuple, dict):
        outline, leaves = split(batch)
        if outline is not Ellipsis:
            return join(outline, [mapped(leaf, of_tensor, of_leaf) for leaf in leaves])
        if type(batch) is dict:  # with keys of other classes
            return {k: mapped(v, of_tensor, of_leaf) for k, v in batch.items()}
        return [mapped(v, of_tensor, of_leaf) for v in batch]
    if isinstance(batch, Mapping):
        like = of_leaf(filled(batch, dict.fromkeys(batch)))  # keeps its other attributes
        return filled(like, {k: mapped(v, of_tensor, of_leaf) for k, v in batch.items()})
    if is_sequence(batch) and not isinstance(batch, (tuple, range, array)):
        like = of_leaf(sequence_like(batch, [None] * len(batch)))
        return sequence_like(like, [mapped(v, of_tensor, of_leaf) for v in batch])
    if is_plain_record(batch):
        record = copy.copy(batch)
        for name in vars(batch):
            leaf = mapped(getattr(batch, name), of_tensor, of_leaf)
            object.__setattr__(record, name, leaf)  # works for frozen dataclasses, too
        return record
    return of_leaf(batch)


BatchMemory = LeasedBatch | PrivateBatch


@faults.at("mapping")
def unpack(source: BatchMemory) -> Any:
    """Build the batch from its packed form. Its tensors and arrays alias `source` and keep it alive."""
    return _built(source, marshal.loads(source.meta()))


def _built(source: BatchMemory, node: tuple[Any, ...]) -> Any:
    """Build the object of a node (see `packed_batch.py`)."""
    return _BUILDERS[node[0]](source, *node[1:])


def _all(source: BatchMemory, nodes: Iterable[tuple[Any, ...]]) -> list[Any]:
    return [_built(source, node) for node in nodes]


def _tensor(source: BatchMemory, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype)) if 0 in shape else source.tensor(dtype, shape, offset)
    return tensor if strides is None else tensor.as_strided(shape, strides)


def _rows(source: BatchMemory, dtype: str, numels: list[int], shapes: list[tuple[int, ...]] | None, offset: int) -> list[Any]:
    parts = _tensor(source, dtype, (sum(numels),), None, offset).split(numels)  # type: ignore[no-untyped-call]  # torch's function
    return list(parts) if shapes is None else [part.view(s) for part, s in zip(parts, shapes, strict=True)]


def _row_arrays(
    source: BatchMemory, dtype: str, numels: list[int], shapes: list[tuple[int, ...]], offset: int
) -> list[np.ndarray[Any, Any]]:
    flat = _tensor(source, dtype, (sum(numels),), None, offset).numpy()
    if shapes[0] and shapes.count(shapes[0]) == len(shapes):
        return list(flat.reshape(len(shapes), *shapes[0]))
    ends = itertools.accumulate(numels)
    return [flat[end - numel : end].reshape(shape) for end, numel, shape in zip(ends, numels, shapes, strict=True)]


def _outlined(source: BatchMemory, outline: Any, groups: list[tuple[list[int], tuple[Any, ...]]]) -> Any:
    """Build what an outline and its groups of leaves describe."""
    leaves: list[Any] = [None] * sum(len(numbers) for numbers, _ in groups)
    for numbers, node in groups:
        for number, leaf in zip(numbers, _built(source, node), strict=True):
            leaves[number] = leaf
    return join(outline, leaves)


def _nested(source: BatchMemory, values: tuple[Any, ...], offsets: tuple[Any, ...], shortest: int, longest: int) -> torch.Tensor:
    parts = _built(source, values), _built(source, offsets)
    return torch.nested.nested_tensor_from_jagged(*parts, min_seqlen=shortest, max_seqlen=longest)


def _sparse(
    source: BatchMemory, layout: str, shape: tuple[int, ...], is_coalesced: bool, indices: list[Any], values: tuple[Any, ...]
) -> torch.Tensor:
    return made_sparse(layout, shape, is_coalesced, _all(source, [values, *indices]))


def _record(source: BatchMemory, kind: bytes, names: list[str], nodes: list[tuple[Any, ...]]) -> Any:
    (record,) = _records(pickle.loads(kind), names, [_all(source, nodes)])
    return record


def _records(kind: type, names: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[Any]:
    """Build one instance of a dataclass for each row of values, without running __init__ and __post_init__."""
    records: list[Any] = []
    for values in rows:
        records.append(object.__new__(kind))
        for name, value in zip(names, values, strict=True):
            object.__setattr__(records[-1], name, value)  # works for frozen dataclasses, too
    return records


class _ForeignUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, source: BatchMemory) -> None:
        super().__init__(io.BytesIO(pickled))
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return functools.partial(_built, self._source) if found is placed else found


# Builders by kind of node. They are functions, because closures that call each other are a reference cycle, which keeps the lease
# until the garbage collector runs.
_BUILDERS: dict[str, Callable[..., Any]] = {
    "value": lambda source, value: value,
    "outline": _outlined,
    "first": lambda source, node: _built(source, node)[0],
    "text": lambda source, *place: source.text(*place),
    "tensor": _tensor,
    "array": lambda source, *place: _tensor(source, *place).numpy(),
    "list": _all,
    "tuple": lambda source, nodes: tuple(_all(source, nodes)),
    "tupled": lambda source, node: tuple(_built(source, node)),
    "dict": lambda source, keys, nodes: dict(zip(keys, _all(source, nodes), strict=True)),
    "filled": lambda source, keys, nodes, like: filled(_built(source, like), dict(zip(keys, _all(source, nodes), strict=True))),
    "sequence": lambda source, nodes, like: sequence_like(_built(source, like), _all(source, nodes)),
    "named": lambda source, kind, nodes: pickle.loads(kind)(*_all(source, nodes)),
    "named rows": lambda source, kind, node: list(itertools.starmap(pickle.loads(kind), _built(source, node))),
    "record": _record,
    "record rows": lambda source, kind, names, node: _records(pickle.loads(kind), names, _built(source, node)),
    "rows": _rows,
    "row arrays": _row_arrays,
    "padded": lambda source, *nodes: Padded(*_all(source, nodes)),
    "jagged": lambda source, *nodes: Jagged(*_all(source, nodes)),
    "nested": _nested,
    "sparse": _sparse,
    "foreign": lambda source, pickled: _ForeignUnpickler(pickled, source).load(),
}
