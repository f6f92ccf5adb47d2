"""The base of formats that are read from local files only, by a dataset with a schema, and their output of `shmload inspect`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from shmload.errors import SampleError
from shmload.formats.block_index import Read
from shmload.formats.field_names import NoField
from shmload.formats.head import Head
from shmload.formats.summary import SIZED, Sizes, Summary, described, nbytes_of

__all__ = ["ColumnFormat", "describe_dataset"]


class ColumnFormat(ABC):
    """A format that is read by a dataset of local files and not by `RemoteDataset`, because its library needs a file.

    A subclass defines `recognize` and `open`. `index` and `decode` raise an error that says what to do.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    endings: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def recognize(self, head: Head) -> bool: ...

    @abstractmethod
    def open(self, path: Path, names: Sequence[str] | None = None) -> Any:
        """Return the dataset of a file or folder.

        Args:
            path: the file or folder.
            names: the columns to read; None for all.
        """

    def lengths(self, path: Path) -> Mapping[str, int]:
        """Return the number of rows of each column, also of those that no dataset reads; empty if this is not known."""
        return {}

    def index(self, url: str, nbytes: int, read: Read) -> NoReturn:
        raise ValueError(f"{url}: {self.title} is read from local files only: copy it here, or pack it with `shmload pack`")

    def decode(self, index: Any, data: memoryview, sample: int) -> NoReturn:
        raise ValueError(f"{self.title} is read from local files only")

    def describe(self, head: Head, num_samples: int) -> Summary:
        return describe_dataset(self.title, head, self.open, num_samples, self.lengths)


def describe_dataset(
    title: str,
    head: Head,
    open: Callable[..., Any],
    num_samples: int,
    lengths: Callable[[Path], Mapping[str, int]] | None = None,
    argument: str = "fields",
) -> Summary:
    """Return the output of `shmload inspect` for a dataset with a schema. If rows differ in size, only the first are measured.

    If not all columns can be read together, each is described by itself, with the reason and the argument that helps.

    Args:
        title: title of the format.
        head: head of the path.
        open: returns the dataset of a path, and with a list of names the one of these columns.
        num_samples: number of samples to show, from the first one on.
        lengths: returns the number of rows of each column; None if columns cannot be opened one by one.
        argument: the dataset's argument that selects columns.
    Raises:
        ValueError: it cannot be opened; the message names the path.
    """
    try:
        dataset = open(head.path)
    except (TypeError, ValueError) as error:
        raise ValueError(str(error) if str(head.path) in str(error) else f"{head.path}: {error}") from error
    try:
        return _described(title, head, dataset, num_samples)
    except (NoField, SampleError):
        found = {} if lengths is None else lengths(head.path)
        if not found:
            raise
    return _described_by_column(title, head, open, num_samples, found, argument)


def _described(title: str, head: Head, dataset: Any, num_samples: int) -> Summary:
    count, schema = len(dataset), dataset.schema
    is_fixed = all(isinstance(spec, tuple) and None not in spec[1] for spec in schema.values())
    samples = [dataset[i] for i in range(min(count, num_samples))]
    sizes = Sizes.of(nbytes_of(dataset[i]) for i in range(min(count, 1 if is_fixed else SIZED)))
    if sizes is not None and is_fixed:
        sizes = replace(sizes, num_samples=count)
    fields = {field: described(spec) for field, spec in schema.items()}
    return Summary(str(head.path), title, head.nbytes_in_all(), count, fields, sizes, samples)


def _described_by_column(
    title: str, head: Head, open: Callable[..., Any], num_samples: int, lengths: Mapping[str, int], argument: str
) -> Summary:
    """Describe each column by itself, and show samples of the largest number of columns that can be read together."""
    is_even = len(set(lengths.values())) == 1
    fields: dict[str, str] = {}
    notes: list[str] = []
    together: dict[int, list[str]] = defaultdict(list)
    for name, length in lengths.items():
        try:
            held = _described(title, head, open(head.path, [name]), num_samples).fields[name]
            together[length].append(name)
        except (NoField, SampleError) as error:
            held = "not readable as it is, see below"
            notes.append(str(error).removeprefix(f"{head.path}: ").removeprefix(f"{head.path}, "))
        fields[name] = held if is_even else f"{held}, {length:,} rows"
    if not is_even:
        notes.append(f"a sample has one row of each field, and these differ in length: give {argument}= with fields of one length")
    if not together:
        return Summary(str(head.path), title, head.nbytes_in_all(), max(lengths.values()), fields, notes=notes)
    names = max(together.values(), key=len)
    notes.insert(0, f"the samples shown are those of {argument}={names}")
    found = _described(title, head, open(head.path, names), num_samples)
    return replace(found, fields=fields, notes=notes)
