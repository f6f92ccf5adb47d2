"""The read plan: how the batches of one loader are read, decided once from the loader's arguments and its dataset.

The plan is part of the job. The trainer that publishes orders, the workers that fill them and the reader without workers all follow
it and never ask the dataset again, because two decisions could differ. (They once did: batches of text were published in chunks,
and each chunk's worker wrote the whole batch.)

Precedence: a custom collate_fn (which makes the whole batch), `read_batch_into`, `read_into`, `__getitems__`, `__getitem__`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.batch.layout import Layout, layout_of_schema
from shmload.batch.ragged import AS_LISTS, AsTorchOrList, Ragged, ragged_of
from shmload.batch.ragged_rows import Arenas, RaggedRows
from shmload.batch.row_placer import RowOut, private_rows
from shmload.introspect.abilities import ability_of
from shmload.worker.decoding_protocol import in_place_reader_of, one_without_samples, schema_error
from shmload.worker.first_sample import check_first_calls
from shmload.worker.in_place_dataset import InPlace

log = logging.getLogger("shmload")


@dataclass(frozen=True)
class ReadPlan:
    """The decision how each batch is read and written.

    Attributes:
        path: the function that reads samples: "collate_fn", "read_batch_into", "read_into", "__getitems__" or "__getitem__".
        layout: offsets of the fields, from the schema of a dataset that is read in place; if None, the first sample determines it.
        ragged: how to deliver ragged fields; if None, raise an error for samples that torch's collate refuses.
        is_whole: rows have no known offsets, so one worker reads and writes the whole batch. If False, the samples of a batch may
            still differ; the batch is then ordered as packed.
        has_getitems: whether samples that are not read in place are read by `__getitems__`.
    """

    path: str = "__getitem__"
    layout: Layout | None = None
    ragged: Ragged | None = None
    is_whole: bool = False
    has_getitems: bool = False

    @property
    def rows(self) -> Layout | None:
        """Return the layout of rows, if it is known before the first sample is read."""
        return None if self.is_whole else self.layout

    def in_place(self, dataset: Any, *, checks_all: bool) -> InPlace | None:
        """Return the dataset's in-place reader for this process; None if it does not decode in place.

        Args:
            dataset: the dataset.
            checks_all: check that every sample is written, not only the first.
        """
        if self.layout is None or (found := in_place_reader_of(dataset, self.ragged)) is None:
            return None
        check_first_calls(found, self.layout, self._private_out, dataset, always=checks_all)
        return found

    def _private_out(self, key: Any, is_batch: bool) -> Any:
        """Return the `out` in private memory for one sample, or for several."""
        assert self.layout is not None
        num_rows = len(key) if is_batch else 1
        if self.is_whole:
            assert self.ragged is not None
            ragged_rows = RaggedRows(self.layout, self.ragged, num_rows, no_room, Arenas())
            return ragged_rows.out(slice(None) if is_batch else 0)
        return RowOut(private_rows(self.layout, num_rows), slice(0, num_rows) if is_batch else 0)

    def read(self, dataset: Any, key: Any) -> Any:
        """Read one sample, not in place.

        Args:
            dataset: the dataset.
            key: index of the sample.
        Returns:
            the sample; or, if `has_getitems`, the result of `__getitems__` for this key, which may contain any number of samples.
        """
        return dataset.__getitems__([key]) if self.has_getitems else dataset[key]

    def try_sample(self, dataset: Any, in_place: InPlace | None, key: Any) -> None:
        """Read one sample and discard it, to find out whether it can be read.

        Args:
            dataset: the dataset.
            in_place: its in-place reader, or None.
            key: index of the sample.
        Raises:
            Exception: the error of the dataset, if it cannot.
        """
        if in_place is None or not in_place.takes([key]):
            self.read(dataset, key)
            return
        assert self.layout is not None
        if self.is_whole:
            assert self.ragged is not None
            in_place.read_ragged([key], RaggedRows(self.layout, self.ragged, 1, no_room, Arenas()), lambda row: True)
        elif in_place.read_into is not None:
            in_place.read_into(key, self._private_out(key, False))
        elif in_place.read_batch_into is not None:
            in_place.read_batch_into(np.array([key], np.int64), self._private_out([key], True))


def no_room(nbytes: int) -> NDArray[np.uint8]:
    """Return empty memory, for a sample that is decoded outside of a slot."""
    return np.empty(0, np.uint8)


PLAIN = ReadPlan()  # sample by sample, with torch's collate


def plan_of(
    dataset: Any, *, collate_fn: Callable[[Any], Any] | None, auto_collation: bool, ragged: str | Mapping[str, str], is_torch: bool
) -> ReadPlan:
    """Decide how a loader reads its batches.

    Args:
        dataset: the dataset.
        collate_fn: the user's function; None for torch's default.
        auto_collation: whether samples are collated into batches.
        ragged: the loader's argument.
        is_torch: torch mode.
    Raises:
        TypeError: samples are read by `__getitem__`, which the dataset or a member of it does not have.
        ValueError: `ragged` is not a mode, or does not fit the dataset's schema.
    """
    has_getitems = auto_collation and bool(ability_of(dataset, "__getitems__"))
    is_default = isinstance(ragged, AsTorchOrList)
    rule = (None if is_torch else AS_LISTS) if is_default else ragged_of(ragged, None, is_torch_mode=is_torch)
    in_place = in_place_reader_of(dataset, rule)
    schema = in_place.schema if in_place is not None else None if is_default else ability_of(dataset, "schema")
    if in_place is not None:
        layout_of_schema(in_place.schema)  # raises if it is wrong
    if isinstance(schema, Mapping) and in_place is None and (why := schema_error(schema)):
        log.debug("the schema of %s does not say which fields are ragged: %s", type(dataset).__name__, why)
        schema = None
    if isinstance(schema, Mapping) and not (is_default and all(map(_is_fixed, schema.values()))):
        rule = ragged_of(ragged, schema, is_torch_mode=is_torch)
        in_place = in_place_reader_of(dataset, rule)
    reads_samples = collate_fn is not None or not auto_collation
    if reads_samples and in_place is not None and (found := one_without_samples(dataset)) is not None:
        given, remedy = ("collate_fn", "leave collate_fn out") if auto_collation else ("batch_size=None", "give a batch_size")
        raise TypeError(
            f"with {given}, samples are read by __getitem__ and not decoded in place, and {type(found).__name__} has no "
            f"__getitem__: add one, or {remedy}"
        )
    if in_place is None and (found := one_without_samples(dataset)) is not None:
        raise TypeError(
            f"the members of {type(dataset).__name__} are decoded in place only if all have equal schemas; otherwise samples are "
            f"read by __getitem__, which {type(found).__name__} does not have: give all members one schema, or add __getitem__"
        )
    if collate_fn is not None:
        return ReadPlan("collate_fn", None, rule, is_whole=True, has_getitems=has_getitems)
    if not auto_collation:
        return ReadPlan("__getitem__", None, rule, is_whole=True)
    if in_place is None:
        path = "__getitems__" if has_getitems else "__getitem__"
        is_whole = rule is not None and rule.is_certain
        return ReadPlan(path, None, rule, is_whole=is_whole, has_getitems=has_getitems)
    path = "read_batch_into" if in_place.read_batch_into is not None else "read_into"
    layout = in_place.layout()
    if isinstance(ragged, Mapping) and (unknown := sorted(ragged.keys() - in_place.schema.keys())):
        raise ValueError(
            f"ragged names {', '.join(map(repr, unknown))}, but the schema of {type(dataset).__name__} has the fields "
            f"{', '.join(map(repr, in_place.schema))}"
        )
    return ReadPlan(path, layout, rule, is_whole=layout.is_ragged, has_getitems=has_getitems)


def _is_fixed(spec: Any) -> bool:
    """Return whether all rows of a field have the same size."""
    dtype, shape = spec[:2] if isinstance(spec, tuple) else (spec, ())
    return dtype not in (str, bytes) and None not in shape
