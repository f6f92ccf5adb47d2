"""The description of a workload: a dataset, and how its data is prepared."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Field = tuple[str, tuple[int, ...]]  # dtype, shape of one sample


def nothing_missing() -> None:
    """Return None, because the workload needs no extra package."""


@dataclass(frozen=True)
class Workload:
    """A dataset and its batch size.

    Args:
        name: its name on the command line and in reports.
        title: a description of its samples.
        dataset: `module:class` of the dataset.
        batch_size: samples of a batch; None if the user's own DataLoader sets it.
        prepare: called once with a temporary folder and whether a small set is enough; returns the dataset's arguments.
        missing: returns the pip command for what is not installed, or None.
    """

    name: str
    title: str
    dataset: str
    batch_size: int | None
    prepare: Callable[[Path, bool], dict[str, Any]]
    missing: Callable[[], str | None] = nothing_missing


NUM_LABELS = 1000
