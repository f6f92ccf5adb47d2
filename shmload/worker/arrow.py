"""Read Hugging Face's datasets from their Arrow table directly into the batch.

`datasets` makes a Python object or a small array of every value, and torch's collate joins these again. Where the result is known
to be the same, this module copies the bytes from the mapped file to the slot instead: numbers, lists and arrays of numbers of one
length, text, and lists of different lengths if the loader has a rule for them. `_field_of` defines what a column becomes in a
batch, and the tests compare every batch with torch's DataLoader. All other datasets, even one with a single null in a column, are
read sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from shmload.batch.element_types import of_any, of_numpy
from shmload.batch.ragged import Ragged
from shmload.batch.registered_functions import collates_as_shipped
from shmload.formats.arrow.arrow_column import ArrowColumn, column_of
from shmload.formats.row_numbers import Indices
from shmload.worker.in_place_dataset import InPlace

_FORMATTERS = {  # the only formatters whose results are known here
    None: "datasets.formatting.formatting.PythonFormatter",
    "torch": "datasets.formatting.torch_formatter.TorchFormatter",
    "numpy": "datasets.formatting.np_formatter.NumpyFormatter",
}
Read = Callable[[Indices, Any], None]


class _View:
    """The properties of a dataset that decide how it is read. Its columns are checked once, at construction.

    Attributes:
        columns: the columns of a sample, in order; None if the dataset must be read sample by sample.
    """

    def __init__(self, dataset: Any) -> None:
        self.format = dataset.format
        self.data, self.indices = dataset._data, dataset._indices
        self.columns = self._known_columns(dataset)

    def still_matches(self, dataset: Any) -> bool:
        """Return whether the dataset still has these properties."""
        return dataset._data is self.data and dataset._indices is self.indices and bool(dataset.format == self.format)

    def _known_columns(self, dataset: Any) -> list[ArrowColumn] | None:
        """Return the columns of a sample, in order; None if one of them is of an unknown kind."""
        kind, kwargs = self.format["type"], self.format["format_kwargs"]
        if not len(dataset) or kind not in _FORMATTERS or set(kwargs) - ({"dtype"} if kind else set()):
            return None
        if self.format["output_all_columns"] and set(self.format["columns"]) != set(dataset.column_names):
            return None
        from datasets.formatting import get_formatter

        formatter = type(get_formatter(kind, features=dataset.features, **kwargs))
        if f"{formatter.__module__}.{formatter.__qualname__}" != _FORMATTERS[kind]:
            return None
        columns = []
        for name in dataset.column_names:
            if name not in self.format["columns"]:
                continue
            column = column_of(name, self.data.table.column(name))
            if column is None or dataset.features._column_requires_decoding.get(name, True):
                return None
            columns.append(column)
        return columns or None


_VIEWS: WeakKeyDictionary[Any, _View] = WeakKeyDictionary()


def arrow_in_place(dataset: Any, ragged: Ragged | None) -> InPlace | None:
    """Return the in-place reader of a Hugging Face dataset; None if the dataset must be read sample by sample.

    Args:
        dataset: any dataset.
        ragged: the loader's rule for lists of different lengths.
    Raises:
        TypeError: it is a dict of datasets.
    """
    kind = type(dataset).__name__
    if kind.endswith("DatasetDict"):
        splits = ", ".join(map(repr, dataset))
        raise TypeError(
            f"a loader reads one split of a dataset; got {kind} with {splits or 'no split'}. Pick one: "
            f"ShmLoader(dataset[{next(iter(dataset), 'train')!r}], ...)"
        )
    if kind != "Dataset":
        return None
    view = _VIEWS.get(dataset)
    if view is None or not view.still_matches(dataset):
        view = _VIEWS[dataset] = _View(dataset)
    if view.columns is None:
        return None
    if ragged is not None and not set(ragged.of_field) <= {c.name for c in view.columns if c.extents}:
        return None  # reading sample by sample raises an error with the unknown name
    fields = [_field_of(column, view.format, ragged) for column in view.columns]
    if any(field is None for field in fields):
        return None
    return ArrowRows(view, dict(field for field in fields if field))


class ArrowRows(InPlace):
    """An in-place reader of the rows of a dataset's table.

    `datasets` returns other types for a batch than for a single row (numpy's scalars keep their width in a batch). A ConcatDataset
    reads row by row, so it is not read in place if it contains such a dataset.

    Args:
        view: the properties of the dataset.
        schema: name -> (dtype, shape) of each field.
    """

    reads_rows_alike = False
    takes_all = False

    def __init__(self, view: _View, schema: dict[str, Any]) -> None:
        assert view.columns is not None
        self.schema = schema
        self.batch_type = None
        self.read_into = None
        self.read_batch_into = self._read
        self._mapping = None if view.indices is None else column_of("indices", view.indices.table.column(0))
        self._num_stored = view.data.num_rows
        self._num_rows = self._num_stored if view.indices is None else view.indices.num_rows
        self._readers = [_reader(column, schema[column.name], view.format["type"]) for column in view.columns]

    def takes(self, keys: Any) -> bool:
        """Return whether torch's collate is unchanged: the program has registered no function of its own with it."""
        return collates_as_shipped()

    def _read(self, indices: Any, out: Any) -> None:
        rows = self._stored(np.asarray(indices, np.int64))
        for read in self._readers:
            read(rows, out)

    def _stored(self, rows: Indices) -> Indices:
        """Return the table's row numbers for row numbers of the dataset."""
        _check_indices(rows, self._num_rows)
        rows = np.where(rows < 0, rows + self._num_rows, rows)
        if self._mapping is None:
            return rows
        chosen = np.empty(len(rows), np.uint64)
        self._mapping.read(rows, chosen)
        stored = chosen.view(np.int64)
        _check_indices(stored, self._num_stored)
        return stored


def _check_indices(rows: Indices, size: int) -> None:
    for index in (int(rows.max()), int(rows.min())):
        if not -size <= index < size:  # the message of `datasets`
            raise IndexError(f"Invalid key: {index} is out of bounds for size {size}")


def _reader(column: ArrowColumn, spec: tuple[Any, tuple[int | None, ...]], kind: str | None) -> Read:
    """Return a function that writes a column's rows into a batch.

    Args:
        column: the column.
        spec: its dtype and shape in the schema.
        kind: type of the dataset's format, such as "numpy"; None for Python objects.
    """
    name, (dtype, shape) = column.name, spec
    if dtype in (str, bytes):

        def read_text(rows: Indices, out: Any) -> None:
            out[name] = column.text(rows, strips_nul=kind == "torch")  # torch's formatter passes text through an array

        return read_text
    if shape and shape[0] is None:
        return column.read_ragged
    return lambda rows, out: column.read(rows, out[name])


def _field_of(column: ArrowColumn, form: dict[str, Any], ragged: Ragged | None) -> tuple[str, tuple[Any, Any]] | None:
    """Return the field that a format and torch's collate make of a column, (name, (dtype, shape)); None if this is not known."""
    dtype = _dtype_in(column.dtype, form["type"], form["format_kwargs"].get("dtype"))
    if dtype is None:
        return None
    if not column.extents:
        return column.name, (dtype, ())
    if _is_ragged(column, ragged, is_python=form["type"] is None):
        is_flat = len(column.extents) == 1
        return (column.name, (dtype, (None, *column.extents[1:]))) if is_flat or form["type"] else None
    if form["type"] is None or None in column.extents or 0 in column.extents:
        return None  # torch's collate makes lists of columns from Python lists; for lists of different lengths, no rule is given
    return column.name, (dtype, column.extents)


def _is_ragged(column: ArrowColumn, ragged: Ragged | None, *, is_python: bool) -> bool:
    """Return whether the rule applies to a column of lists: the rule names it, or its lists have no fixed length."""
    if ragged is None:
        return False
    if is_python:  # without a rule for lists, they are containers
        return ragged.lists_are_rows or column.name in ragged.of_field
    has_no_length = column.extents[0] is None
    return has_no_length or column.name in ragged.of_field or (ragged.of_arrays is not None and column.is_variable)


def _dtype_in(stored: Any, kind: str | None, asked: Any) -> Any:
    """Return the dtype that a format gives to values; None if this is not known.

    Args:
        stored: dtype of the values as stored.
        kind: the format's type, such as "numpy"; None for Python objects.
        asked: the dtype that the format was given, or None.

    Python's numbers become int64 and float64 in torch's collate. The formatters of `datasets` convert them to int64 and float32
    unless they are given a dtype. Text stays text, except in numpy's format, whose samples contain numpy's own str.
    """
    if stored in (str, bytes):
        return None if kind == "numpy" else stored
    if stored == np.uint64 or (stored == np.float16 and kind is None):
        return None
    default = {"i": np.int64, "u": np.int64, "f": np.float32 if kind else np.float64, "b": np.bool_}[stored.kind]
    if asked is None:
        return np.dtype(default)
    if (type(asked).__module__ == "torch") != (kind == "torch"):  # torch accepts only its own dtypes
        return None
    try:
        wanted = of_any(asked).numpy
    except TypeError:
        return None
    if wanted is None or of_numpy(wanted) is None:
        return None
    is_certain = wanted in (np.float32, np.float64) or np.can_cast(stored, wanted, "safe")
    return wanted if is_certain else None
