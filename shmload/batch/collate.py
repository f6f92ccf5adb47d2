"""Collate samples directly into the bytes of a slot, without a batch in between.

The result equals that of torch's default collate: arrays and numbers are stacked, text becomes lists, and dicts, lists and tuples
of these are transposed. Other samples are treated in one of two ways:

* strict (torch mode, unless `ragged` is given): anything unusual is left to torch's own collate, which may also reject it;
* with a `Ragged` rule: arrays of different shapes become ragged fields and dataclasses become one dataclass of columns; None,
  objects that need pickle, and values of mixed types other than numbers become lists. Only sequences of different lengths are
  rejected, unless the rule takes them for rows.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shmload.batch.element_types import of_numpy, of_torch
from shmload.batch.layout import NUMBERS, filled, is_plain_tensor, is_sequence
from shmload.batch.packed_batch import ATOMS, Node, PackedBatch, Packer, is_record
from shmload.batch.ragged import AS_LISTS, Ragged, Rows, check_rows, ragged_node, stacked
from shmload.batch.registered_functions import RegisteredFunctions
from shmload.batch.uneven import Uneven
from shmload.errors import SampleError

SMALL_NBYTES = 4096  # a copy of so many bytes takes less time than checking a tensor


class _UnusualError(Exception):
    """Raised if the samples must be left to torch's own collate."""


def samples_in(batch: Any) -> list[Any] | None:
    """Return the samples in the result of `__getitems__`; None if only torch's own collate can interpret it.

    A list, a tuple and an array of numbers give the same batch as the list of their elements.
    """
    kind = type(batch)
    if kind is list:
        samples: list[Any] = batch
        return samples
    if kind is tuple or (kind is np.ndarray and batch.ndim > 0 and of_numpy(batch.dtype) is not None):
        return list(batch)
    return None


def pack_samples(batch: Any, ragged: Ragged | None, functions: RegisteredFunctions | None) -> PackedBatch | None:
    """Collate samples into a batch that can be written to a slot. Return None if torch's own collate must make the batch.

    The result refers to the samples; nothing is copied before `PackedBatch.write`.

    Args:
        batch: the samples, usually in a list, or another result of the dataset's `__getitems__`.
        ragged: the rule for ragged fields; None is strict.
        functions: the collate functions that the user has registered with torch.
    Raises:
        SampleError: the rule does not allow these samples.
    """
    samples = samples_in(batch)
    if samples is None or (functions is not None and ragged is None):
        return None
    packer = Packer()
    columns = _Columns(packer, ragged, functions)
    is_tuple = type(batch) is tuple
    try:
        node = columns.node(samples, "", is_tuple=is_tuple)
    except _UnusualError:
        return None
    columns.check_names()
    node = ("tupled", node) if is_tuple and node[0] == "text" else node
    return packer.packed(node if columns.uneven is None else ("uneven", tuple(columns.uneven), node))


def difference_note(batch: Any, keys: Sequence[Any] | None) -> str:
    """Return the note for an error of torch's default collate: the samples that differ. It is empty if none do.

    Args:
        batch: the samples, as for `pack_samples`.
        keys: the keys of the samples, if they are known.
    """
    columns = _Columns(Packer(), AS_LISTS, None)
    try:
        columns.node(samples_in(batch) or [], "")
    except SampleError as error:
        return f"shmload: {error}"
    except Exception:  # the samples may be anything, and the error already says what torch makes of them
        return ""
    if (found := columns.uneven) is None:
        return ""
    modes = '"pad" or "list"' if found.can_pad else '"list"'
    return f"shmload: field {found.field!r}: {found.difference(keys)}. Make the samples alike, or give ragged={modes}"


_ANY_NUMBER = (int, float, np.number, np.bool_)


class _Columns:
    """A collator of the samples of one batch into nodes (packed_batch.py), one column per leaf of their structure."""

    def __init__(self, packer: Packer, ragged: Ragged | None, functions: RegisteredFunctions | None) -> None:
        self._packer = packer
        self._ragged = ragged
        self._functions = functions
        self._seen: list[str] = []  # array fields that are stacked or ragged
        self._places: set[str] = set()  # paths of everything else, too; the path of the samples themselves is empty
        self.uneven: Uneven | None = None  # the first field that is a list only because the samples of this batch differ

    def check_names(self) -> None:
        """Raise SampleError if a field that was declared ragged is missing."""
        missing = set(self._ragged.of_field).difference(self._seen) if self._ragged else ()
        if missing and (missing := set(filter(self._is_missing, missing))):
            raise SampleError(
                f"ragged names {', '.join(sorted(map(repr, missing)))}, but samples have arrays only in "
                f"{', '.join(map(repr, self._seen)) or 'no field'}"
            )

    def _is_missing(self, name: str) -> bool:
        """Return whether samples lack a field that is not among the arrays. A container of arrays does not count as one."""
        if name not in self._places:
            return name != "data" or self._places != {""}
        return any(array.startswith(f"{name}.") for array in self._seen)

    def node(self, values: list[Any], name: str, *, is_tuple: bool = False) -> Node:
        """Return the node of the samples' values at one place of their structure.

        Args:
            values: the values, one per sample.
            name: path of the place, for errors.
            is_tuple: whether torch would pass the values to a registered function as a tuple.
        """
        self._places.add(name)
        head = values[0]
        kind = type(head)
        kinds = set(map(type, values))
        if self._functions is not None and (function := self._functions.function_of(head)) is not None:
            return self._packer.node(function(tuple(values) if is_tuple else values))
        if kinds == {str} or kinds == {bytes}:
            return self._packer.text(values)
        if len(kinds) == 1:
            if kind in NUMBERS:
                return self._numbers(values, name)
            if kind is np.ndarray or kind is np.memmap or isinstance(head, np.generic):
                return self._arrays(values, name)
            if kind.__module__ == "torch" and kind.__name__ == "Tensor":
                return self._tensors(values, name)
            if kind is dict:
                return self._dicts(values, name)
            if isinstance(head, tuple) and hasattr(head, "_fields"):
                return "named", pickle.dumps(kind), self._transposed(values, name)
        if kinds <= {tuple, list}:
            return self._sequences(values, name)
        if (torch := sys.modules.get("torch")) is not None and all(isinstance(v, torch.Tensor) for v in values):
            return self._unusual_tensors(values, name)
        if self._ragged is None:
            raise _UnusualError
        if all(isinstance(value, Mapping) for value in values):
            return self._mappings(values, name)
        if len(kinds) == 1 and is_record(kind):
            names = [f.name for f in dataclasses.fields(head)]
            columns = [self.node([getattr(v, n) for v in values], _joined(name, n)) for n in names]
            return "record", pickle.dumps(kind), names, columns
        are_arrays = all(isinstance(value, np.ndarray) or is_tensor(value) for value in values)
        if not are_arrays and all(map(_is_number, values)):
            return self._unlike_numbers(values, name)
        if are_arrays and (isinstance(head, np.ndarray) or self._joins(name) is not None):
            return self._promoted(values, name)
        if all(map(is_sequence, values)):
            return self._sequences(values, name)
        return self._list(values, name)

    # ------------------------------------------------------------ leaves

    def _numbers(self, values: list[Any], name: str) -> Node:
        try:
            return self._packer.tensor(np.array(values, NUMBERS[type(values[0])]))
        except OverflowError:  # as torch's collate does
            return self._list(values, name)

    def _unlike_numbers(self, values: list[Any], name: str) -> Node:
        """Collate numbers of several types, of a subclass such as IntEnum, or beside 0-d arrays, as torch does.

        Others become a list.
        """
        import torch

        try:
            if isinstance(values[0], np.ndarray):  # in a worker, torch's collate would keep the first one's dtype
                return self._packer.node(torch.stack([torch.as_tensor(value) for value in values]))
            return self._packer.node(torch.utils.data.default_collate(values))
        except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError):  # the last one only in workers
            return self._list(values, name)

    def _arrays(self, values: list[Any], name: str) -> Node:
        """Collate arrays or numpy scalars."""
        dtype = values[0].dtype
        element = of_numpy(dtype)
        if element is None or [v.dtype for v in values].count(dtype) != len(values):
            return self._promoted(values, name)
        if isinstance(values[0], np.generic):
            return self._packer.tensor(np.array(values, dtype))
        return self._rows(Rows(values, element.name), name)

    def _tensors(self, values: list[Any], name: str) -> Node:
        dtype = values[0].dtype
        element = of_torch(dtype)
        if element is not None and (whole := self._stacked_at_once(values, name)) is not None:
            self._seen.append(name or "data")
            return self._packer.node(whole)
        if element is None or not all(v.dtype is dtype and is_plain_tensor(v) for v in values):
            return self._unusual_tensors(values, name)
        return self._rows(Rows(values, element.name), name)

    def _stacked_at_once(self, values: list[Any], name: str) -> Any:
        """Return small tensors as one of their dtype; None if they are not small, or differ, or are delivered in another form.

        Checking each of them would take 1 us, and stacking it takes 0.1.
        """
        first, rule = values[0], self._ragged
        if not is_plain_tensor(first) or first.nbytes > SMALL_NBYTES or first.shape != values[-1].shape:
            return None
        if rule is not None and rule.mode(name or "data") is not None:
            return None
        try:
            whole = sys.modules["torch"].stack(values)
        except (RuntimeError, TypeError):  # they differ in shape, device or layout
            return None
        return whole if whole.dtype is first.dtype else None  # otherwise their dtypes differ

    def _unusual_tensors(self, values: list[Any], name: str) -> Node:
        """Collate tensors that are not plain memory (subclasses, Parameters, requiring grad, quantized) as torch does."""
        rule, first = self._ragged, values[0]
        if rule is None:
            raise _UnusualError
        if all(type(v).__name__ == "Tensor" and is_plain_tensor(v) for v in values):
            return self._promoted(values, name)
        is_strided = all(str(v.layout) == "torch.strided" and not v.is_nested for v in values)
        if rule.mode(name or "data") is not None or not is_strided or any(v.shape != first.shape for v in values):
            return self._list(values, name)
        try:
            return self._packer.node(sys.modules["torch"].stack(values))
        except RuntimeError:  # their dtypes cannot be promoted to a common one
            return self._list(values, name)

    def _promoted(self, values: list[Any], name: str) -> Node:
        """Collate arrays or tensors of several dtypes in the dtype of torch's collate; a list if there is none.

        Rows of several shapes become a list, too, unless the field is joined.
        """
        if self._ragged is None:
            raise _UnusualError
        import torch

        if self._joins(name) is None and any(v.shape != values[0].shape for v in values):
            return self._list(values, name)
        try:
            tensors = [torch.as_tensor(_writable(v)) for v in values]
            dtypes = {tensor.dtype: None for tensor in tensors}
            dtype = tensors[0].dtype if len(dtypes) == 1 else torch.stack([torch.empty(0, dtype=each) for each in dtypes]).dtype
            tensors = [tensor.to(dtype) for tensor in tensors]
            element = of_torch(dtype)
            if element is not None and all(map(is_plain_tensor, tensors)):
                return self._rows(Rows(tensors, element.name), name)
            if self._ragged.mode(name or "data") is None:
                return self._packer.node(torch.stack(tensors))
        except (TypeError, ValueError, RuntimeError):
            pass
        return self._list(values, name)

    def _rows(self, rows: Rows, name: str) -> Node:
        """Collate rows of one dtype. They are stacked if their shapes are equal and no ragged mode was requested."""
        name = name or "data"
        self._seen.append(name)
        rule, shapes = self._ragged, rows.shapes
        mode = None if rule is None or (not shapes[0] and rows.is_even) else rule.mode(name)
        if mode is None:
            if rows.is_even:
                return "tensor", rows.dtype, (len(shapes), *shapes[0]), None, self._packer.place(*stacked(rows))
            if rule is None:
                raise _UnusualError
            if rule.is_certain:
                other = next(shape for shape in shapes if shape != shapes[0])
                raise SampleError(
                    f"field {name!r} has rows of shapes {shapes[0]} and {other}, and was not declared ragged: add it to "
                    "ragged={...}, or give it a None dimension in the dataset's schema"
                )
            self._note_uneven(rows.arrays, name)
            mode = "list"
        assert rule is not None
        if len(set(map(len, shapes))) > 1:
            if mode == "list":
                return self._list(rows.arrays, name)
            raise SampleError(f'field {name!r} has rows of different numbers of dimensions: only ragged="list" takes these')
        dims = rule.dims.get(name, (0,))
        if mode != "list":
            check_rows(name, rows, dims)
        return ragged_node(self._packer, rows, mode, dims)

    def _joins(self, name: str) -> str | None:
        """Return the mode of a field whose rows must be joined to one tensor in every batch; None for any other field."""
        mode = None if self._ragged is None else self._ragged.mode(name or "data")
        return None if mode == "list" else mode

    def _check_no_row_joins(self, values: list[Any], name: str) -> None:
        """Check values that become a list: if the field is joined, none of them is an array, so other batches are lists too."""
        mode = self._joins(name)
        if mode is None or not any(map(_is_row, values)):
            return
        rows: dict[str, int] = {}
        for number, value in enumerate(values):
            rows.setdefault(_described(value), number)
        raise SampleError(
            f'ragged="{mode}" cannot join the rows of field {name or "data"!r}: '
            f"{', '.join(f'row {number} is {what}' for what, number in rows.items())}. Give each row as a plain array or tensor "
            "without grad, of one dtype, and an empty one where there is no value; or name the fields to join"
        )

    def _list(self, values: list[Any], name: str) -> Node:
        """Return the values as a list."""
        if self._ragged is None:
            raise _UnusualError
        self._check_no_row_joins(values, name)
        if self._joins(name) is not None:
            self._places.discard(name)  # a list in place of joined rows, as of None alone, must not pass for the field
        self._note_uneven(values, name)
        if not any(isinstance(value, np.ndarray) for value in values):
            return self._packer.node(values)
        nodes = [self._packer.node(v) for v in values]
        return "list", [("tensor", *node[1:]) if node[0] == "array" else node for node in nodes]

    def _note_uneven(self, values: list[Any], name: str) -> None:
        """Note the field, if its values become a list in this batch although one of them alone would be stacked or transposed."""
        rule = self._ragged
        if self.uneven is not None or rule is None or rule.lists_are_rows or rule.mode(name or "data") is not None:
            return
        first = next((row for row, value in enumerate(values) if _is_collated(value)), None)
        if first is None:
            return
        kind = _described_shape(values[first])
        other = next((row for row, value in enumerate(values) if _described_shape(value) != kind), None)
        if other is not None:
            kinds = kind, _described_shape(values[other])
            can_pad = all(map(_is_row, values)) and len({tuple(np.shape(value)[1:]) for value in values}) == 1
            self.uneven = Uneven(name or "data", len(values), (first, other), kinds, can_pad)

    # ------------------------------------------------------------ containers

    def _dicts(self, values: list[dict[Any, Any]], name: str) -> Node:
        keys = list(values[0])
        if not set(map(type, keys)) <= ATOMS:
            raise _UnusualError
        for number, value in enumerate(values):
            if list(value) != keys and value.keys() != values[0].keys():  # comparing lists takes half the time
                if self._ragged is None:  # torch ignores keys that the first sample lacks
                    raise _UnusualError
                raise SampleError(
                    f"row {number} of the batch has the keys {list(value)}, and row 0 has {keys}: samples of one batch need the "
                    "same keys. Add what is missing"
                )
        return "dict", keys, [self.node([v[key] for v in values], _joined(name, key)) for key in keys]

    def _mappings(self, values: list[Any], name: str) -> Node:
        """Collate mappings that are not dicts into one of the same class, which contains columns."""
        _, keys, columns = self._dicts(values, name)
        like = filled(values[0], dict.fromkeys(keys))
        return ("dict", keys, columns) if type(like) is dict else ("filled", keys, columns, self._packer.foreign(like))

    def _sequences(self, values: list[Any], name: str) -> Node:
        """Collate sequences row by row if the rule says that they are rows, and transposed, as torch does, otherwise."""
        rule, field = self._ragged, name or "data"
        if rule is not None and (field in rule.of_field or (rule.lists_are_rows and not isinstance(values[0], tuple))):
            arrays = _as_arrays(values)
            if arrays is not None:
                return self._rows(Rows(arrays, str(arrays[0].dtype)), name)
            self._check_no_row_joins(values, name)
            is_list = name or field in rule.of_field  # a sample that is a list is the container of its fields
            if is_list and (self._joins(name) is None or not any(map(_has_parts, values))):
                return self._packer.node(values)
        lengths = [len(value) for value in values]
        if lengths.count(lengths[0]) == len(lengths):
            return self._sequence(values, name)
        if rule is None:
            raise _UnusualError
        other = next(number for number, length in enumerate(lengths) if length != lengths[0])
        raise SampleError(
            f"field {field!r} has sequences of different lengths ({lengths[0]} in row 0, {lengths[other]} in row {other}), which "
            f"cannot be transposed as torch does. For a list of rows, give ragged={{{field!r}: 'list'}}, or make each an array"
        )

    def _sequence(self, values: list[Any], name: str) -> Node:
        """Collate sequences of equal length into one of the first one's class, which contains columns."""
        columns, head = self._transposed(values, name), values[0]
        if isinstance(head, tuple) and hasattr(head, "_fields"):
            return "named", pickle.dumps(type(head)), columns
        return (
            ("list", columns)
            if type(head) is list or isinstance(head, tuple)
            else ("sequence", columns, self._packer.foreign(head))
        )

    def _transposed(self, values: list[Any], name: str) -> list[Node]:
        columns = [self.node(list(column), _joined(name, i), is_tuple=True) for i, column in enumerate(zip(*values, strict=True))]
        return [("tupled", column) if column[0] == "text" else column for column in columns]  # as in torch's collate


def _as_arrays(values: list[Any]) -> list[np.ndarray[Any, Any]] | None:
    """Return lists of numbers as arrays of the dtype that torch's collate uses for Python numbers; None if they are not numbers."""
    kinds = {type(number) for value in values for number in value}
    if not kinds <= {int, float}:
        return None
    dtype = np.float64 if float in kinds else np.int64
    try:
        return [np.array(value, dtype) for value in values]
    except OverflowError:
        return None


def _is_row(value: Any) -> bool:
    """Return whether a value is an array, a tensor or a list of numbers, with elements that can be joined with other rows."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind in "biufc"
    if is_tensor(value):
        is_strided = value.layout is sys.modules["torch"].strided and not value.is_nested
        return bool(is_strided and value.ndim > 0 and of_torch(value.dtype) is not None)
    return is_sequence(value) and len(value) > 0 and {type(number) for number in value} <= {int, float}


def _has_parts(value: Sequence[Any]) -> bool:
    """Return whether a sequence contains arrays, tensors or containers, which torch's collate makes batches of."""
    return any(isinstance(part, (np.ndarray, Mapping)) or is_tensor(part) or is_sequence(part) for part in value)


def _is_collated(value: Any) -> bool:
    """Return whether a batch of such values alone is not a list of them: numbers and arrays are stacked, containers transposed."""
    if is_tensor(value):
        return value.layout is sys.modules["torch"].strided and not value.is_nested
    if isinstance(value, np.ndarray):
        return of_numpy(value.dtype) is not None
    return isinstance(value, (*_ANY_NUMBER, Mapping)) or is_sequence(value) or is_record(type(value))


def _described_shape(value: Any) -> str:
    """Return the type of a value, and the dtype and shape of an array."""
    if isinstance(value, np.ndarray) or is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return "None" if value is None else f"of type {type(value).__name__}"


def _described(value: Any) -> str:
    """Return what a row is, for errors."""
    if value is None:
        return "None"
    kind = type(value).__name__
    more = ""
    if is_tensor(value):
        if value.requires_grad:
            more = ", and requires grad"
        elif value.is_conj() or value.is_neg():
            more = ", and is conjugated or negated lazily (give tensor.resolve_conj().resolve_neg())"
    elif isinstance(value, np.ndarray):
        if not value.dtype.isnative:
            more = ", and has the other byte order (give array.astype(array.dtype.newbyteorder('=')))"
    else:
        is_large = _is_row(value) and any(type(number) is int and not -(1 << 63) <= number < 1 << 63 for number in value)
        return f"of type {kind}{' with an integer beyond int64' if is_large else ''}"
    return f"of type {kind}, {str(value.dtype).removeprefix('torch.')}{more}"


def _is_number(value: Any) -> bool:
    """Return whether torch's collate may take a value for a number: 0-d arrays and tensors, too, beside others."""
    return isinstance(value, (*_ANY_NUMBER, complex)) or ((isinstance(value, np.ndarray) or is_tensor(value)) and value.ndim == 0)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without an import of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _writable(value: Any) -> Any:
    """Return an array that torch accepts without a warning; a tensor is returned as it is."""
    return np.array(value) if isinstance(value, np.ndarray) and not value.flags.writeable else value


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
