"""Samples to columns, and fields by several names, as webdataset 1.0.2 has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["default_collation_fn", "first_of"]


def first_of(sample: Mapping[str, Any], names: str | Sequence[str], method: str, missing_is_error: bool) -> Any:
    """The first of several fields that a sample has; the names are separated by ";".

    Raises:
        ValueError: it has none of them.
    """
    alternatives = names.split(";") if isinstance(names, str) else names
    for name in alternatives:
        if name in sample:
            return sample[name]
    if missing_is_error:
        there = ", ".join(repr(name) for name in sample if not name.startswith("__"))
        raise ValueError(
            f"{method}: sample {sample.get('__key__')!r} has no {' or '.join(map(repr, alternatives))}, only {there}"
        )
    return None


def default_collation_fn(samples: Sequence[Any]) -> Any:
    """Samples as one batch, column by column: numbers become an array, arrays and tensors are stacked, all else is a list.

    Args:
        samples: tuples or lists of one length, or dicts of the same names.
    Returns:
        a tuple or a dict of columns.
    Raises:
        ValueError: the samples are not alike; says in what.
    """
    first = samples[0]
    if isinstance(first, dict):
        if any(sample.keys() != first.keys() for sample in samples):
            other = next(sample for sample in samples if sample.keys() != first.keys())
            raise ValueError(
                f"batched: samples of a batch have the same fields; these have {sorted(first)} and {sorted(other)}: rename, or "
                "choose fields by to_tuple"
            )
        return {name: _column(name, [sample[name] for sample in samples]) for name in first}
    if len({len(sample) for sample in samples}) != 1:
        raise ValueError(f"batched: samples of a batch have one length; these have {sorted({len(s) for s in samples})}")
    return tuple(_column(number, list(column)) for number, column in enumerate(zip(*samples, strict=True)))


def _column(name: str | int, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, (int, float)):
        return np.array(values)
    is_tensor = type(first).__module__.partition(".")[0] == "torch" and hasattr(first, "untyped_storage")
    if not is_tensor and not isinstance(first, np.ndarray):
        return values
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) != 1:
        raise ValueError(
            f"batched: field {name!r} has values of shapes {', '.join(map(str, sorted(shapes)[:3]))} in one batch: give them one "
            "shape by map_tuple or map_dict, or a collation_fn"
        )
    if is_tensor:
        import torch

        return torch.stack(values)
    return np.array(values)
