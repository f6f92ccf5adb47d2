"""webdataset's fluent methods: each returns a new dataset with one more stage.

The stages are kept in a `Program` (program.py), which also knows how many items they make.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial as of
from typing import Any, Self, TypeVar

from torch.utils.data import IterableDataset

from shmload.remote.error_handlers import reraise_exception
from shmload.remote.program import Batching, Piping, Program, Slicing
from shmload.remote.sample_decoder import MemberHandler, SampleDecoder
from shmload.remote.stage_functions import default_collation_fn, mapped, mapped_dict, mapped_tuple, renamed, unbatched
from shmload.remote.stage_functions import to_tuple as tuple_of_fields
from shmload.schedule.units import Batched, Sliced, Units
from shmload.worker.item_stages import BufferedShuffle, Filter, FlatMap
from shmload.worker.stage_engine import Each, Expanding, Handler

T = TypeVar("T")


def _function(method: str, given: T) -> T:
    if not callable(given):
        raise TypeError(f"{method} needs a function; got {given!r}")
    return given


def checked_count(what: str, given: Any, at_least: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        number = at_least - 1
    if number < at_least:
        raise ValueError(f"{what} must be an integer of at least {at_least}, got {given!r}")
    return number


class FluentMethods(IterableDataset[Any]):
    """A dataset with webdataset's methods. A subclass reads the samples and defines `_with`.

    Attributes:
        program: the stages of the dataset.
    """

    program: Program

    @abstractmethod
    def _with(self, program: Program) -> Self:
        """Return the same dataset with another program."""

    def decode(
        self,
        *handlers: str | MemberHandler,
        pre: Sequence[MemberHandler] | None = None,
        post: Sequence[MemberHandler] | None = None,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        allow_pickle: bool = False,
        handler: Handler = reraise_exception,
    ) -> Self:
        """Decode members from bytes to values: images according to a spec ("pil", "rgb8", "torchrgb", ...), others by extension.

        Args:
            handlers: image specs, or functions of (extension with leading dot, bytes); the first result that is not None is used.
            pre: functions called before them; None expands .gz and .zst.
            post: functions called after them; None uses the decoders by extension. A member without a decoder stays bytes.
            only: extensions to decode; None decodes all.
            partial: skip members that are not bytes any more.
            allow_pickle: decode pickles and files for torch.load, which can run arbitrary code; otherwise these are an error.
            handler: handles a sample that fails; from shmload.remote: reraise_exception, warn_and_continue and so on.
        """
        decoder = SampleDecoder(handlers, pre, post, only, partial=partial, allow_pickle=allow_pickle)
        return self._each("decode", decoder, handler)

    def to_tuple(
        self, *fields: str, handler: Handler = reraise_exception, missing_is_error: bool = True, none_is_error: bool | None = None
    ) -> Self:
        """Convert samples from dicts to tuples.

        Args:
            fields: names, with alternatives: "jpg;png". A single string with spaces is split into several.
            handler: handles a sample that fails.
            missing_is_error: if False, a missing field is None.
            none_is_error: whether a field that is None is an error; by default the same as `missing_is_error`.
        Raises:
            ValueError: no field is given.
        """
        names = tuple(fields[0].split()) if len(fields) == 1 else fields
        if not names:
            raise ValueError('to_tuple needs at least one field: to_tuple("jpg;png", "cls")')
        none = missing_is_error if none_is_error is None else none_is_error
        return self._each("to_tuple", of(tuple_of_fields, names, missing_is_error, none), handler)

    def map(self, function: Callable[[Any], Any], handler: Handler = reraise_exception) -> Self:
        """Apply a function to each item. A sample that stays a dict keeps its key; an item is dropped if the function returns None.

        Args:
            function: item -> item.
            handler: handles an item that fails.
        """
        return self._each("map", of(mapped, _function("map", function)), handler)

    def map_dict(self, handler: Handler = reraise_exception, **functions: Callable[[Any], Any]) -> Self:
        """Apply functions to fields by name.

        Args:
            handler: handles a sample that fails.
            functions: field=function.
        Raises:
            ValueError: no function is given.
        """
        if not functions:
            raise ValueError("map_dict needs functions by field: map_dict(jpg=f)")
        checked = {name: _function("map_dict", function) for name, function in functions.items()}
        return self._each("map_dict", of(mapped_dict, checked), handler)

    def map_tuple(self, *functions: Callable[[Any], Any] | None, handler: Handler = reraise_exception) -> Self:
        """Apply functions to fields by position. A field without a function, or with None, does not change.

        Args:
            functions: for the first fields.
            handler: handles an item that fails.
        """
        checked = [None if function is None else _function("map_tuple", function) for function in functions]
        return self._each("map_tuple", of(mapped_tuple, checked), handler)

    def rename(self, handler: Handler = reraise_exception, keep: bool = True, **names: str | Sequence[str]) -> Self:
        """Rename fields.

        Args:
            handler: handles a sample that fails.
            keep: keep other fields.
            names: new="old;older".
        Raises:
            ValueError: no name is given.
        """
        if not names:
            raise ValueError('rename needs names: rename(image="jpg;png")')
        return self._each("rename", of(renamed, names, keep), handler)

    def select(self, predicate: Callable[[Any], Any]) -> Self:
        """Keep only the items for which a function returns True. The number of items becomes unknown.

        Args:
            predicate: item -> bool.
        """
        return self._expanded("select", Filter(_function("select", predicate)))

    def shuffle(self, size: int = 1000, initial: int = 100) -> Self:
        """Shuffle items with a buffer, in addition to the dataset's own order: each step yields a random item of the buffer.

        Args:
            size: size of the buffer in items; 0 does nothing.
            initial: number of items in the buffer before the first is yielded.
        """
        size = checked_count("shuffle: size", size, 0)
        if size < 1:
            return self._with(self.program)
        stage = BufferedShuffle(size, min(checked_count("shuffle: initial", initial, 0), size))
        program = self.program.then("shuffle", stage)
        return self._with(replace(program, known="number" if program.known == "units" else program.known))

    def batched(
        self, batchsize: int = 20, collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn, partial: bool = True
    ) -> Self:
        """Collect items into batches. The batches are the same for any number of workers.

        Args:
            batchsize: items per batch.
            collation_fn: list of items -> batch; None yields the list.
            partial: whether the last batch may be shorter.
        """
        size = checked_count("batched: batchsize", batchsize, 1)
        program = self.program.then("batched", Batching(size, collation_fn, bool(partial)))
        if program.known != "nothing":
            program = replace(program, units=Units((*program.units.levels, Batched(size, bool(partial)))))
        return self._with(program)

    def unbatched(self) -> Self:
        """Yield the items of batches one by one. The number of items becomes unknown."""
        return self._expanded("unbatched", FlatMap(unbatched))

    def slice(self, *bounds: int | None) -> Self:
        """Select a slice of the items of a rank's pass: slice(stop), slice(start, stop), slice(start, stop, step).

        After shuffle, select, unbatched or then, each worker counts its items separately.

        Args:
            bounds: as in itertools.islice.
        Raises:
            TypeError: there are not one to three arguments.
        """
        if not 1 <= len(bounds) <= 3:
            raise TypeError(f"slice takes one to three arguments, stop or start, stop, step; got {len(bounds)}")
        start, stop, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        start, step = checked_count("slice: start", start or 0, 0), checked_count("slice: step", 1 if step is None else step, 1)
        stop = None if stop is None else checked_count("slice: stop", stop, 0)
        if self.program.known == "units":
            return self._with(replace(self.program, units=Units((*self.program.units.levels, Sliced(start, stop, step)))))
        return self._expanded("slice", Slicing(start, stop, step))

    def then(self, function: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> Self:
        """Apply a function to the iterator of items, for example your own generator. The number of items becomes unknown.

        Args:
            function: (items, *args, **kwargs) -> items.
            args: positional arguments for it.
            kwargs: keyword arguments for it.
        """
        return self._expanded("then", Piping(_function("then", function), args, kwargs))

    def repeat(self, nepochs: int | None = None) -> Self:
        """Read several epochs in one pass, each in its own order.

        Args:
            nepochs: number of epochs; None repeats forever.
        """
        number = None if nepochs is None else checked_count("repeat: nepochs", nepochs, 1)
        return self._with(replace(self.program, repetitions=number))

    def with_epoch(self, n: int) -> Self:
        """Make each pass `n` items long on each rank, over as many epochs as that takes.

        Each pass begins with a new epoch's order. A pass that ends within an epoch leaves the rest of it out.

        Args:
            n: items of a rank's pass, over all its workers.
        """
        return self._with(replace(self.program, limit=checked_count("with_epoch: n", n, 1)))

    def with_length(self, n: int) -> Self:
        """Set the value of len(). The items do not change.

        Args:
            n: the length.
        """
        return self._with(replace(self.program, length=checked_count("with_length: n", n, 0)))

    def _each(self, name: str, function: Callable[[Any], Any], handler: Handler) -> Self:
        return self._with(self.program.then(name, Each(name, function, handler)))

    def _expanded(self, name: str, stage: Expanding) -> Self:
        return self._with(self.program.then(name, stage).ended_by(name))
