"""How the batches of one loader are read: one value, decided once, from the loader's arguments and its dataset.

It travels in the job. The trainer that publishes orders, the workers that fill them and the reader without workers obey it; none
asks the dataset again. A question that is answered in two places has two answers: batches of text were once published in chunks, as
one place took them for rows, and each chunk's worker wrote the whole batch, as another took them for ragged.

Precedence: a custom collate_fn (the whole batch, by itself), then `read_batch_into`, `read_into`, `__getitems__`, `__getitem__`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shmload.abilities import ability_of
from shmload.batch.layout import Layout
from shmload.batch.place import private_rows
from shmload.batch.ragged import Ragged, ragged_of
from shmload.batch.ragged_rows import Arenas, RaggedRows
from shmload.worker.reader import InPlace, in_place_of, no_room


@dataclass(frozen=True)
class ReadPlan:
    """How each batch is read and written.

    Attributes:
        path: the dataset's ability that is used: "collate_fn", "read_batch_into", "read_into", "__getitems__" or "__getitem__".
        layout: where fields lie, by the schema of a dataset that is read in place; None: the first sample shows it.
        ragged: how ragged fields are delivered; None: what torch's collate refuses is refused.
        is_whole: a batch has no rows at known places, so one worker reads and writes all of it. Where it is false a batch may
            still turn out to be such; then its order says so.
        has_getitems: samples that are not read in place come by `__getitems__`.
    """

    path: str = "__getitem__"
    layout: Layout | None = None
    ragged: Ragged | None = None
    is_whole: bool = False
    has_getitems: bool = False

    @property
    def rows(self) -> Layout | None:
        """Where rows lie, if that is known before the first sample is read."""
        return None if self.is_whole else self.layout

    @property
    def is_in_place(self) -> bool:
        """Whether the dataset writes into the batch itself."""
        return self.layout is not None

    def in_place(self, dataset: Any) -> InPlace | None:
        """The means by which the dataset, in this process, writes into the batch; None: it does not."""
        return in_place_of(dataset, self.ragged) if self.is_in_place else None

    def sample(self, dataset: Any, key: Any) -> Any:
        """One sample, by `__getitems__` where the dataset has it: perhaps it has nothing else."""
        if not self.has_getitems:
            return dataset[key]
        (sample,) = dataset.__getitems__([key])
        return sample

    def try_sample(self, dataset: Any, in_place: InPlace | None, key: Any) -> None:
        """Reads one sample for nothing but to see whether it can be read."""
        if in_place is None or not in_place.takes([key]):
            self.sample(dataset, key)
            return
        assert self.layout is not None
        if self.is_whole:
            assert self.ragged is not None
            in_place.read_ragged([key], RaggedRows(self.layout, self.ragged, 1, no_room, Arenas()), lambda row: True)
        else:
            in_place.read_alone(key, private_rows(self.layout, 1))


PLAIN = ReadPlan()  # samples one by one, as torch's collate takes them


def plan_of(
    dataset: Any,
    *,
    collate_fn: Callable[[Any], Any] | None,
    auto_collation: bool,
    ragged: str | Mapping[str, str],
    is_torch_mode: bool,
) -> ReadPlan:
    """The plan of a loader.

    Args:
        collate_fn: the user's; None: torch's default.
        ragged: as the loader was given it.
    Raises:
        ValueError: `ragged` is no mode, or does not go with the dataset's schema.
    """
    has_getitems = auto_collation and bool(ability_of(dataset, "__getitems__"))
    found = in_place_of(dataset, ragged_of(ragged, None, is_torch_mode=is_torch_mode))
    schema = ability_of(found or dataset, "schema")
    rule = ragged_of(ragged, schema if isinstance(schema, Mapping) else None, is_torch_mode=is_torch_mode)
    if collate_fn is not None:
        return ReadPlan("collate_fn", None, rule, is_whole=True, has_getitems=has_getitems)
    if not auto_collation:
        return ReadPlan("__getitem__", None, rule, is_whole=True)
    in_place = in_place_of(dataset, rule)
    if in_place is None:
        path = "__getitems__" if has_getitems else "__getitem__"
        is_whole = rule is not None and rule.is_certain
        return ReadPlan(path, None, rule, is_whole=is_whole, has_getitems=has_getitems)
    path = "read_batch_into" if in_place.read_batch_into is not None else "read_into"
    layout = in_place.layout()
    return ReadPlan(path, layout, rule, is_whole=layout.is_ragged, has_getitems=has_getitems)
