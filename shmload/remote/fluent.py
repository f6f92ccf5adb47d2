"""The fluent methods: each gives a new dataset with one stage more, and keeps account of how many items that makes (program.py)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from shmload.remote.collation import default_collation_fn
from shmload.remote.decoding import MemberHandler, SampleDecoder
from shmload.remote.handlers import Handler, reraise_exception
from shmload.remote.program import Program
from shmload.remote.stages import (
    Batch,
    Decoded,
    Each,
    Mapped,
    MappedDict,
    MappedTuple,
    Renamed,
    Select,
    Shuffle,
    Slice,
    Then,
    ToTuple,
    Unbatch,
)
from shmload.remote.units import Batched, Sliced

__all__ = ["Fluent"]

T = TypeVar("T")


class Fluent:
    """webdataset's methods over a dataset that has a `program`."""

    program: Program

    def _with(self, program: Program) -> Self:
        raise NotImplementedError

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
        """Members from bytes to values: images by a spec ("pil", "rgb8", "torchrgb", ...), all else by its extension.

        Args:
            handlers: image specs, or functions of (extension with a dot before it, bytes); the first that gives something other
            than
                None counts.
            pre: functions before them; None expands .gz.
            post: functions behind them; None are the decoders by extension. What nobody decodes stays bytes.
            only: extensions that are decoded; None is all.
            partial: leave members that are no bytes any more.
            allow_pickle: decode pickles and what torch.load reads, which can run any code; without it they are an error.
            handler: what becomes of a sample that fails; of shmload.remote: reraise_exception, warn_and_continue and so on.
        """
        decoder = SampleDecoder(handlers, pre, post, only, partial=partial, allow_pickle=allow_pickle)
        return self._each("decode", Decoded(decoder), handler)

    def to_tuple(
        self,
        *fields: str,
        handler: Handler = reraise_exception,
        missing_is_error: bool = True,
        none_is_error: bool | None = None,
    ) -> Self:
        """Samples from dicts to tuples.

        Args:
            fields: names, with alternatives: "jpg;png". One string with spaces is several.
            handler: what becomes of a sample that fails.
            missing_is_error: otherwise a missing field is None.
            none_is_error: whether a field may be None; None: as `missing_is_error` says.
        Raises:
            ValueError: no field is named.
        """
        names = tuple(fields[0].split()) if len(fields) == 1 else fields
        if not names:
            raise ValueError('to_tuple needs at least one field: to_tuple("jpg;png", "cls")')
        none = missing_is_error if none_is_error is None else none_is_error
        return self._each("to_tuple", ToTuple(names, missing_is_error, none), handler)

    def map(self, function: Callable[[Any], Any], handler: Handler = reraise_exception) -> Self:
        """A function of each item. A sample that stays a dict keeps its key; one for which it gives None is left out.

        Args:
            function: of the item.
            handler: what becomes of an item that fails.
        """
        return self._each("map", Mapped(_function("map", function)), handler)

    def map_dict(self, handler: Handler = reraise_exception, **functions: Callable[[Any], Any]) -> Self:
        """Functions of fields by name.

        Args:
            handler: what becomes of a sample that fails.
            functions: field=function.
        Raises:
            ValueError: there is none.
        """
        if not functions:
            raise ValueError("map_dict needs functions by field: map_dict(jpg=f)")
        checked = {name: _function("map_dict", function) for name, function in functions.items()}
        return self._each("map_dict", MappedDict(checked), handler)

    def map_tuple(self, *functions: Callable[[Any], Any] | None, handler: Handler = reraise_exception) -> Self:
        """Functions of fields by place; None, and fields without one, stay as they are.

        Args:
            functions: of the first fields.
            handler: what becomes of an item that fails.
        """
        checked = [None if function is None else _function("map_tuple", function) for function in functions]
        return self._each("map_tuple", MappedTuple(checked), handler)

    def rename(self, handler: Handler = reraise_exception, keep: bool = True, **names: str | Sequence[str]) -> Self:
        """Fields under other names.

        Args:
            handler: what becomes of a sample that fails.
            keep: whether other fields stay.
            names: new="old;older".
        Raises:
            ValueError: there is none.
        """
        if not names:
            raise ValueError('rename needs names: rename(image="jpg;png")')
        return self._each("rename", Renamed(names, keep), handler)

    def select(self, predicate: Callable[[Any], Any]) -> Self:
        """Only the items that a function says True of. How many there are is not known any more.

        Args:
            predicate: of the item.
        """
        return self._with(self.program.then(Select(_function("select", predicate))).ended_by("select"))

    def shuffle(self, size: int = 1000, initial: int = 100) -> Self:
        """A buffer that gives a random one of the items it holds, on top of the dataset's own order.

        Args:
            size: items it holds; 0 does nothing.
            initial: how many are there before it gives one.
        """
        size = _whole("shuffle: size", size, 0)
        if size < 1:
            return self._with(self.program)
        program = self.program.then(Shuffle(size, min(_whole("shuffle: initial", initial, 0), size)))
        return self._with(replace(program, known="number" if program.known == "units" else program.known))

    def batched(
        self,
        batchsize: int = 20,
        collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
        partial: bool = True,
    ) -> Self:
        """Items in batches. They are the same ones for any number of workers.

        Args:
            batchsize: items of each.
            collation_fn: from a list of items to the batch; None: the list.
            partial: whether the last may be shorter.
        """
        size = _whole("batched: batchsize", batchsize, 1)
        program = self.program.then(Batch(size, collation_fn, bool(partial)))
        if program.known != "nothing":
            program = replace(program, units=program.units.with_level(Batched(size, bool(partial))))
        return self._with(program)

    def unbatched(self) -> Self:
        """The items of batches, one by one. How many there are is not known any more."""
        return self._with(self.program.then(Unbatch()).ended_by("unbatched"))

    def slice(self, *bounds: int | None) -> Self:
        """Some of the items of a rank's pass: slice(stop), slice(start, stop), slice(start, stop, step).

        Behind shuffle, select, unbatched or then it counts in each worker for itself.

        Args:
            bounds: as of itertools.islice.
        Raises:
            TypeError: there are none, or more than three.
        """
        if not 1 <= len(bounds) <= 3:
            raise TypeError(f"slice takes stop, or start, stop and perhaps step; got {len(bounds)} arguments")
        start, stop, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        start, step = _whole("slice: start", start or 0, 0), _whole("slice: step", 1 if step is None else step, 1)
        stop = None if stop is None else _whole("slice: stop", stop, 0)
        if self.program.known == "units":
            return self._with(replace(self.program, units=self.program.units.with_level(Sliced(start, stop, step))))
        return self._with(self.program.then(Slice(start, stop, step)).ended_by("slice"))

    def then(self, function: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> Self:
        """A function of the iterator: a generator of your own. How many items there are is not known any more.

        Args:
            function: (items, *args, **kwargs) -> items.
            args: for it.
            kwargs: for it.
        """
        stage = Then(_function("then", function), args, kwargs)
        return self._with(self.program.then(stage).ended_by("then"))

    def pipe(self, function: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> Self:
        """`then` under another name of webdataset's.

        Args:
            function: (items, *args, **kwargs) -> items.
            args: for it.
            kwargs: for it.
        """
        return self.then(function, *args, **kwargs)

    def repeat(self, nepochs: int | None = None) -> Self:
        """Several epochs in one pass, each in an order of its own.

        Args:
            nepochs: how many; None: without end.
        """
        number = None if nepochs is None else _whole("repeat: nepochs", nepochs, 1)
        return self._with(replace(self.program, repetitions=number))

    def with_epoch(self, n: int) -> Self:
        """Passes of so many items in each rank, over as many epochs as that takes.

        Args:
            n: items of a rank's pass, over all its workers.
        """
        return self._with(replace(self.program, limit=_whole("with_epoch: n", n, 1)))

    def with_length(self, n: int) -> Self:
        """Says what len() is; what is read stays.

        Args:
            n: the length.
        """
        return self._with(replace(self.program, length=_whole("with_length: n", n, 0)))

    def _each(self, name: str, function: Callable[[Any], Any], handler: Handler) -> Self:
        return self._with(self.program.then(Each(name, function, handler)))


def _function(method: str, given: T) -> T:
    if not callable(given):
        raise TypeError(f"{method} needs a function; got {given!r}")
    return given


def _whole(what: str, given: Any, at_least: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        number = at_least - 1
    if number < at_least:
        raise ValueError(f"{what} is a whole number, at least {at_least}; got {given!r}")
    return number
