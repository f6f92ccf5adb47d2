"""SharedIndex: a read-only sequence of paths, labels or rows in shared memory, which workers neither copy nor pickle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from numpy.typing import NDArray

from shmload._core.index_reader import PackedRows
from shmload.formats.shared_bytes import SharedBytes
from shmload.formats.shared_index.index_layout import IndexLayout
from shmload.formats.shared_index.index_sources import Types, pack_dataframe, pack_manifest
from shmload.formats.shared_index.named_index import Fingerprint, share
from shmload.formats.shared_index.packed_index import PackedIndex, pack_columns, pack_entries


class SharedIndex(PackedRows, Sequence[Any]):
    """A read-only sequence of paths, labels or metadata rows, stored packed and only once per machine.

    A list of a million paths grows by more than 100 MB in every forked worker, because accessing an object changes its reference
    count and so copies its page. Spawned workers receive a pickled copy of the whole list. A SharedIndex creates entries when they
    are accessed, and its pickle contains only the location of the memory. The memory is freed when the last process releases it.
    Its name in /dev/shm is removed with the process that created it, even if that crashes.

    Entries are str or bytes (some may be None), int (int64), float, bool, numpy arrays of one dtype and shape, or rows of these:
    tuples, named tuples, dicts. The first entry determines the kind of all. Returned entries are equal to the originals and have
    the same type, except that numpy scalars become Python numbers, and subclasses of str and int become str and int.

    Slices are views. An index can be used as a dataset, and `copy.deepcopy` returns the same object.

    Args:
        entries: any iterable, which is consumed once and never stored as a list; or a function without arguments that returns one.
        name: processes of a run on the same node that pass the same name share one copy. The first one builds it while the others
            wait. The others' function is then not called; their iterable is packed again to compare the entries.
        fingerprint: identifies the entries of a name: a different fingerprint is an error, and equal ones skip the comparison.
    Raises:
        TypeError, ValueError, OverflowError: an entry cannot be stored, or differs in kind from the previous ones; the message
        names it.
        MemoryError: there is not enough shared memory.
    Cost: about 0.1 us for an entry of one str.
    Example:
        >>> index = SharedIndex([("a.jpg", 3), ("b.jpg", 5)])
        >>> index[1], len(index), index.column(1).sum().item()
        (('b.jpg', 5), 2, 8)
    """

    _memory: SharedBytes
    _layout: IndexLayout
    _rows: range

    def __init__(
        self, entries: Iterable[Any] | Callable[[], Iterable[Any]], *, name: str | None = None, fingerprint: Fingerprint = None
    ) -> None:
        if isinstance(entries, Iterable):
            self._build(lambda: pack_entries(entries), name, fingerprint, is_packed=True)
        elif callable(entries):
            self._build(lambda: pack_entries(entries()), name, fingerprint, is_packed=False)
        else:
            raise TypeError(f"an index needs an iterable of entries, or a function that gives one; got {type(entries).__name__}")

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], *, name: str | None = None, fingerprint: Fingerprint = None) -> Self:
        """Create an index of dicts from one sequence or array per key.

        Args:
            columns: a sequence or array for each name, all of the same length. Numeric arrays keep their dtype.
            name, fingerprint: as for the class.
        Raises:
            ValueError: the columns differ in length.
        """
        return cls.__new__(cls)._build(lambda: pack_columns(columns), name, fingerprint, is_packed=True)

    @classmethod
    def from_dataframe(cls, frame: Any, *, name: str | None = None, fingerprint: Fingerprint = None) -> Self:
        """Create an index of dicts from the columns of a DataFrame. Row labels are dropped.

        Args:
            frame: a pandas DataFrame, or any object with `columns` and `frame[name]`. Categories are stored as their values.
            name, fingerprint: as for the class.
        Raises:
            ValueError: a value is missing. NaN in a column of floats counts as a value.
        """
        return cls.__new__(cls)._build(lambda: pack_dataframe(frame), name, fingerprint, is_packed=True)

    @classmethod
    def from_manifest(
        cls, path: str | os.PathLike[str], *, types: Types | None = None, name: str | None = None, fingerprint: Fingerprint = None
    ) -> Self:
        """Create an index from the entries of a file, read row by row.

        Args:
            path: .jsonl (one value per line), .csv or .tsv (the first line names the columns), .txt (one str per line), each
                optionally .gz; or .parquet, with pyarrow. Empty lines are skipped.
            types: converters for columns of .csv and .tsv that are not str: {"label": int}.
            name: as for the class.
            fingerprint: as for the class; with a name, the default is the file's path, size and modification time.
        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: a line is not a valid row; the message names it.
        """
        if name is not None and fingerprint is None:
            status = os.stat(path)
            fingerprint = f"{os.path.abspath(path)}, {status.st_size} bytes, {status.st_mtime_ns} ns"
        return cls.__new__(cls)._build(lambda: pack_manifest(path, types), name, fingerprint, is_packed=False)

    @property
    def columns(self) -> dict[str | int, str]:
        """Return the types by name: keys of dicts, fields of named tuples, positions in tuples; 0 if entries are not rows."""
        return {column.name: column.type for column in self._layout.columns}

    @property
    def nbytes(self) -> int:
        """Return the size of the shared memory in bytes; the same for a slice."""
        return int(self._memory.mapping.nbytes)

    def column(self, name: str | int) -> Any:
        """Return one column: a read-only view of the shared memory for numbers, or an index for str or bytes.

        Args:
            name: a key of `columns`.
        Returns:
            An array or an index, which keeps the memory alive.
        Raises:
            KeyError: the index has no such column.
        """
        found = next((column for column in self._layout.columns if column.name == name), None)
        if found is None:
            raise KeyError(f"no column {name!r}; there are {list(self.columns)}")
        if found.dtype:
            array: NDArray[Any] = found.array(self._memory.mapping, self._layout.count)
            return array[_slice_of(self._rows)]
        layout = IndexLayout(self._layout.count, (found,), None, self._layout.nbytes)
        return SharedIndex.__new__(SharedIndex)._show(self._memory, layout, self._rows)

    def _build(self, pack: Callable[[], PackedIndex], name: str | None, fingerprint: Fingerprint, *, is_packed: bool) -> Self:
        if name is not None:
            layout, memory = share(name, pack, fingerprint, is_packed=is_packed)
        else:
            packed = pack()
            layout, memory = packed.layout, packed.shared()
        return self._show(memory, layout, range(layout.count))

    def _show(self, memory: SharedBytes, layout: IndexLayout, rows: range) -> Self:
        self._memory, self._layout, self._rows = memory, layout, rows
        is_tuple = layout.row_type is not None and issubclass(layout.row_type, tuple)
        self._bind(
            memory.mapping,
            [(column.kind, column.ends, column.data) for column in layout.columns],
            names=tuple(str(column.name) for column in layout.columns) if layout.row_type is dict else None,
            row_type=layout.row_type if is_tuple else None,
            arrays=tuple(
                column.array(memory.mapping, layout.count) if column.kind == "array" else None for column in layout.columns
            ),
            rows=rows,
        )
        return self

    def _slice(self, item: slice) -> SharedIndex:
        return type(self).__new__(type(self))._show(self._memory, self._layout, self._rows[item])

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (type(self), self._memory.to_pickle(), self._layout, self._rows)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {kind}" for name, kind in self.columns.items())
        row_type = self._layout.row_type
        kind = self._layout.columns[0].type if row_type is None else f"{row_type.__name__}({shown})"
        return f"<{type(self).__name__} of {len(self)} entries, {kind}, {self.nbytes} bytes shared>"


def _attached(cls: type[SharedIndex], reference: Any, layout: IndexLayout, rows: range) -> SharedIndex:
    return cls.__new__(cls)._show(SharedBytes.attach(reference), layout, rows)


def _slice_of(rows: range) -> slice:
    """Return the slice that selects these rows of an array. A negative stop would count from the end."""
    if not rows:
        return slice(0, 0)
    return slice(rows.start, rows.stop if rows.stop >= 0 else None, rows.step)
