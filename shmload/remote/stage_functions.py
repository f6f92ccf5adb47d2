"""The functions that the stages of a RemoteDataset apply to items, with the results of webdataset 1.0.2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shmload.formats.images.shared_choices import one_sample
from shmload.worker.stage_engine import DROP


def first_of(sample: Mapping[str, Any], names: str | Sequence[str], method: str, missing_is_error: bool) -> Any:
    """Return the value of the first of several fields that a sample has; None if it has none of them.

    Args:
        sample: the sample.
        names: names of the fields, as a list or separated by ";".
        method: the stage, for errors.
        missing_is_error: raise if the sample has none of the fields.
    Raises:
        ValueError: it has none of them.
    """
    alternatives = names.split(";") if isinstance(names, str) else names
    for name in alternatives:
        if name in sample:
            return sample[name]
    if missing_is_error:
        there = ", ".join(repr(name) for name in sample if not name.startswith("__"))
        raise ValueError(f"{method}: sample {sample.get('__key__')!r} has no {' or '.join(map(repr, alternatives))}, only {there}")
    return None


def default_collation_fn(samples: Sequence[Any]) -> Any:
    """Collate samples to a batch of columns: numbers become an array, arrays and tensors are stacked, others become a list.

    Args:
        samples: tuples or lists of the same length, or dicts with the same names.
    Returns:
        A tuple or a dict of columns.
    Raises:
        ValueError: the samples differ in structure; the message says how.
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


def mapped(function: Callable[[Any], Any], item: Any) -> Any:
    """Apply map(f): a sample keeps its key, and is dropped if the function returns None."""
    made = function(item)
    if made is None:
        return DROP
    if isinstance(item, dict) and isinstance(made, dict):
        made["__key__"] = item.get("__key__")
    return made


def mapped_dict(functions: Mapping[str, Callable[[Any], Any]], sample: Any) -> Any:
    """Apply map_dict(name=f)."""
    needs_dict("map_dict", sample)
    made = dict(sample)
    with one_sample(functions.values()):
        for name, function in functions.items():
            if name not in made:
                raise ValueError(f"map_dict: there is no {name!r} in the sample, only {', '.join(map(repr, made))}")
            made[name] = function(made[name])
    return made


def mapped_tuple(functions: Sequence[Callable[[Any], Any] | None], item: Any) -> Any:
    """Apply map_tuple(f, g) field by field; further fields do not change."""
    if not isinstance(item, (list, tuple)):
        raise TypeError(f"map_tuple needs a tuple, got {type(item).__name__}: call to_tuple(...) before it")
    made = list(item)
    with one_sample(functions):
        for number, function in enumerate(functions[: len(made)]):
            if function is not None:
                made[number] = function(made[number])
    return tuple(made)


def to_tuple(fields: Sequence[str], missing_is_error: bool, none_is_error: bool, sample: Any) -> tuple[Any, ...]:
    """Apply to_tuple("jpg;png", "cls")."""
    needs_dict("to_tuple", sample)
    made = tuple(first_of(sample, names, "to_tuple", missing_is_error) for names in fields)
    if none_is_error and any(value is None for value in made):
        names = [name for name, value in zip(fields, made, strict=True) if value is None]
        raise ValueError(f"to_tuple: {', '.join(map(repr, names))} of sample {sample.get('__key__')!r} is None")
    return made


def unbatched(batch: Any) -> Iterator[Any]:
    """Yield the items of a batch of columns."""
    if not isinstance(batch, (list, tuple, dict)):
        raise TypeError(f"unbatched needs batches, tuples or dicts of columns; got {type(batch).__name__}")
    lengths = {len(column) for column in (batch.values() if isinstance(batch, dict) else batch)}
    if len(lengths) > 1:
        raise ValueError(f"unbatched: the columns of a batch are of one length, these of {sorted(lengths)}")
    for number in range(max(lengths, default=0)):
        if isinstance(batch, dict):
            yield {name: column[number] for name, column in batch.items()}
        else:
            yield tuple(column[number] for column in batch)


def renamed(names: Mapping[str, str | Sequence[str]], keep: bool, sample: Any) -> dict[str, Any]:
    """Apply rename(new="old;older")."""
    needs_dict("rename", sample)
    found = {name: first_of(sample, old, "rename", True) for name, old in names.items()}
    if not keep:
        return found
    replaced = {name for old in names.values() for name in (old.split(";") if isinstance(old, str) else old)}
    return {**{name: value for name, value in sample.items() if name not in replaced}, **found}


def needs_dict(method: str, item: Any) -> None:
    if not isinstance(item, dict):
        raise TypeError(f"{method} needs samples that are dicts, got {type(item).__name__}: call it before to_tuple")
