"""Files that shmload rejects although the format's own library reads them, and why. An unused entry fails the test.

`FORMATS` are documented limits. `DEFECTS` are to be fixed: remove an entry with its defect.
"""

from __future__ import annotations

from typing import NamedTuple


class Expected(NamedTuple):
    """Errors of one reader whose message matches a pattern."""

    reader: str  # the reader's name, without its options
    said: str  # a regular expression that must match part of the message
    why: str


FORMATS = (
    Expected("ImageFolder", r"an image of mode '[IF]', 32 bits without a range", "32-bit images are refused: docs/images.md"),
    Expected("ImageFolder", r"\d+ extraneous bytes before marker", "damage within a scan, for which a decoder would invent pixels"),
    Expected("ArrayDataset", r"has dtype (<U|\|S|datetime64|timedelta64)\S*, which no tensor has", "no type of torch"),
    Expected("RemoteDataset", r"this is (<U|\|S|datetime64|timedelta64)", "no type of torch"),
    Expected("RemoteDataset", r"in Fortran order: save it again", "arrays in Fortran order are not read: docs/remote.md"),
    Expected("ParquetDataset", r"column 'null' of null cannot be a field of a batch", "a column of nothing but nulls has no type"),
    Expected(
        "RemoteDataset", r"gz stream .*incorrect header check", "the name says how an object is compressed: this is xz, named .gz"
    ),
    Expected("HDF5Dataset", r"these have .*Name those of one length in fields=", "fields have one row for each sample"),
    Expected("HDF5Dataset", r"rows of (\(|\[|\{)", "compound types and arrays of them"),
    Expected("HDF5Dataset", r"rows of \|S\d+, shape \(\d", "text is a row, not a table"),
    Expected("HDF5Dataset", r"rows of object, shape \(\)", "rows of variable length that are no numbers or text"),
    Expected("HDF5Dataset", r"rows of float128", "no type of torch"),
    Expected("HDF5Dataset", r"not in this machine's byte order", "h5py leaves them so"),
)

DEFECTS: tuple[Expected, ...] = ()
