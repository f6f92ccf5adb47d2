"""What a built-in workload states about itself."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Field = tuple[str, tuple[int, ...]]  # dtype, shape of one sample


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A dataset and the batch size it is delivered in.

    Args:
        prepare: called once with a temporary folder and whether a small set will do; returns the dataset's arguments.
        missing: the pip command for what is not installed, None if all is there.
        meaning: what the ratio of two loaders says here; ends a sentence of the report.
    """

    name: str
    title: str
    dataset: str
    batch_size: int
    unit: str
    meaning: str
    prepare: Callable[[Path, bool], dict[str, Any]]
    missing: Callable[[], str | None] = lambda: None
