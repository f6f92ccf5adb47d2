"""FedBlocks: the source of blocks that the trainer names one by one, by a sampler.

The sampler of a ShmLoader yields the numbers of blocks, with their items if workers cannot read them; each block is one sample. So
workers, crash replay and back-pressure are the loader's. This is used for a Stream, and for items that are delivered as they are
finished (`in_order=False`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from shmload.errors import SampleTimeout, WorkerDied
from shmload.loader import ShmLoader, configure_for_pipeline
from shmload.pipeline.block_columns import Block
from shmload.pipeline.block_sequence import BlockSequence
from shmload.pipeline.plan import Plan, PoolOptions
from shmload.pipeline.stream_feed import BlockKey, Feed, StreamProgram
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import sample_info, sample_of

ANY_NUMBER = 1 << 30  # any number of workers may be replaced


class BlockProgram:
    """A dataset whose keys are blocks of a sequence that can be read at any position."""

    def __init__(self, source: BlockSequence) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.n

    @cached_property
    def _own(self) -> OwnGenerators:
        # the paths of generators are as in the program that reads blocks in order (RowProgram), and so are their numbers
        return OwnGenerators(SimpleNamespace(_source=self._source))

    def __getitem__(self, key: BlockKey) -> tuple[int, Block]:
        epoch, block, _ = key
        at = block if self._source.repeating else epoch * self._source.n + block
        with sample_of(self._source.seed, epoch, at, sample_info().worker, own=self._own):
            return block, self._source.item(at)

    def __getstate__(self) -> dict[str, Any]:
        return {"_source": self._source}


class Numbers:
    """The numbers of a sequence's blocks, from a given one on. It replaces a Feed if workers can read the sequence themselves."""

    def __init__(self, source: BlockSequence) -> None:
        self._source = source
        self.epoch = self.block = 0
        self.own: dict[int, str] = {}
        self.pristine = ""

    def __iter__(self) -> Iterator[BlockKey]:
        numbers = count(self.block) if self._source.repeating else range(self.block, self._source.n)
        return map(self._key, numbers)  # not a generator, which an interrupt would end

    def _key(self, number: int) -> BlockKey:
        return BlockKey(self.epoch, number, None)


class Remaining:
    """The sampler of the loader: a feed without the blocks that have been consumed already."""

    def __init__(self, feed: Feed | Numbers) -> None:
        self._feed = feed
        self.consumed: set[int] = set()

    def __iter__(self) -> Iterator[BlockKey]:
        # not a generator, which an interrupt would end
        return filter(lambda key: key.block not in self.consumed, self._feed)


@dataclass
class FedBlocks:
    """A BlockSource over a ShmLoader whose sampler feeds it.

    Args:
        source: a StreamSequence or a BlockSequence.
        pool: the workers.
        options: arguments for ShmLoader.
        stage_places: the stages, for displays.
        in_order: whether blocks arrive in order, or as they are finished.
    """

    source: Any
    pool: PoolOptions
    options: Mapping[str, Any]
    stage_places: Sequence[tuple[str, str]]
    in_order: bool = True
    next_block: int = field(default=0, init=False)
    number: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        is_sent = self.pool.num_workers > 0
        self.feed: Feed | Numbers = (
            Numbers(self.source) if self._is_placed else Feed(self.source.stream, self.source.size, is_sent=is_sent)
        )
        self._sampler = Remaining(self.feed)
        self._loader: ShmLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None

    @classmethod
    def of(cls, plan: Plan, options: Mapping[str, Any], stage_places: Sequence[tuple[str, str]]) -> FedBlocks:
        """Return the source for a plan."""
        return cls(plan.source, plan.pool, options, stage_places, plan.is_in_order)

    @property
    def _is_placed(self) -> bool:
        """Return whether workers read the items themselves, because each has a known position."""
        return isinstance(self.source, BlockSequence)

    def __call__(self) -> Block:
        if self._loader is None:
            self._loader = self._made()
        if self._iterator is None:
            self._iterator = iter(self._loader)
        is_passed = True
        try:
            block: Block
            self.number, block = next(self._iterator)
            return block
        except (SampleTimeout, WorkerDied) as error:
            error.add_note(
                f"shmload: a block has {self.source.size} items; sample_timeout_s is the timeout of DistributedBatchedMap"
            )
            raise
        except BaseException as error:
            is_passed = isinstance(error, Exception)  # after an interrupt, the block comes with the next call
            raise
        finally:
            self.next_block += is_passed

    def _made(self) -> ShmLoader[Any]:
        pool = self.pool
        program: Any = BlockProgram(self.source) if self._is_placed else StreamProgram(self.source)
        options: dict[str, Any] = {"seed": self.source.seed}
        if not self.in_order:  # in torch mode, because seed mode keeps the order; the program keys all random numbers itself
            generator = torch.Generator().manual_seed(self.source.seed % (1 << 63))
            options = {"in_order": False, "generator": generator, "max_restarts": ANY_NUMBER}
        if pool.num_workers:
            options |= {"prefetch_factor": pool.prefetch_factor(self.source.size), "sample_timeout_s": pool.timeout_s}
        options |= {"num_workers": pool.num_workers, "collate_fn": _unchanged, **self.options}
        loader: ShmLoader[Any] = ShmLoader(program, sampler=self._sampler, batch_size=None, **options)
        configure_for_pipeline(loader, self.stage_places)
        return loader

    def restart(self, epoch: int) -> None:
        self.go(epoch, 0, None, set())

    def go(self, epoch: int, block: int, own: str | None, consumed: set[int]) -> None:
        self._iterator, self.next_block = None, block
        self.feed.epoch, self.feed.block = epoch, block
        self.feed.own = {} if own is None else {block: own}
        self._sampler.consumed = consumed

    def state_at(self, block: int) -> str | None:
        own: str | None = self.feed.own.get(block)
        return own

    def forget(self, block: int) -> None:
        for number in [number for number in self.feed.own if number < block]:
            del self.feed.own[number]

    def first(self, epoch: int) -> Generator[Block]:
        if self.source.stream.is_spent_once_read:
            raise ValueError(
                "the last step is filled up with the epoch's first items, and the Stream's iterator cannot be read again: give "
                'Partition uneven="drop" or "exact", or Stream an iterable'
            )
        others = FedBlocks(self.source, PoolOptions(timeout_s=self.pool.timeout_s), {}, ())
        others.restart(epoch)
        others.feed.pristine = self.feed.pristine
        try:
            while True:
                try:
                    yield others()
                except StopIteration:
                    return
        finally:
            others.close()

    def stats(self) -> dict[str, Any]:
        return {} if self._loader is None else self._loader.stats()

    def close(self) -> None:
        self._iterator = None
        if self._loader is not None:
            self._loader.close()


def _unchanged(block: Block) -> Block:
    return block
