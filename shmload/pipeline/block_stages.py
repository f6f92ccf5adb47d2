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
    """A stage of a block's items."""

    @property
    def kind(self) -> str:
        """Which stage it is, for the pipeline's identity: without its functions."""
        return type(self).__name__

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        """What it makes of them, in order.

        Args:
            name: of the stage, for people.
        """
        raise NotImplementedError


def _answered(fn: Callable[[Any], Any], items: Iterator[Any], name: str) -> Iterator[tuple[Any, Any]]:
    """Each item with what a function says of it; what stands for one that failed comes alone."""
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
    """Only the items of which a function says True.

    Args:
        fn: item -> whether it stays.
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
    """The items that a function makes of each, none or many.

    Args:
        fn: item -> an iterable of items, which ends.
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
