"""Columns: the items of a block as arrays, so that a batch is a slice of what its worker has written.

    items of a block      {"x": a, "y": 1}  {"x": b, "y": 2}  {"x": c, "y": 3}
    its columns           {"x": [a b c], "y": [1 2 3]}
    batches of two        {"x": [a b], "y": [1 2]}  and, with the next block's first item, {"x": [c d], "y": [3 4]}

Only items that are all alike become columns, and a batch of columns equals the collated items, byte for byte. If that is not
certain, blocks stay lists of items, or become lists again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shmload.batch.element_types import of_numpy, of_torch
from shmload.batch.layout import NUMBERS, is_plain_tensor
from shmload.batch.registered_functions import registered_functions

TEXTS = (str, bytes)


class Texts(NamedTuple):
    """A column of strings or bytes, which stays a list."""

    values: list[Any]


class BlockColumns(NamedTuple):
    """A block of items that are all alike.

    Attributes:
        size: number of items.
        kinds: kinds of the leaves, in order: "number", "scalar", "array", "tensor" or "text".
        tree: an item with a column in place of each leaf; tensors of shape (size, ...) or Texts.
    """

    size: int
    kinds: str
    tree: Any


class _Unlike(Exception):
    """Raised if the items are not all alike, or of a kind that columns cannot contain."""


def columns_of(items: Sequence[Any]) -> BlockColumns | None:
    """Return the items as columns, or None if they are not all alike or columns cannot contain them."""
    kinds: list[str] = []
    if not items or registered_functions() is not None:
        return None
    try:
        tree = _column(list(items), kinds)
    except (_Unlike, OverflowError, TypeError, RuntimeError):  # of torch, if it cannot stack the dtype or numpy does not have it
        return None
    return BlockColumns(len(items), " ".join(kinds), tree)


def _column(values: list[Any], kinds: list[str]) -> Any:
    """Return the columns of some values as a tree, and append the kind of each leaf to `kinds`."""
    first = values[0]
    kind = type(first)
    if any(type(value) is not kind for value in values):
        raise _Unlike
    if kind is dict:
        names = list(first)
        if any(list(value) != names for value in values):
            raise _Unlike
        return {name: _column([value[name] for value in values], kinds) for name in names}
    if kind is tuple or kind is list:
        if not first or any(len(value) != len(first) for value in values):
            raise _Unlike
        return kind([_column(list(part), kinds) for part in zip(*values, strict=True)])
    if kind in TEXTS:
        kinds.append("text")
        return Texts(values)
    if kind in NUMBERS:
        kinds.append("number")
        return torch.from_numpy(np.array(values, NUMBERS[kind]))
    if kind is np.ndarray or isinstance(first, np.generic):
        if of_numpy(first.dtype) is None or any(value.dtype != first.dtype or value.shape != first.shape for value in values):
            raise _Unlike
        kinds.append("array" if kind is np.ndarray else "scalar")
        return torch.from_numpy(np.stack(values))
    if (
        kind is torch.Tensor
        and of_torch(first.dtype)
        and all(is_plain_tensor(value) and value.dtype == first.dtype and value.shape == first.shape for value in values)
    ):
        kinds.append("tensor")
        return torch.stack(values)
    raise _Unlike


Block = BlockColumns | list[Any]
Piece = tuple[Block, int, int]  # items start to stop of a block


def length(block: Block) -> int:
    """Return the number of items of a block."""
    return block.size if isinstance(block, BlockColumns) else len(block)


def part_of(pieces: Sequence[Piece], first: int, stop: int) -> list[Piece]:
    """Return items `first` to `stop` of the items of several pieces."""
    found, at = [], 0
    for block, begins, ends in pieces:
        start, end = max(first - at, 0), min(stop - at, ends - begins)
        if start < end:
            found.append((block, begins + start, begins + end))
        at += ends - begins
    return found


def batch_of(pieces: Sequence[Piece]) -> Any:
    """Return the batch of the pieces' items, or None if their columns do not fit together. A single piece is not copied."""
    first = pieces[0][0]
    if not isinstance(first, BlockColumns):
        return None
    trees = [
        (block.tree, start, stop) for block, start, stop in pieces if isinstance(block, BlockColumns) and block.kinds == first.kinds
    ]
    if len(trees) < len(pieces):
        return None
    try:
        return _sliced(trees)
    except (_Unlike, RuntimeError):
        return None


def _sliced(pieces: list[tuple[Any, int, int]]) -> Any:
    tree = pieces[0][0]
    kind = type(tree)
    if len(pieces) > 1 and any(type(other) is not kind for other, _, _ in pieces):
        raise _Unlike
    if kind is torch.Tensor:
        if len(pieces) == 1:
            return tree[pieces[0][1] : pieces[0][2]]
        if any(other.dtype != tree.dtype or other.shape[1:] != tree.shape[1:] for other, _, _ in pieces):
            raise _Unlike
        return torch.cat([part[start:stop] for part, start, stop in pieces])
    if kind is Texts:
        return [value for part, start, stop in pieces for value in part.values[start:stop]]
    if kind is dict:
        if any(list(other) != list(tree) for other, _, _ in pieces):
            raise _Unlike
        return {name: _sliced([(part[name], start, stop) for part, start, stop in pieces]) for name in tree}
    if any(len(other) != len(tree) for other, _, _ in pieces):
        raise _Unlike
    columns = [_sliced([(part[at], start, stop) for part, start, stop in pieces]) for at in range(len(tree))]
    return [tuple(column) if isinstance(part, Texts) else column for column, part in zip(columns, tree, strict=True)]  # like torch


def items_of(pieces: Sequence[Piece]) -> list[Any]:
    """Return the items exactly as the stages made them."""
    found: list[Any] = []
    for block, start, stop in pieces:
        if isinstance(block, BlockColumns):
            makers = _makers(block.tree, iter(block.kinds.split()))
            found += [makers(row) for row in range(start, stop)]
        else:
            found += block[start:stop]
    return found


def _makers(tree: Any, kinds: Any) -> Callable[[int], Any]:
    """Return a function: row -> item, for a tree of columns.

    Args:
        tree: as in `BlockColumns`, or a part of it.
        kinds: iterator over the kinds of the leaves; those of this tree are consumed.
    """
    if isinstance(tree, Texts):
        next(kinds)
        return tree.values.__getitem__
    if isinstance(tree, torch.Tensor):
        kind = next(kinds)
        if kind == "number":
            return lambda row: tree[row].item()
        if kind == "tensor":
            return tree.__getitem__
        array = tree.numpy()
        return lambda row: array[row] if kind == "scalar" else array[row, ...]
    if isinstance(tree, dict):
        named = {name: _makers(part, kinds) for name, part in tree.items()}
        return lambda row: {name: make(row) for name, make in named.items()}
    parts, container = [_makers(part, kinds) for part in tree], type(tree)
    return lambda row: container(make(row) for make in parts)
