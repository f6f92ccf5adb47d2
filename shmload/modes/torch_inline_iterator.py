"""The iterator of torch mode without workers: it reads batches in this process."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext, suppress
from typing import Any

from torch.utils.data import DataLoader

from shmload._core.trainer import Order
from shmload.device.sending import sent_now
from shmload.engine.iterator_lock import IteratorLock
from shmload.engine.outcome import NOTHING, Outcome
from shmload.metrics import irregular_files
from shmload.modes.default_collate import collated
from shmload.modes.draw_origin import Origin, origin_of, set_global
from shmload.modes.fetched_samples import FetchedSamples
from shmload.modes.inline_reader import InlineReader
from shmload.modes.pass_context import PassContext
from shmload.modes.pass_progress import PassProgress
from shmload.modes.sampler_start import SamplerStart
from shmload.modes.torch_pass import TorchPass
from shmload.modes.torch_resume import fast_forward, start_sampler
from shmload.modes.torch_state import TorchState
from shmload.torch_names import DatasetKind, SingleProcessIterator
from shmload.worker.iterable_pass import RestartingIterator
from shmload.worker.sample_rng import generators_kept, reading_of

log = logging.getLogger("shmload")


class TorchInlineIterator(TorchPass, SingleProcessIterator):
    """One pass without workers, read by torch's fetcher, or by InlineReader (`LoaderConfig.reads_inline`).

    Args:
        loader: the object that torch's iterators see as their loader.
        passes: what the loader's passes share.
        state: the state of an earlier pass, from which this one continues.
        is_early: take the first batch from the sampler at once.
    """

    def __init__(
        self, loader: DataLoader[Any], passes: PassContext, state: TorchState | None = None, *, is_early: bool = False
    ) -> None:
        config = passes.config
        self.iterator_lock = IteratorLock()
        self._pass = passes.log.num_passes
        self._device = passes.builder.device(config.device)
        resumed = ((state or {}).get("workers") or [{}])[0]
        is_resumed = state is not None and not state["is_finished"]
        start = SamplerStart(config.index_sampler, config.generator, is_resumed=is_resumed)
        began_at = origin_of(None) if config.is_iterable else None
        with generators_kept() if is_resumed else nullcontext():
            if "generators" in resumed and is_resumed:
                began_at = Origin.loads(resumed["generators"])
                set_global(began_at)
            super().__init__(loader)
            self._after_start = origin_of(None) if is_resumed and config.is_iterable else None
            reader = self._reader_of_sampler(start, config.generator, every=1, seed_between=True)
        job = self._job = config.job()
        self._bad_samples = passes.builder.bad_samples
        self._reader = InlineReader(job, self._bad_samples) if config.reads_inline else None
        self._profile_name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        state = start_sampler(reader, state, is_early=is_early)
        if state is None and is_early:
            reader.take_first()
        self.place = reader.place
        if passes.is_over and "iterator" not in resumed and self._dataset_kind == DatasetKind.Iterable:
            self._dataset_fetcher.dataset_iter = RestartingIterator(config.dataset, self._dataset_fetcher.dataset_iter)
        passes.is_over = state is not None and "has_ended" in resumed
        if state is not None:
            self._base_seed = state["base_seed"]
        base_seed = int(self._base_seed)
        has_getitems = self._dataset_kind == DatasetKind.Map and bool(getattr(config.dataset, "__getitems__", None))
        self._fetched = FetchedSamples(base_seed, are_read_together=has_getitems or not self._auto_collation)
        if job.collate_fn is None and self._auto_collation:
            fetched = self._fetched  # the iterator itself would be a reference cycle
            self._dataset_fetcher.collate_fn = functools.partial(collated, ragged=job.plan.ragged, keys=lambda: fetched.of_batch)
        if self._reader is not None:
            self._reader.base_seed = base_seed
        self._num_again = 0  # orders taken twice, because a resumed pass reads their batches of an iterable dataset again
        self.progress = passes.progress = PassProgress(config, reader, base_seed, self._shared_seed, num_workers=0)
        self.progress.fetcher, self.progress.began_at = self._dataset_fetcher, began_at
        if state is not None:
            self._go_on(state, resumed)
        self._begin_record(passes)

    def _go_on(self, state: TorchState, resumed: dict[str, Any]) -> None:
        """Continue the pass of a state: restore the dataset's iterator, or read again what the state counts."""
        self.progress.resumed(state)
        self._num_yielded = self.progress.num_delivered
        if why := fast_forward(state):
            log.warning("%s", why)
            self._num_again = self._sampler_iter.num_taken
            self._read_again(sum(state["counts"]))
            return
        if "iterator" in resumed:
            self._dataset_fetcher.dataset_iter.load_state_dict(resumed["iterator"])
        if "has_ended" in resumed:
            self._dataset_fetcher.ended = True
        if self._dataset_kind == DatasetKind.Iterable:
            self._num_again = self._sampler_iter.num_taken - sum(state["counted"])
            self._read_again(sum(state["counts"]) - sum(state["counted"]))
        else:
            self._read_again_to(state["done"])

    def _read_again(self, num_batches: int) -> None:
        """Read `num_batches` batches of an iterable dataset again, without yielding them.

        They draw from the global generators what the saved run drew, if the program draws nothing between batches. Afterward the
        generators are restored.
        """
        with self.progress.reading_again(), generators_kept():
            if self._after_start is not None:
                set_global(self._after_start)
            for _ in range(num_batches):
                with suppress(Exception):  # the saved run lost it as well
                    next(self)

    def _next_index(self) -> Any:
        keys = next(self._sampler_iter)
        while self._sampler_iter.num_taken - 1 in self.progress.done:  # of a resumed pass
            keys = next(self._sampler_iter)
        if self._reader is None:
            self._order = Order(self._pass, self._sampler_iter.num_taken - 1, keys if self._auto_collation else [keys])
        keys = keys.tolist() if self._sampler_iter.is_sliced else keys
        return keys if self._reader is not None else self._fetched.keys(self._sampler_iter.num_taken - 1 - self._num_again, keys)

    def _count_order(self, received: Outcome) -> None:
        self.progress.completed(received.order.step, 0)

    def _lost(self) -> None:
        """Record that the newest order has no batch: an error came in its place, or all its samples were skipped."""
        self.progress.completed(self._sampler_iter.num_taken - 1, 0)

    def _next_data(self) -> Any:
        if self._received is None:
            self._received = self._read_by_torch() if self._reader is None else self._read(self._reader)
        return sent_now(self._received.batch, self._device)

    def _read_by_torch(self) -> Outcome:
        num_taken, num_irregular = self._sampler_iter.num_taken, irregular_files.value
        try:
            with reading_of(self._fetched):
                batch = SingleProcessIterator._next_data(self)  # type: ignore[no-untyped-call]
        except Exception as error:
            is_taken = self._sampler_iter.num_taken > num_taken  # else the error is the sampler's
            if is_taken:
                self._lost()
            if is_taken and not isinstance(error, StopIteration):
                key, is_map = self._fetched.key, self._dataset_kind == DatasetKind.Map
                keys = (self._fetched.of_batch if is_map else None) or ()  # after the key, because it takes all keys
                error.add_note(self._job.note(key, self._order.epoch, self._order.step, keys))
            raise
        finally:
            self._bad_samples.num_irregular += irregular_files.value - num_irregular
        return Outcome(self._order, batch, None)

    def _read(self, reader: InlineReader) -> Outcome:
        while True:
            keys = self._next_index()
            step = self._sampler_iter.num_taken - 1
            is_samplers_object = self._auto_collation and not self._sampler_iter.is_sliced
            order = Order(self._pass, step, keys if self._auto_collation else [keys], is_samplers_object=is_samplers_object)
            try:
                batch = reader.read(order)
            except Exception:
                self._lost()
                raise
            if batch is not NOTHING:
                return Outcome(order, batch, None)
            self._lost()
            self._nothing_came(order)
