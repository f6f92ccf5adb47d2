"""KeyedEngine: run a pipeline in which the key of every item is known in advance.

source: a sequence of keys ──▶ slots, filled by workers with the program ──▶ batches, or single items

The loader that reads the pipeline is in seed mode, with the item order as its batch sampler. Order, ranks, crash replay and
resume are the loader's. This engine adds the position, which counts the items that all ranks have consumed, also within a group
that was fetched together. Single items are fetched in groups: one at a time if making an item takes long, up to 64 if it takes less
time than fetching.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmload.batch.ragged import AS_TORCH_OR_LIST
from shmload.engine.bad_samples import BadSamples
from shmload.engine.outcome import NOTHING
from shmload.errors import StateMismatch
from shmload.loader import ShmLoader, configure_for_pipeline, inline_reader_of
from shmload.modes.inline_reader import InlineReader
from shmload.pipeline.compose import compose
from shmload.pipeline.item_errors import ItemErrors, NamedErrors, Outcome, outcomes_of
from shmload.pipeline.item_schedule import ItemStream, StreamSchedule
from shmload.pipeline.pipeline_engine import PipelineEngine, PipelinePlace
from shmload.pipeline.plan import Plan
from shmload.schedule.permutation import MAX_N
from shmload.schedule.state import make_state

WORTH_S = 1e-3  # seconds of one worker's work in a group, at most; beyond that, fetching costs little in proportion
MOST = 64  # maximum number of items of a group


class KeyedEngine(PipelineEngine):
    """Runs a plan whose source has a key for every position.

    Args:
        plan: the plan to run.
        options: arguments for ShmLoader.
        stage_places: (name, where it runs) of each stage, for displays.

    Attributes:
        position: items of this epoch that all ranks have consumed, or of all epochs if the source repeats.
    """

    def __init__(self, plan: Plan, options: Mapping[str, Any], stage_places: Sequence[tuple[str, str]]) -> None:
        self._stream = ItemStream(plan.source, None if plan.collate is None else plan.collate.batch_size)
        schedule: StreamSchedule = self._stream.schedule(
            seed=plan.source.seed, uneven=plan.uneven, world_size=plan.partition.n_ranks
        )
        super().__init__(plan, schedule)
        self._options, self._stage_places = options, stage_places
        self._rank = plan.partition.rank
        self._is_batched = plan.collate is not None
        self._item_valid: int | None = None  # of the last single item
        self.position = 0
        self._loader: ShmLoader[Any] | None = None
        self._iterator: Any = None
        self._errors = ItemErrors(plan.source.name)
        self._fetched: deque[Outcome] = deque()  # items of the last group that were not requested yet
        self._num_fetched, self._next_look = 0, 8  # fetches so far; number of fetches at which `_rounds_now` decides again
        self._next_of_loader = (0, 0)  # where the loader's next pass begins by default
        self._is_resumed = False  # whether this pass began at the place of a state

    # ------------------------------------------------------------ items

    def advance(self) -> Any:
        if self._is_batched:
            return self._next_batch()
        while not self._fetched:
            self._fetch()
        item, error = self._fetched.popleft()
        self._item_valid = int(self.is_endless or self.position + self._rank < self.schedule.n)
        self.position += self.schedule.stride
        if error is not None:
            raise error
        return item

    @property
    def rounds(self) -> int:
        """Return the number of single items of each rank in the groups that are fetched next."""
        return self._stream.rounds

    @property
    def num_ready(self) -> int:
        """Return the number of single items that were fetched and not requested yet."""
        return len(self._fetched)

    def where(self, _: int = 0) -> str:
        step, stride, n = self.position - self.schedule.stride, self.schedule.stride, self.schedule.n
        epoch, first = divmod(step, n) if self.is_endless else (self.epoch, step)
        return f"batch {step // stride}, whose step begins with item {first} of epoch {epoch}"

    @property
    def num_steps(self) -> int:
        schedule = self.schedule
        end = schedule.n if self.is_endless else schedule.end_of(self.epoch, self._rank)
        return -(-end // schedule.stride)

    @property
    def valid(self) -> int | None:
        if not self._is_batched:
            return self._item_valid
        return None if self._loader is None else self._loader.valid

    def _next_batch(self) -> Any:
        iterator = self._running()
        try:
            batch = next(iterator)
        except StopIteration:
            self.end()
            raise
        except BaseException as error:
            self.position = iterator.place.step
            if self.plan.pool.num_workers == 0:  # an error of a worker names the batch already
                error.add_note(f"shmload: {self.where()}")
            raise
        self.position = iterator.place.step
        return batch

    def _fetch(self) -> None:
        iterator, first = self._running(), self.position
        items: Any = NOTHING
        lost: Exception | None = None
        try:
            try:
                items = iterator.next_step()
            except Exception as error:
                lost = error
            if iterator.place.step == first and lost is not None:  # the loader itself has failed
                raise lost
            items = [] if items is NOTHING else items
            outcomes = list(outcomes_of(self.schedule, self._rank, first, items, self._errors.of_step.pop(first, {}), lost))
            num_lost = 0 if lost is None else sum(error is lost for _, error in outcomes)
            if num_lost > 1:  # an item that cannot be sent fails its whole group, so its items are fetched again one by one
                del outcomes[-num_lost:]
                self._iterator, self._stream.rounds = None, 1
            elif self._loader is not None:
                self._stream.rounds = self._rounds_now(self._loader)
            self._fetched.extend(outcomes)
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: the group is fetched again
                self.go(PipelinePlace(self.epoch, first))
            raise

    def _rounds_now(self, loader: ShmLoader[Any]) -> int:
        """Return the number of rounds of items to fetch together from now on, given their cost so far.

        This affects when items arrive, never which. It is decided after 8 fetches, then each time their number has doubled.
        """
        pool, most = self.plan.pool, MOST
        self._num_fetched += 1
        if self._num_fetched < self._next_look or pool.num_workers == 0:
            return self._stream.rounds
        self._next_look *= 2
        workers = loader.stats().get("workers", [])
        num_items, busy_s = (sum(worker[name] for worker in workers) for name in ("num_samples", "busy_s"))
        if not num_items:
            return self._stream.rounds
        if pool.buffer_size is not None:
            most = min(most, max(pool.buffer_size // (pool.prefetch_factor(1) * pool.num_workers), 1))
        return max(min(int(WORTH_S * num_items / busy_s), most), 1) if busy_s > 0 else most

    # ------------------------------------------------------------ the loader

    def _running(self) -> Any:
        """Return the loader's pass. Begin one at the position if there is none."""
        if self._iterator is None:
            if self._loader is None:
                self._loader = self._make_loader()
            if self._next_of_loader != (self.epoch, self.position):  # so that an audit does not take each start for a resume
                self._loader.load_state_dict(dict(make_state(self.schedule, epoch=self.epoch, step=self.position)))
            self._iterator = iter(self._loader)
            self._next_of_loader = (self.epoch + 1, 0)
        return self._iterator

    def _make_loader(self) -> ShmLoader[Any]:
        plan, pool = self.plan, self.plan.pool
        options: dict[str, Any] = {"on_error": "skip"} if plan.collate is None else {}
        if pool.num_workers:
            options["prefetch_factor"] = pool.prefetch_factor(self._stream.batch_size or 1)
            options["sample_timeout_s"] = pool.timeout_s
        loader: ShmLoader[Any] = ShmLoader(
            plan.program,
            batch_sampler=self._stream,
            num_workers=pool.num_workers,
            collate_fn=plan.collate_fn,
            seed=plan.source.seed,
            rank=self._rank,
            world_size=plan.partition.n_ranks,
            uneven=plan.uneven,
            ragged=AS_TORCH_OR_LIST if plan.collate is None else plan.collate.ragged,
            **{**options, **self._options},
        )

        def errors(loaders_own: BadSamples) -> NamedErrors:
            if plan.collate is None:
                return self._errors
            return NamedErrors(loader.on_error, loader.max_bad, loaders_own.next_index, plan.source.name)

        configure_for_pipeline(loader, self._stage_places, errors)
        return loader

    # ------------------------------------------------------------ position

    def begin_pass(self) -> None:
        # otherwise only other ranks have items left in this epoch, or a state was loaded at its end
        if self.is_ended and (self._is_over or (self.position and not self._is_resumed)):
            self.begin_next_epoch()

    @property
    def is_ended(self) -> bool:
        return self.position >= self.schedule.end_of(self.epoch, self._rank)

    @property
    def _is_over(self) -> bool:
        """Return whether no rank has anything left in this epoch; an incomplete last step may have been dropped."""
        return self.position >= self.schedule.end_of(self.epoch, rank=0)

    def end(self) -> None:
        self.position = max(self.position, self.schedule.end_of(self.epoch, rank=0))

    def place_now(self) -> Callable[[], PipelinePlace]:
        place = PipelinePlace(self.epoch, self.schedule.n if self._is_over else self.position)
        return lambda: place

    def go(self, place: PipelinePlace) -> None:
        self._move(place.epoch, place.position)
        self._next_of_loader = (-1, 0)
        self._is_resumed = True

    def restart(self, epoch: int) -> None:
        self._move(epoch, 0)

    def _move(self, epoch: int, position: int) -> None:
        self.epoch, self.position, self._iterator = epoch, position, None
        self._is_resumed = False
        self._stream.epoch = epoch
        self._fetched.clear()
        self._errors.of_step.clear()

    def check(self, place: PipelinePlace) -> None:
        n = self.schedule.n
        if place.position > n:
            raise StateMismatch(f"the state's position is {place.position}, but an epoch has {n} items")
        if (of_all := place.epoch * n + place.position) > MAX_N:
            raise StateMismatch(f"the state's epoch is {place.epoch}, but {n} items allow at most {MAX_N // n} epochs")
        if place.counters is not None:
            self.plan.source.go_on_at(of_all, place.counters)

    # ------------------------------------------------------------ workers

    def stats(self) -> dict[str, Any]:
        return {} if self._loader is None else self._loader.stats()

    def close(self) -> None:
        self._iterator = None
        if self._loader is not None:
            self._loader.close()


def reader_of_stages(stages: Sequence[Any]) -> tuple[InlineReader, ItemStream]:
    """Return a reader of a pipeline's batches, in this process and in any order, and the pipeline's order; for `shmload verify`.

    Raises:
        TypeError, ValueError: the stages do not make a pipeline, or one whose batches run across blocks.
    """
    plan = compose(stages)
    if plan.is_expanding:
        raise ValueError("--dataset has stages that make more or fewer items, or a Stream: these read their items in order only")
    engine = KeyedEngine(plan, {}, ())
    return inline_reader_of(engine._make_loader()), engine._stream
