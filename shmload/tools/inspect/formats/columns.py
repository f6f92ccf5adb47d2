"""What all datasets of columns have to say."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from shmload.formats.readers.columns import ColumnDataset
from shmload.tools.inspect.summary import SIZED, Head, Sizes, Summary, described, nbytes_of


def described_columns(name: str, head: Head, dataset: ColumnDataset, num_samples: int) -> Summary:
    """The summary of a dataset whose schema is known.

    Rows of one shape are all of one size; else those at the beginning are looked at.
    """
    schema, count = dataset.schema, len(dataset)
    is_fixed = all(isinstance(spec, tuple) and None not in spec[1] for spec in schema.values())
    samples: list[Any] = [dataset[i] for i in range(min(count, max(num_samples, int(is_fixed))))]
    sized: Any = (nbytes_of(dataset[i]) for i in range(min(count, SIZED)))
    if is_fixed and count:
        sized = np.full(count, nbytes_of(samples[0]))
    return Summary(
        str(head.path),
        name,
        nbytes_at(head),
        count,
        {field: described(spec) for field, spec in schema.items()},
        Sizes.of(sized),
        samples[:num_samples],
    )


def nbytes_at(head: Head) -> int:
    """Bytes of a file, or of all files in a folder."""
    if not head.is_folder:
        return head.nbytes
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(head.path) for name in names)
