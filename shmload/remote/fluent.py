"""The functions of fluent stages, with the semantics of webdataset 1.0.2 (remote/program.py has the stages).

Error handlers have webdataset's names. They are functions of the exception: they return True to continue without the sample or
False to end the pass, or they raise.

decode() converts the bytes of a sample's members to values, with handlers of (extension, bytes):

    pre         decompress (.gz, .zst) and return a Continue, with which the other handlers go on
    handlers    image specs and the user's functions; the first result that is not None is used
    post        the decoders by the last part of the extension: formats/tar/members.py
    otherwise   the bytes stay unchanged

Formats that can run code raise an error unless they are allowed, because bytes would only fail later and less clearly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any

import numpy as np

from shmload.errors import ShardCorrupt
from shmload.formats.encryption import ENCRYPTED
from shmload.formats.tar.members import EXPANDERS, IMAGE_EXTENSIONS, Decoders, image_decoder
from shmload.worker.stage_engine import DROP


def reraise_exception(error: Exception) -> bool:
    """Raise the error.

    Args:
        error: raised by the stage.
    """
    raise error


def ignore_and_continue(error: Exception) -> bool:
    """Skip the sample.

    Args:
        error: raised by the stage.
    """
    return True


def warn_and_continue(error: Exception) -> bool:
    """Skip the sample with a warning.

    Args:
        error: raised by the stage.
    """
    warnings.warn(repr(error), stacklevel=2)
    return True


def ignore_and_stop(error: Exception) -> bool:
    """End the pass.

    Args:
        error: raised by the stage.
    """
    return False


def warn_and_stop(error: Exception) -> bool:
    """End the pass with a warning.

    Args:
        error: raised by the stage.
    """
    warnings.warn(repr(error), stacklevel=2)
    return False


def first_of(sample: Mapping[str, Any], names: str | Sequence[str], method: str, missing_is_error: bool) -> Any:
    """Return the first of several fields that a sample has; names are separated by ";".

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


MemberHandler = Callable[[str, bytes], Any]  # (".seg.png", bytes) -> the value, or None if it does not handle the extension
_PICKLES = frozenset({"pickle", "pkl", "pyd", "pth"})


@dataclass
class Continue:
    """Returned by a handler that has only decompressed the member: the other handlers continue with this.

    Args:
        key: the extension without the part that was handled.
        data: the bytes.
    """

    key: str
    data: bytes


def _decoded_image(decode: Callable[[bytes], Any], key: str, data: bytes) -> Any:
    return decode(data) if _last(key) in IMAGE_EXTENSIONS else None


def _expanded(key: str, data: bytes) -> Continue | None:
    inner, _, last = key.rpartition(".")
    return Continue(inner, EXPANDERS[last](data)) if last in EXPANDERS else None


@dataclass
class _Decoded:
    """A decoded value, which may be None (JSON's null). A handler that returns None itself has not decoded the member."""

    value: Any


def _by_extension(decoders: Decoders, allow_pickle: bool, key: str, data: bytes) -> _Decoded | None:
    """Decode a member with the default decoder for its extension, if there is one."""
    if not allow_pickle and _last(key) in _PICKLES:
        raise PermissionError(
            f"{key.removeprefix('.')!r} is a pickle, which can run any code when it is read: give "
            "decode(allow_pickle=True) for shards you trust, or leave it as bytes by only="
        )
    if key.endswith(ENCRYPTED):
        raise PermissionError(f"{key.removeprefix('.')!r} is encrypted: give RemoteDataset(key=...), or leave it as bytes by only=")
    decoder = decoders.of(key.removeprefix("."))
    return None if decoder is None else _Decoded(decoder(data))


class SampleDecoder:
    """Decodes the members of a sample.

    Args:
        handlers: image specs or functions of (extension with leading dot, bytes).
        pre, post: functions called before and after them; None uses the default ones.
        only: extensions to decode; None decodes all.
        partial: skip members that are already decoded.
        allow_pickle: decode pickles.
    """

    def __init__(
        self,
        handlers: Sequence[str | MemberHandler],
        pre: Sequence[MemberHandler] | None,
        post: Sequence[MemberHandler] | None,
        only: str | Iterable[str] | None,
        *,
        partial: bool,
        allow_pickle: bool,
    ) -> None:
        first = [_expanded] if pre is None else list(pre)
        last = [partial_of(_by_extension, Decoders(True, allow_pickle=allow_pickle), allow_pickle)] if post is None else list(post)
        own = [partial_of(_decoded_image, image_decoder(each)) if isinstance(each, str) else each for each in handlers]
        self._handlers: list[MemberHandler] = [*first, *own, *last]
        for handler in self._handlers:
            if not callable(handler):
                raise TypeError(f"decode: a handler is an image spec or a function of (extension, bytes); got {handler!r}")
        self._only = None if only is None else frozenset(only.split() if isinstance(only, str) else only)
        self._partial = partial

    def __call__(self, sample: Any) -> dict[str, Any]:
        _needs_dict("decode", sample)
        found = {}
        for name, value in sample.items():
            is_left = name.startswith("__") or (self._only is not None and name not in self._only)
            if is_left or (self._partial and not isinstance(value, bytes)):
                found[name] = value
                continue
            if not isinstance(value, bytes):
                raise TypeError(
                    f"decode: {name!r} of sample {sample.get('__key__')!r} is a {type(value).__name__} already, bytes are needed: "
                    "decode before map, or give decode(partial=True)"
                )
            try:
                found[name] = self._decoded(f".{name}", value)
            except (ImportError, MemoryError):  # the member is not the cause
                raise
            except PermissionError as error:
                raise ValueError(f"{_where(sample)}: {error}") from None
            except Exception as error:  # raised by a library or the user's handler
                raise ShardCorrupt(f"{_where(sample)}: member {name!r}: {error}") from error
        return found

    def _decoded(self, key: str, data: bytes) -> Any:
        for handler in self._handlers:
            found = handler(key, data)
            if isinstance(found, Continue):
                key, data = found.key, found.data
            elif isinstance(found, _Decoded):
                return found.value
            elif found is not None:
                return found
        return data


def _last(key: str) -> str:
    return key.rpartition(".")[2].lower()


def _where(sample: dict[str, Any]) -> str:
    return f"{sample.get('__url__', 'a shard')}: sample {sample.get('__key__')!r}"


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
    _needs_dict("map_dict", sample)
    made = dict(sample)
    for name, function in functions.items():
        if name not in made:
            raise ValueError(f"map_dict: there is no {name!r} in the sample, only {', '.join(map(repr, made))}")
        made[name] = function(made[name])
    return made


def mapped_tuple(functions: Sequence[Callable[[Any], Any] | None], item: Any) -> Any:
    """Apply map_tuple(f, g) field by field; further fields do not change."""
    if not isinstance(item, (list, tuple)):
        raise TypeError(f"map_tuple needs a tuple, got a {type(item).__name__}: call to_tuple(...) before it")
    made = list(item)
    for number, function in enumerate(functions[: len(made)]):
        if function is not None:
            made[number] = function(made[number])
    return tuple(made)


def to_tuple(fields: Sequence[str], missing_is_error: bool, none_is_error: bool, sample: Any) -> tuple[Any, ...]:
    """Apply to_tuple("jpg;png", "cls")."""
    _needs_dict("to_tuple", sample)
    made = tuple(first_of(sample, names, "to_tuple", missing_is_error) for names in fields)
    if none_is_error and any(value is None for value in made):
        names = [name for name, value in zip(fields, made, strict=True) if value is None]
        raise ValueError(f"to_tuple: {', '.join(map(repr, names))} of sample {sample.get('__key__')!r} is None")
    return made


def unbatched(batch: Any) -> Iterator[Any]:
    """Yield the items of a batch of columns."""
    if isinstance(batch, (list, tuple)):
        for number in range(len(batch[0]) if batch else 0):
            yield tuple(column[number] for column in batch)
    elif isinstance(batch, dict):
        lengths = {len(column) for column in batch.values()}
        if len(lengths) != 1:
            raise ValueError(f"unbatched: the columns of a batch are of one length, these of {sorted(lengths)}")
        for number in range(lengths.pop()):
            yield {name: column[number] for name, column in batch.items()}
    else:
        raise TypeError(f"unbatched needs batches, tuples or dicts of columns; got a {type(batch).__name__}")


def renamed(names: Mapping[str, str | Sequence[str]], keep: bool, sample: Any) -> dict[str, Any]:
    """Apply rename(new="old;older")."""
    _needs_dict("rename", sample)
    found = {name: first_of(sample, old, "rename", True) for name, old in names.items()}
    if not keep:
        return found
    replaced = {name for old in names.values() for name in (old.split(";") if isinstance(old, str) else old)}
    return {**{name: value for name, value in sample.items() if name not in replaced}, **found}


def _needs_dict(method: str, item: Any) -> None:
    if not isinstance(item, dict):
        raise TypeError(f"{method} needs samples that are dicts, got a {type(item).__name__}: call it before to_tuple")
