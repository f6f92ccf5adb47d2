"""Torch mode: order, randomness and pace exactly as torch's DataLoader has them, over the engine.

The iterator derives from torch's own base, so that generators are drawn from in torch's order: the sampler's iterator first, then
the workers' base seed, then one index per batch, `prefetch_factor * num_workers` ahead and one more for each batch delivered.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmload.engine import Engine, Order
from shmload.errors import WorkerDied
from shmload.inline import InlineReader
from shmload.torch_order import batches_of

if TYPE_CHECKING:
    from shmload.loader import ShmLoader


class _Iterator(_BaseDataLoaderIter):
    def _next_data(self) -> Any:
        raise NotImplementedError

    def __next__(self) -> Any:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # torch's annotation of each batch costs 5 us
            return super().__next__()
        batch: Any = self._next_data()
        self._num_yielded += 1
        return batch

    def _pinned(self, batch: Any) -> Any:
        return _utils.pin_memory.pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch


class TorchIterator(_Iterator):
    """One pass (or, with persistent workers, all passes) of a loader with workers."""

    def __init__(self, loader: ShmLoader[Any]) -> None:
        super().__init__(loader)
        self._epoch = -1
        self._engine: Engine | None = None
        self._prefetch_factor = loader.prefetch_factor or 0
        self._engine = loader.make_engine(base_seed=int(self._base_seed))
        self._reset(loader, first_iter=True)

    @property
    def _workers(self) -> list[Any]:
        return [] if self._engine is None else self._engine.crew.processes

    def _reset(self, loader: ShmLoader[Any], first_iter: bool = False) -> None:
        assert self._engine is not None
        if not first_iter:
            self._engine.finish()
        super()._reset(loader, first_iter)
        self._sampler_iter = batches_of(self._index_sampler) or self._sampler_iter
        self._epoch += 1
        self._num_sent = 0
        for _ in range(self._prefetch_factor * self._num_workers):
            self._try_put_index()

    def _try_put_index(self) -> None:
        assert self._engine is not None
        try:
            index = self._next_index()
        except StopIteration:
            return
        keys = index if self._auto_collation else [index]
        self._engine.submit(Order(self._epoch, self._num_sent, keys, self._num_sent % self._num_workers))
        self._num_sent += 1

    def _next_data(self) -> Any:
        engine = self._engine
        if engine is None or engine.num_queued == 0:
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        before = engine.num_queued
        try:
            _, batch = engine.next()
        except (WorkerDied, KeyboardInterrupt):
            raise
        except Exception:
            if engine.num_queued < before:  # that batch is lost, and the pace kept, as torch does
                self._try_put_index()
            raise
        self._try_put_index()
        return self._pinned(batch)

    def _shutdown_workers(self) -> None:
        engine, self._engine = getattr(self, "_engine", None), None
        if engine is not None:
            engine.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._shutdown_workers()


class TorchInlineIterator(_Iterator):
    """One pass without workers over a dataset that decodes in place."""

    def __init__(self, loader: ShmLoader[Any]) -> None:
        super().__init__(loader)
        self._reader = InlineReader(loader.make_job())

    def _next_data(self) -> Any:
        return self._pinned(self._reader.read(self._next_index(), 0))
