"""Stages that produce more or fewer items than they receive: Filter, FlatMap and the buffered Shuffle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmload.pipeline.failed_items import FailedItem, failed
from shmload.pipeline.stage_arguments import check_function
from shmload.worker.sample_rng import sample_rng


class Expanding:
    """A stage that runs on the items of one block."""

    @property
    def kind(self) -> str:
        """The stage without its functions, for the pipeline's identity."""
        return type(self).__name__

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        """Yield the stage's output, in order.

        Args:
            items: of one block.
            name: of the stage, for error messages.
        """
        raise NotImplementedError


def _answered(fn: Callable[[Any], Any], items: Iterator[Any], name: str) -> Iterator[tuple[Any, Any]]:
    """Yield each item with a function's answer; a failed item comes with None."""
    for item in items:
        if type(item) is FailedItem:
            yield item, None
            continue
        try:
            answer = fn(item)
        except Exception as error:
            yield failed(error, name), None
        else:
            yield item, answer


@dataclass(frozen=True)
class Filter(Expanding):
    """Keeps only the items for which a function returns True.

    Args:
        fn: item -> whether to keep it.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        check_function("Filter(fn)", self.fn)

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        for item, stays in _answered(self.fn, items, name):
            if stays or type(item) is FailedItem:
                yield item


@dataclass(frozen=True)
class FlatMap(Expanding):
    """Replaces each item by the items that a function returns for it, none or many.

    Args:
        fn: item -> a finite iterable of items.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Iterable[Any]]

    def __post_init__(self) -> None:
        check_function("FlatMap(fn)", self.fn)

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        for item, made in _answered(lambda item: iter(self.fn(item)), items, name):
            if type(item) is FailedItem:
                yield item
                continue
            while True:
                try:
                    value = next(made)
                except StopIteration:
                    break
                except Exception as error:
                    yield failed(error, name)
                    break
                yield value


@dataclass(frozen=True)
class BufferedShuffle(Expanding):
    """See Shuffle."""

    size: int

    @property
    def kind(self) -> str:
        return f"Shuffle(buffer_size={self.size})"

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        rng, held = sample_rng(), []
        for item in items:
            held.append(item)
            if len(held) > self.size:
                yield self._drawn(held, rng)
        while held:
            yield self._drawn(held, rng)

    @staticmethod
    def _drawn(held: list[Any], rng: np.random.Generator) -> Any:
        place = int(rng.integers(len(held)))
        held[place], held[-1] = held[-1], held[place]
        return held.pop()
