"""The base of formats that are read from local files only, by a dataset with a schema, and their output of `shmload inspect`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from shmload.formats.format import Read
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
    def open(self, path: Path) -> Any:
        """Return the dataset of a file or folder."""

    def index(self, url: str, nbytes: int, read: Read) -> NoReturn:
        raise ValueError(f"{url}: {self.title} is read from local files only: copy it here, or pack it with `shmload pack`")

    def decode(self, index: Any, data: memoryview, sample: int) -> NoReturn:
        raise ValueError(f"{self.title} is read from local files only")

    def describe(self, head: Head, num_samples: int) -> Summary:
        return describe_dataset(self.title, head, self.open, num_samples)


def describe_dataset(title: str, head: Head, open: Callable[[Path], Any], num_samples: int) -> Summary:
    """Return the output of `shmload inspect` for a dataset with a schema. If rows differ in size, only the first are measured.

    Args:
        title: title of the format.
        head: head of the path.
        open: returns the dataset of a path.
        num_samples: number of samples to show, from the first one on.
    Raises:
        ValueError: it cannot be opened; the message names the path.
    """
    try:
        dataset = open(head.path)
    except (TypeError, ValueError) as error:
        raise ValueError(str(error) if str(head.path) in str(error) else f"{head.path}: {error}") from error
    count, schema = len(dataset), dataset.schema
    is_fixed = all(isinstance(spec, tuple) and None not in spec[1] for spec in schema.values())
    samples = [dataset[i] for i in range(min(count, num_samples))]
    sizes = Sizes.of(nbytes_of(dataset[i]) for i in range(min(count, 1 if is_fixed else SIZED)))
    if sizes is not None and is_fixed:
        sizes = replace(sizes, num_samples=count)
    fields = {field: described(spec) for field, spec in schema.items()}
    return Summary(str(head.path), title, head.nbytes_in_all(), count, fields, sizes, samples)
