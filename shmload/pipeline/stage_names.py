"""Display names of stages: each with its arguments, and where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Literal

from shmload.pipeline.buckets import Bucket
from shmload.pipeline.plan import Plan
from shmload.pipeline.position_stages import Enumerate, Repeat, Shuffle, Skip, Take, Window
from shmload.pipeline.scan import Scan
from shmload.pipeline.stages import BatchMap, Collate, DistributedBatchedMap, Partition

Where = Literal["workers", "trainer", "by position"]
_METHODS = {"DistributedBatchedMap": "map", "BatchMap": "map_batches", "FlatMap": "flat_map", "Collate": "batch"}
_BY_POSITION = Take | Skip | Repeat | Enumerate | Window | Shuffle


def name_of(stage: Any) -> str:
    """Return a stage with its arguments as text."""
    kind = type(stage).__name__
    if (label := getattr(stage, "label", None)) is not None:
        return str(label)
    if isinstance(members := getattr(stage, "members", None), Sequence):
        return f"{kind}({len(members)} members)"
    if not is_dataclass(stage):
        return f"{kind}({', '.join(argument_text(getattr(stage, name)) for name in ('fn', 'n_elements') if hasattr(stage, name))})"
    given, is_by_name = [], False
    for each in fields(stage):
        value = getattr(stage, each.name)
        # the types first, because an array is compared with None element by element
        if not each.init or (type(value) is type(each.default) and value == each.default):
            is_by_name = True
            continue
        given.append(f"{each.name}={argument_text(value)}" if is_by_name or each.kw_only else argument_text(value))
    return f"{kind}({', '.join(given)})"


def as_methods(stages: Sequence[Any]) -> str:
    """Return a source and its stages as the methods that add them: `Items(list of 3).map(read, workers=2).batch(32)`."""
    return ".".join([name_of(stages[0]), *map(_method_of, stages[1:])])


def _method_of(stage: Any) -> str:
    """Return the call of the method that adds a stage."""
    kind, _, arguments = name_of(stage).partition("(")
    if isinstance(stage, DistributedBatchedMap):
        _, _, *options = fields(stage)
        given = {"workers": stage.n_workers, **{each.name: getattr(stage, each.name) for each in options}}
        changed = [f"{name}={value!r}" for name, value in given.items() if value != getattr(DistributedBatchedMap, name, None)]
        arguments = f"{', '.join([argument_text(stage.mapping_fn), *changed])})"
    return f"{_METHODS.get(kind, kind.lower())}({arguments}"


def argument_text(value: Any) -> str:
    """Return an argument of a stage as text, shortened; a function is shown by its name."""
    while isinstance(value, partial):
        value = value.func
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    text = repr(value)
    return text if len(text) <= 24 and " at 0x" not in text else type(value).__name__


def places_of(stages: Sequence[Any], plan: Plan) -> list[tuple[str, Where]]:
    """Return the name of each stage, and where it runs. A stage "by position" only chooses or numbers items and runs nowhere."""
    maker: Where = "workers" if plan.pool.num_workers else "trainer"
    found: list[tuple[str, Where]] = []
    is_after_workers = False  # after Collate or a Scan, stages run in the trainer
    for number, stage in enumerate(stages):
        where = maker
        is_of_trainer = (
            isinstance(stage, Scan) or (plan.is_streamed and not number) or (is_after_workers and not isinstance(stage, BatchMap))
        )
        if isinstance(stage, Partition) or (isinstance(stage, _BY_POSITION) and not getattr(stage, "is_buffered", False)):
            where = "by position"
        elif is_of_trainer or (plan.is_expanding and isinstance(stage, Collate)):  # Collate slices columns that workers have made
            where = "trainer"
        is_after_workers = is_after_workers or isinstance(stage, Scan | Collate | Bucket)
        found.append((name_of(stage), where))
    return found
