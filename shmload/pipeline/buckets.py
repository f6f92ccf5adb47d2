"""Bucket: batches of items of similar length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from shmload.batch.ragged import AS_TORCH_OR_LIST, ragged_of
from shmload.modes.default_collate import collated
from shmload.worker.item_stages import with_results
from shmload.worker.stage_arguments import set_whole
from shmload.worker.stage_engine import Expanding, FailedItem, StageContext


class LikeItems(NamedTuple):
    """Items that form one batch, and the origin of the first."""

    items: list[Any]
    origin: Any


class MadeBatch(NamedTuple):
    """A collated batch, with its number of items."""

    size: int
    batch: Any


@dataclass(frozen=True)
class Bucket(Expanding):
    """A stage that makes batches of items of similar length, which need little padding. It replaces Collate.

    An item goes to the bucket of the first boundary that is not less than its length, or to the last bucket. A full bucket becomes
    a batch. Items left at the end of a block become smaller batches, so choose a `block_size` of many batches.

    Args:
        length: item -> its length.
        boundaries: ascending lengths.
        batch_size: number of items of a batch.
        max_tokens: instead of `batch_size`, the maximum of number of items times longest length. A longer item is a batch by
            itself.
        ragged: as for Collate.
    Raises:
        ValueError, TypeError: an argument is invalid, or arguments contradict each other.
    """

    length: Callable[[Any], int]
    boundaries: Sequence[int]
    batch_size: int | None = None
    _: KW_ONLY
    max_tokens: int | None = None
    ragged: Any = AS_TORCH_OR_LIST

    def __post_init__(self) -> None:
        if not callable(self.length):
            raise TypeError(f"Bucket(length) must be a function of one item; got {self.length!r}")
        try:
            given = tuple(self.boundaries)
            whole: Any = tuple(map(int, given))
        except (TypeError, ValueError, OverflowError):
            whole = None
        if whole is None or whole != given:
            raise TypeError(f"Bucket(boundaries) are whole numbers; got {self.boundaries!r}")
        object.__setattr__(self, "boundaries", whole)
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"Bucket(boundaries) ascend; got {self.boundaries}")
        ragged_of(self.ragged, None, is_torch_mode=False)
        if (self.batch_size is None) == (self.max_tokens is None):
            raise ValueError("Bucket needs batch_size or max_tokens, one of them")
        name = "max_tokens" if self.batch_size is None else "batch_size"
        set_whole(self, f"Bucket({name})", name, 1, 1 << 31)

    @property
    def kind(self) -> str:
        return f"Bucket({self.boundaries}, batch_size={self.batch_size}, max_tokens={self.max_tokens})"

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        boundaries, measure = self.boundaries, self.length
        held: list[list[Any]] = [[] for _ in range(len(boundaries) + 1)]
        longest, firsts = [0] * len(held), [context.origin] * len(held)
        for item, length in with_results(lambda item: int(measure(item)), items, name, context):
            if type(item) is FailedItem:
                yield item
                continue
            at = bisect_left(boundaries, length)
            like, most = held[at], max(longest[at], length)
            if like and self.max_tokens is not None and most * (len(like) + 1) > self.max_tokens:
                yield LikeItems(like, firsts[at])
                like, most = [], length
                held[at] = like
            if not like:
                firsts[at] = context.origin
            like.append(item)
            longest[at] = most
            if len(like) == self.batch_size:
                yield LikeItems(like, firsts[at])
                held[at], longest[at] = [], 0
        yield from (LikeItems(like, first) for like, first in zip(held, firsts, strict=True) if like)


@dataclass(frozen=True)
class Batches:
    """A function that replaces each group of items by its collated batch, in the worker.

    Attributes:
        ragged: see Collate.
    """

    ragged: Any

    def __call__(self, items: list[Any], context: StageContext) -> list[Any]:
        rule = ragged_of(self.ragged, None, is_torch_mode=False)
        return [self._batch(item, rule, context) if type(item) is LikeItems else item for item in items]

    @staticmethod
    def _batch(like: LikeItems, rule: Any, context: StageContext) -> Any:
        try:
            return MadeBatch(len(like.items), collated(like.items, rule))
        except Exception as error:
            context.origin = like.origin
            return context.failed(error, "collating a batch of Bucket")
