"""Build a batch from its packed form (`packed_batch.py`). Its tensors alias the memory of the packed batch."""

from __future__ import annotations

import functools
import io
import itertools
import marshal
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from shmload import faults
from shmload._core.outline import join
from shmload.batch.batch_memory import BatchMemory
from shmload.batch.layout import filled, sequence_like
from shmload.batch.packed_batch import placed
from shmload.batch.ragged_forms import Jagged, Padded
from shmload.batch.sparse_tensors import made_sparse
from shmload.batch.uneven import Uneven


@faults.at("mapping")
def unpack(source: BatchMemory, on_uneven: Callable[[Uneven], None] | None = None) -> Any:
    """Build the batch from its packed form. Its tensors and arrays alias `source` and keep it alive.

    Args:
        source: the memory of the packed batch.
        on_uneven: called if a field is a list because the samples of this batch differ.
    """
    node = marshal.loads(source.meta())
    if node[0] == "uneven":
        _, found, node = node
        if on_uneven is not None:
            on_uneven(Uneven(*found))
    return _built(source, node)


def _built(source: BatchMemory, node: tuple[Any, ...]) -> Any:
    """Build the object of a node (see `packed_batch.py`)."""
    return _BUILDERS[node[0]](source, *node[1:])


def _all(source: BatchMemory, nodes: Iterable[tuple[Any, ...]]) -> list[Any]:
    return [_built(source, node) for node in nodes]


def _tensor(source: BatchMemory, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    if strides is None:
        return source.tensor(dtype, shape, offset)
    held = tuple(extent if stride else 1 for extent, stride in zip(shape, strides, strict=True))
    return source.tensor(dtype, held, offset).as_strided(shape, strides)


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
        if found is placed:
            return functools.partial(_built, self._source)
        return functools.partial(_rebuilt, found) if name == "_rebuild_tensor_v3" else found


def _rebuilt(rebuild: Callable[..., Any], storage: Any, *rest: Any) -> Any:
    """Return a tensor of a dtype without a storage class (uint16), which torch pickles untyped and rebuilds from a typed one."""
    import torch

    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)  # type: ignore[no-untyped-call]
    return rebuild(typed, *rest)


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
