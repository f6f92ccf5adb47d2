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
        num_with_peers: samples of an epoch where peers take part, which first write them all in a format of their own;
            a multiple of every peer's unit, so that none pads an epoch.
        on_disk: arguments with which every sample of an epoch lies at a place of its own in some file, from the usual ones,
            and those files: what a cold pass needs. None where the data lie in memory.
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
    num_with_peers: int
    on_disk: Callable[[dict[str, Any], Path], tuple[dict[str, Any], list[str]]] | None = None
    missing: Callable[[], str | None] = lambda: None
