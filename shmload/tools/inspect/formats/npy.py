""".npy files: one array."""

from __future__ import annotations

from shmload.formats.arrays import ArrayDataset
from shmload.tools.inspect.summary import Head, Sizes, Summary, described

NAME = "npy"


def matches(head: Head) -> bool:
    return not head.compression and head.begin.startswith(b"\x93NUMPY")


def describe(head: Head, num_samples: int) -> Summary:
    try:
        dataset = ArrayDataset({"data": str(head.path)})
    except (TypeError, ValueError) as error:
        raise ValueError(str(error) if str(head.path) in str(error) else f"{head.path}: {error}") from error
    samples = [dataset[i] for i in range(min(num_samples, len(dataset)))]
    row_nbytes = dataset[0]["data"].nbytes if len(dataset) else 0
    sizes = Sizes(row_nbytes, row_nbytes, row_nbytes, len(dataset)) if len(dataset) else None
    fields = {name: described(spec) for name, spec in dataset.schema.items()}
    return Summary(str(head.path), NAME, head.nbytes, len(dataset), fields, sizes, samples)
