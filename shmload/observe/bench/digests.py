"""Comparing what two loaders delivered, batch by batch, without keeping the batches."""

from collections.abc import Sequence


def first_difference(reference: Sequence[str], other: Sequence[str]) -> int | None:
    """Number of the first batch whose digests differ or that only one of them has; None if all are equal."""
    for number, (expected, got) in enumerate(zip(reference, other, strict=False)):
        if expected != got:
            return number
    return None if len(reference) == len(other) else min(len(reference), len(other))
