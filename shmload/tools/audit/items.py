"""Judge the items of a pipeline: each item must be delivered once per epoch.

Keys name the item at a position: item + epoch * n, and in a Join that times the number of members plus the member's number.
Members of a Join continue where they stopped, so each epoch of a member is complete before its next begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shmload.tools.audit.findings import AuditReport, Keys, ranges
from shmload.tools.audit.positions import JudgedEpoch


def judge_items(epochs: Sequence[JudgedEpoch], members: Any, report: AuditReport) -> None:
    """Check that each item came once in each epoch of its member, except those of the last epoch that are still to come."""
    is_whole = all(epoch.is_whole for epoch in epochs)
    for path, n, keys in _by_member(np.concatenate([epoch.keys for epoch in epochs]), members):
        member = "".join(f" of member {number}" for number in reversed(path))
        once, counts = np.unique(keys, return_counts=True)
        doubled = once[counts > 1]
        for epoch in np.unique(doubled // n).tolist():
            items = (doubled[doubled // n == epoch] % n).tolist()
            report.found("doubled", f"items {ranges(items)} of epoch {epoch}{member} came more than once")
        of_epochs, num_items = np.unique(once // n, return_counts=True)
        for epoch, num in zip(of_epochs[:-1].tolist(), num_items[:-1].tolist(), strict=True) if is_whole else ():
            if num < n:
                its = once[once // n == epoch] - epoch * n
                gap = int(np.flatnonzero(np.append(its, -1) != np.arange(num + 1))[0])
                report.found("missing", f"{n - num} items of epoch {epoch}{member} never came, such as item {gap}")


def _by_member(keys: Keys, members: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], int, Keys]]:
    """Yield for each member at every depth: its number in each Join, its number of items, and its own keys."""
    if isinstance(members, int):
        yield path, members, keys
        return
    for number, member in enumerate(members):
        yield from _by_member(keys[keys % len(members) == number] // len(members), member, (*path, number))
