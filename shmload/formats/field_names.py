"""Checks of the names of fields, given by users or found in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def named_fields(fields: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Return a mapping from the name of each field to its name in the file.

    Args:
        fields: this mapping, or a list of names in the file, which are then also the names of the fields.
    Raises:
        TypeError: it is a single string.
    """
    return dict(fields) if isinstance(fields, Mapping) else {name: name for name in names_of(fields, "fields")}


def names_of(names: Sequence[str], argument: str) -> list[str]:
    """Return a sequence of names as a list.

    Raises:
        TypeError: it is a single string, whose letters would be taken for names, or contains other types.
    """
    if isinstance(names, str | bytes) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be a list of names, got {names!r}; write {argument}=['x', 'y']")
    return list(names)


def columns_of(columns: Sequence[str] | None) -> list[str] | None:
    """Return the argument `columns` of a reader as a list; None takes all columns.

    Raises:
        TypeError: as for `names_of`.
        ValueError: it is empty.
    """
    if columns is None:
        return None
    if not (names := names_of(columns, "columns")):
        raise ValueError("columns needs at least one name; None takes all of them")
    return names


class NoField(ValueError):
    """The data is valid but cannot be a field of a batch. The user has to leave it out."""


def one_length(lengths: Mapping[str, int], where: str) -> int:
    """Return the number of rows, which must be the same for all fields.

    Args:
        lengths: the number of rows of each field.
        where: path of the file, for errors.
    Raises:
        NoField: fields differ in their number of rows, or there are no fields.
    """
    if not lengths:
        raise NoField(f"{where}: has no array with rows to be a field")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise NoField(
            f"{where}: the fields of a dataset have one row for each sample; these have {found}. Name those of one length in "
            "fields="
        )
    return next(iter(lengths.values()))
