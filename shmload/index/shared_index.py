"""SharedIndex: what a dataset knows of its samples, in one piece of shared memory for all workers and ranks of a node."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from numpy.typing import NDArray

from shmload._core.index_reader import PackedRows
from shmload.index.layout import Layout
from shmload.index.memory import Memory
from shmload.index.pack import Packed, pack_columns, pack_entries
from shmload.index.sharing import Fingerprint, share
from shmload.index.sources import Types, pack_dataframe, pack_manifest


class SharedIndex(PackedRows, Sequence[Any]):
    """A read-only sequence of paths, labels, metadata rows, held packed and once.

    A list of a million paths grows by more than 100 MB in every forked worker, since looking at an object writes to its reference
    count and so copies its page, and is pickled whole to every spawned one. Here entries are made when they are looked at, and
    a pickled index says only where the memory is. The memory is freed when the last process that holds it lets it go; its
    name in /dev/shm goes with the process that made it, however that ends.

    Entries are str, bytes (either may be None now and then), int (int64), float, bool, numpy arrays of one dtype and shape, or rows
    of these: tuples, named tuples, dicts. All are of one kind, which the first one says. What comes back is equal and of the same
    type, except that numpy's numbers come back as Python's, and subclasses of str and int as these.

    Slices are views. An index may be a dataset by itself, and `copy.deepcopy` gives the same one back.

    Args:
        entries: any iterable, taken once and never held as a list; or a function without arguments that gives one.
        name: processes of one run on one node that give the same name hold one copy, built by the first to come. The others wait
            for it. Of those a function of theirs is never called; entries at hand are packed once more to compare them.
        fingerprint: stands for the entries under a name: what differs is an error, what is equal is not compared further.
    Raises:
        TypeError, ValueError, OverflowError: an entry cannot be held, or differs in kind from those before; it is named.
        MemoryError: the shared memory there is does not suffice.
    Cost: an entry of one str about 0.1 us.
    Example:
        >>> index = SharedIndex([("a.jpg", 3), ("b.jpg", 5)])
        >>> index[1], len(index), index.column(1).sum().item()
        (('b.jpg', 5), 2, 8)
    """

    _memory: Memory
    _layout: Layout
    _rows: range

    def __init__(
        self,
        entries: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        name: str | None = None,
        fingerprint: Fingerprint = None,
    ) -> None:
        if isinstance(entries, Iterable):
            self._build(lambda: pack_entries(entries), name, fingerprint, is_packed=True)
        elif callable(entries):
            self._build(lambda: pack_entries(entries()), name, fingerprint, is_packed=False)
        else:
            raise TypeError(
                f"an index needs an iterable of entries, or a function that gives one; got {type(entries).__name__}"
            )

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Any], *, name: str | None = None, fingerprint: Fingerprint = None
    ) -> Self:
        """An index of dicts, from one sequence or array per key.

        Args:
            columns: a sequence or array for each name, all of one length. Numeric arrays keep their dtype.
            name, fingerprint: as of the class.
        Raises:
            ValueError: the columns differ in length.
        """
        return cls.__new__(cls)._build(lambda: pack_columns(columns), name, fingerprint, is_packed=True)

    @classmethod
    def from_dataframe(cls, frame: Any, *, name: str | None = None, fingerprint: Fingerprint = None) -> Self:
        """An index of dicts, from the columns of a DataFrame; its row labels are left behind.

        Args:
            frame: of pandas, or anything with `columns` and `frame[name]`. Categories are held as their values.
            name, fingerprint: as of the class.
        Raises:
            ValueError: a value is missing; NaN in a column of floats is a value.
        """
        return cls.__new__(cls)._build(lambda: pack_dataframe(frame), name, fingerprint, is_packed=True)

    @classmethod
    def from_manifest(
        cls,
        path: str | os.PathLike[str],
        *,
        types: Types | None = None,
        name: str | None = None,
        fingerprint: Fingerprint = None,
    ) -> Self:
        """An index of what a file lists, read row by row.

        Args:
            path: .jsonl (a value a line), .csv or .tsv (the first line names the columns), .txt (a str a line), each also .gz; or
                .parquet, with pyarrow. Empty lines are skipped.
            types: of the columns of .csv and .tsv that are not str: {"label": int}.
            name: as of the class.
            fingerprint: under a name, by default the file's path, size and time of change.
        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a line is no row of this kind; it is named.
        """
        if name is not None and fingerprint is None:
            status = os.stat(path)
            fingerprint = f"{os.path.abspath(path)}, {status.st_size} bytes, {status.st_mtime_ns} ns"
        return cls.__new__(cls)._build(lambda: pack_manifest(path, types), name, fingerprint, is_packed=False)

    @property
    def columns(self) -> dict[str | int, str]:
        """Types by name: keys of dicts, fields of named tuples, numbers of tuples' values; 0 if entries are no rows."""
        return {column.name: column.type for column in self._layout.columns}

    @property
    def nbytes(self) -> int:
        """Bytes of the shared memory, of which a slice shows a part."""
        return int(self._memory.mapping.nbytes)

    def column(self, name: str | int) -> Any:
        """One column: an array over the shared memory (read-only, not copied), or an index of its str or bytes.

        Args:
            name: a key of `columns`.
        Returns:
            an array or an index, valid as long as anyone holds it.
        Raises:
            KeyError: there is none of this name.
        """
        found = next((column for column in self._layout.columns if column.name == name), None)
        if found is None:
            raise KeyError(f"no column {name!r}; there are {list(self.columns)}")
        if found.dtype:
            array: NDArray[Any] = found.array(self._memory.mapping, self._layout.count)
            return array[_slice_of(self._rows)]
        layout = Layout(self._layout.count, (found,), None, self._layout.nbytes)
        return SharedIndex.__new__(SharedIndex)._show(self._memory, layout, self._rows)

    def _build(
        self, pack: Callable[[], Packed], name: str | None, fingerprint: Fingerprint, *, is_packed: bool
    ) -> Self:
        if name is not None:
            layout, memory = share(name, pack, fingerprint, is_packed=is_packed)
        else:
            packed = pack()
            layout, memory = packed.layout, Memory.create(packed)
        return self._show(memory, layout, range(layout.count))

    def _show(self, memory: Memory, layout: Layout, rows: range) -> Self:
        self._memory, self._layout, self._rows = memory, layout, rows
        is_tuple = layout.row_type is not None and issubclass(layout.row_type, tuple)
        self._bind(
            memory.mapping,
            [(column.kind, column.ends, column.data) for column in layout.columns],
            names=tuple(str(column.name) for column in layout.columns) if layout.row_type is dict else None,
            row_type=layout.row_type if is_tuple else None,
            arrays=tuple(
                column.array(memory.mapping, layout.count) if column.kind == "array" else None
                for column in layout.columns
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
        return _attached, (type(self), self._memory.ticket(), self._layout, self._rows)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {kind}" for name, kind in self.columns.items())
        row_type = self._layout.row_type
        kind = self._layout.columns[0].type if row_type is None else f"{row_type.__name__}({shown})"
        return f"<{type(self).__name__} of {len(self)} entries, {kind}, {self.nbytes} bytes shared>"


def _attached(cls: type[SharedIndex], reference: Any, layout: Layout, rows: range) -> SharedIndex:
    return cls.__new__(cls)._show(Memory.attach(reference), layout, rows)


def _slice_of(rows: range) -> slice:
    """What takes these rows of an array, where a number below 0 would count from the end."""
    if not rows:
        return slice(0, 0)
    return slice(rows.start, rows.stop if rows.stop >= 0 else None, rows.step)
