"""Stages that make more or fewer items, or another order: Filter, FlatMap and BufferedShuffle.

Pipelines run them on the items of one block, and the fluent remote reader on those of a worker's pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from shmload.worker.sample_rng import sample_rng
from shmload.worker.stage_arguments import check_function
from shmload.worker.stage_engine import Expanding, FailedItem, StageContext


def with_results(fn: Callable[[Any], Any], items: Iterator[Any], name: str, context: StageContext) -> Iterator[tuple[Any, Any]]:
    """Yield each item with the result of a function; a failed item comes with None.

    Args:
        fn: the function.
        items: the arguments of the function.
        name: name of the stage, for messages.
        context: the context that all stages share.
    """
    for item in items:
        if type(item) is FailedItem:
            yield item, None
            continue
        try:
            answer = fn(item)
        except Exception as error:
            yield context.failed(error, name), None
        else:
            yield item, answer


@dataclass(frozen=True)
class Filter(Expanding):
    """A stage that keeps only the items for which a function returns True.

    Args:
        fn: item -> whether to keep it.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        check_function("Filter(fn)", self.fn)

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        for item, stays in with_results(lambda item: bool(self.fn(item)), items, name, context):
            if stays or type(item) is FailedItem:
                yield item


@dataclass(frozen=True)
class FlatMap(Expanding):
    """A stage that replaces each item by the items that a function returns for it, none or many.

    Args:
        fn: item -> a finite iterable of items.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Iterable[Any]]

    def __post_init__(self) -> None:
        check_function("FlatMap(fn)", self.fn)

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        for item, made in with_results(lambda item: iter(self.fn(item)), items, name, context):
            if type(item) is FailedItem:
                yield item
                continue
            origin = context.origin
            while True:
                try:
                    value = next(made)
                except StopIteration:
                    break
                except Exception as error:
                    yield context.failed(error, name)
                    break
                yield value
                context.origin = origin  # a later stage that delays items has changed it


@dataclass(frozen=True)
class BufferedShuffle(Expanding):
    """A stage that fills a buffer with items and delivers a random one of them each time.

    Pipelines also have a Shuffle by keys, which mixes a whole epoch, but needs to know the position of every item.

    Args:
        size: number of items in the full buffer.
        initial: number of items in the buffer before the first is delivered; until it is full, it grows by one with each item.
        seed: seed of Python's random numbers; None draws from `sample_rng()`. Neither kind of draw may change, because saved states
            continue in its order.
    """

    size: int
    initial: int
    seed: int | None = None

    @property
    def kind(self) -> str:
        return f"Shuffle(buffer_size={self.size})"

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        draw: Callable[[int], Any] = sample_rng().integers if self.seed is None else Random(self.seed).randrange
        held: list[tuple[Any, Any]] = []  # places and items

        def drawn() -> Any:
            at = int(draw(len(held)))
            held[at], held[-1] = held[-1], held[at]
            context.origin, item = held.pop()
            return item

        for item in items:
            held.append((context.origin, item))
            if len(held) < self.size:
                held += ((context.origin, item) for item in islice(items, 1))
            if len(held) >= self.initial:
                yield drawn()
        while held:
            yield drawn()
