"""Find out whether a dataset has the decoding protocol (a `schema`, and `read_into` or `read_batch_into`), and get its reader."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from shmload.batch.layout import layout_of_schema
from shmload.batch.ragged import Ragged
from shmload.introspect.abilities import ability_of, overrides, package_ability, takes_arguments
from shmload.worker.in_place_dataset import InPlace, InPlaceConcat, InPlaceSubset
from shmload.worker.tensor_rows import ConcatenatedTensors, TensorRows, tensors_in_place

log = logging.getLogger("shmload")

_ARGUMENTS = {"read_into": "(index, out)", "read_batch_into": "(indices, out)"}
DECODING = ("read_into", "read_batch_into")  # the methods of the decoding protocol


def in_place_reader_of(dataset: Any, ragged: Ragged | None = None) -> InPlace | None:
    """Return a dataset's in-place reader; None if it has none.

    Datasets with the decoding protocol have one, and so have Hugging Face's datasets, TensorDataset, and Subset, ConcatDataset, Mix
    and pipelines over datasets that have one.

    Args:
        dataset: the dataset.
        ragged: the loader's rule for lists of different lengths, for datasets without a schema of their own.
    """
    kind = type(dataset)
    if kind.__module__ == "torch.utils.data.dataset":
        if kind.__name__ == "Subset":
            inner = in_place_reader_of(dataset.dataset, ragged)
            return inner and InPlaceSubset(inner, dataset.indices)
        if kind.__name__ == "TensorDataset":
            return tensors_in_place(dataset)
        if kind.__name__ == "ConcatDataset":
            return _concatenated(dataset, ragged, is_mix=False)
    if (made := package_ability(dataset, "in_place")) is not None:  # a pipeline that only selects samples of a dataset
        given: InPlace | None = made(ragged)
        return given
    if kind.__module__ in ("datasets.arrow_dataset", "datasets.dataset_dict"):
        from shmload.worker.arrow import arrow_in_place

        return arrow_in_place(dataset, ragged)
    if package_ability(dataset, "is_concatenation"):
        return _concatenated(dataset, ragged, is_mix=True)
    return InPlace(dataset) if declares_decoding(dataset) else None


def _concatenated(dataset: Any, ragged: Ragged | None, *, is_mix: bool) -> InPlace | None:
    """Return the in-place reader of a concatenation; None if a member has none, or another kind of samples than the first."""
    members: list[InPlace] = []
    kinds = set()
    for each in dataset.datasets:
        member = in_place_reader_of(each, ragged)
        if member is None or not member.reads_rows_alike:
            return None
        members.append(member)
        kinds.add((str(dict(member.schema)), member.batch_type or dict))
        if len(kinds) > 1:
            return None
    if not members:
        return None
    if all(isinstance(member, TensorRows) for member in members):
        with suppress(ValueError):  # the rows of a tensor are not contiguous
            return ConcatenatedTensors(cast("list[TensorRows]", members), dataset.cumulative_sizes, is_cyclic=is_mix)
    return InPlaceConcat(members, dataset.cumulative_sizes, is_cyclic=is_mix)


def declares_decoding(dataset: Any) -> bool:
    """Return whether a dataset has the whole decoding protocol: a valid schema, and `read_into` or `read_batch_into`.

    A program may use attributes of these names for something else; its dataset is then read by `__getitem__`, or by `__iter__` if
    its schema is no mapping. If it has neither, return True, so that the flaw in the protocol becomes an error. A dataset whose
    class overrides the `__getitem__` of a base class that decodes in place is read by `__getitem__`, too: the override changes what
    a sample is.

    Raises:
        TypeError: the protocol is not complete, and the dataset cannot be read otherwise.
        Exception: the schema of one of this package's datasets cannot be read, because its file is missing or damaged.
    """
    schema = _schema_of(dataset)
    readers = {name: found for name in DECODING if (found := ability_of(dataset, name)) is not None}
    wrong = [name for name, reader in readers.items() if not takes_arguments(reader, 2)]
    is_read_otherwise = any(hasattr(type(dataset), name) for name in ("__getitems__", "__iter__")) or has_getitem(dataset)
    if readers and not is_read_otherwise:
        _check_complete(dataset, next(iter(readers)), wrong)
    if isinstance(schema, Mapping) and not readers and not is_read_otherwise:
        raise TypeError(
            f"{type(dataset).__name__} has a schema, but no method that reads a sample: define read_into(index, out), "
            "read_batch_into(indices, out) or __getitem__(index)"
        )
    if schema is None or not readers:
        return False
    if overrides(dataset, ("__getitem__", "__getitems__"), DECODING):
        why = "its class overrides __getitem__ of a base class that decodes in place"
    elif wrong:
        why = "read_into and read_batch_into take two arguments, an index or indices and the rows"
    else:
        why = schema_error(schema, ability_of(dataset, "batch_type"))
    if why and has_getitem(dataset):
        log.debug("%s is read by its samples and does not decode in place: %s", type(dataset).__name__, why)
        return False
    return not why or isinstance(schema, Mapping) or not hasattr(type(dataset), "__iter__")


def _check_complete(dataset: Any, reader: str, wrong: Sequence[str]) -> None:
    """Raise unless a dataset that has no `__getitem__` has a schema, and readers with the right arguments."""
    kind = type(dataset).__name__
    if isinstance(dataset, type):
        raise TypeError(f"the dataset is the class {dataset.__name__}: pass an instance of it")
    if wrong:
        raise TypeError(f"{kind}.{wrong[0]} must take two arguments, {_ARGUMENTS[wrong[0]]}; got {_signature(dataset, wrong[0])}")
    if getattr(dataset, "schema", None) is None:  # or raises the error of the user's property
        raise TypeError(
            f"{kind} has {reader} but no schema, which must map each field to (dtype, shape): "
            'schema = {"image": ("uint8", (3, 224, 224)), "label": "int64"}'
        )


def _signature(dataset: Any, name: str) -> str:
    try:
        return f"{name}{inspect.signature(getattr(dataset, name))}"
    except (TypeError, ValueError):  # it is not callable, or in C
        return repr(getattr(dataset, name))


def _schema_of(dataset: Any) -> Any:
    """Return a dataset's schema; None if it has none, or if the schema of a class from outside this package raises."""
    kind = next((kind for kind in type(dataset).__mro__ if "schema" in vars(kind)), object)
    if kind.__module__.startswith("shmload.formats."):
        return dataset.schema  # its error is that of the file
    return ability_of(dataset, "schema")


def schema_error(schema: Any, batch_type: Any = None) -> str:
    """Return a description of the flaw in a schema; empty if it is valid."""
    try:
        layout_of_schema(schema, batch_type)
    except Exception as error:  # the attribute may be anything
        return f"{type(error).__name__}: {error}"
    return ""


def has_getitem(dataset: Any) -> bool:
    """Return whether a dataset has its own `__getitem__`. The one of torch's Dataset only raises."""
    found = getattr(type(dataset), "__getitem__", None)
    place = getattr(found, "__module__", ""), getattr(found, "__qualname__", "")  # compiled methods have no module
    return found is not None and place != ("torch.utils.data.dataset", "Dataset.__getitem__")


def one_without_samples(dataset: Any) -> Any:
    """Return the dataset that decodes in place and has no samples by index: this one, or that of a Subset, ConcatDataset or Mix.

    Return None if there is none.
    """
    is_of_torch = type(dataset).__module__ == "torch.utils.data.dataset" and type(dataset).__name__ in ("Subset", "ConcatDataset")
    if is_of_torch or package_ability(dataset, "is_concatenation"):
        members = dataset.datasets if hasattr(dataset, "datasets") else [dataset.dataset]
        return next((found for each in members if (found := one_without_samples(each)) is not None), None)
    if has_getitem(dataset) or any(hasattr(type(dataset), name) for name in ("__getitems__", "__iter__")):
        return None
    return dataset if declares_decoding(dataset) else None


def is_decoder(function: Any) -> bool:
    """Return whether a stage's function decodes an item into a row: it has a `schema` and `read_into(item, out)`."""
    return isinstance(ability_of(function, "schema"), Mapping) and takes_arguments(ability_of(function, "read_into"), 2)
