"""Conveyer: a composed pipeline.

stages ──plan──▶ source: a stream of keys ──▶ slots, filled by workers with a RowProgram ──▶ batches, or items one by one

The loader that reads a pipeline is in seed mode with the stream as its batch sampler: order, ranks, crash replay and resume are the
loader's. What is added here is the position: it counts items that all ranks have had, also within what was fetched together.
Single items are fetched together: one at a time of those that take long, many of those that cost less than fetching them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from shmload.engine.outcome import NOTHING
from shmload.engine.turns import Turns
from shmload.errors import StateMismatch
from shmload.loader import ShmLoader
from shmload.pipeline.blocks import BLOCK, Expanding, Scan
from shmload.pipeline.methods import Fluent
from shmload.pipeline.sources import set_whole
from shmload.pipeline.stage_names import Where, places_of
from shmload.pipeline.stages import ItemErrors, ItemStream, NamedErrors, Outcome, StreamSchedule, compose, items_of
from shmload.pipeline.streams import Stream
from shmload.schedule.permutation import MAX_N
from shmload.schedule.state import check_state, compare_state, make_state
from shmload.schedule.state_checksum import with_checksum
from shmload.worker.stage_engine import through

if TYPE_CHECKING:
    from shmload.pipeline.explain import Explanation

WORTH_S = 1e-3  # of a worker's time for what is fetched at once: above it, fetching costs little
MOST = 64


OF_BATCHES = frozenset({"max_bad", "on_error"})
OPTIONS = OF_BATCHES | {"audit", "backend", "max_restarts", "multiprocessing_context", "pin_memory", "ring_bytes", "worker_init_fn"}


def stages_of(given: Any) -> list[Any]:
    """The stages of a list of them, or of a pipeline as methods made it.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(given, Conveyer) or not isinstance(given, Iterable):  # whose items would be read, without end
        raise TypeError(f"Conveyer takes a list of stages, or a pipeline as methods make it; got a {type(given).__name__}")
    return list(given.stages if isinstance(given, Fluent) else given)


class Conveyer:
    """Stages in a row: `pipeline()` gives the next batch, or the next item where nothing collates.

    The same stages give the same batches, on any number of workers and ranks, from any position.

    Args:
        stages: a source, then stages of items as wanted, then Collate or Bucket, if batches are to come, and functions of whole
            batches; or a pipeline as methods make it. docs/pipelines.md has the grammar.
        block_size: where stages make more or fewer items (Filter, FlatMap, Pack, ...), how many items before them are expanded
            together: part of which pipeline it is, and the most that a resume reads again.
        options: some of ShmLoader's arguments: audit, backend, max_bad, max_restarts, multiprocessing_context, on_error,
            pin_memory, ring_bytes, worker_init_fn.

    Attributes:
        is_endless: it never ends.
        has_equal_ranks: every rank is given as much as any other.

    Raises:
        TypeError, ValueError: the stages make no pipeline, or the options are none of its.
    Iteration goes on where the pipeline stands: without an end if the source repeats, else to the end of its epoch; iterating an
    ended one begins the next epoch. Arrays and tensors lie in shared memory and are yours for as long as anything aliases them.
    Example:
        >>> from shmload.pipeline import Collate, Conveyer, Map, Permutation
        >>> with Conveyer([Permutation(10, seed=7), Map(lambda i: {"i": i}), Collate(5)]) as pipeline:
        ...     batches = [pipeline()["i"], pipeline()["i"]]
        >>> sorted(int(i) for batch in batches for i in batch)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __new__(cls, stages: Sequence[Any] = (), *, block_size: int = BLOCK, **options: Any) -> Self:
        """One of another kind where a stage makes more or fewer items."""
        stages = stages_of(stages)
        if cls is Conveyer and any(not getattr(stage, "in_order", True) for stage in stages):
            from shmload.pipeline.unordered import UnorderedConveyer  # the same

            return object.__new__(UnorderedConveyer)  # type: ignore[return-value]  # a subclass
        if cls is Conveyer and any(
            isinstance(stage, Expanding | Scan | Stream) or getattr(stage, "is_buffered", False) for stage in stages
        ):
            from shmload.pipeline.expanded import ExpandedConveyer  # which is made of Conveyers

            return object.__new__(ExpandedConveyer)  # type: ignore[return-value]  # a subclass
        return object.__new__(cls)

    def __init__(self, stages: Sequence[Any], *, block_size: int = BLOCK, **options: Any) -> None:
        self.stages = stages_of(stages)
        self.block_size = block_size
        set_whole(self, "Conveyer(block_size)", "block_size", 1, MAX_N)
        self.plan = compose(self.stages, self.block_size)
        self.options = options
        if unknown := sorted(set(options) - OPTIONS):
            raise TypeError(f"Conveyer takes of ShmLoader's arguments {', '.join(sorted(OPTIONS))}; got {', '.join(unknown)}")
        if self.plan.collate is None and (misplaced := sorted(set(options) & OF_BATCHES)):
            raise ValueError(
                f"{', '.join(misplaced)} is for batches: a single item that fails raises at its turn, and the next call goes on "
                "behind it; catch that, or add Collate"
            )
        plan = self.plan
        self.is_endless = plan.source.repeating
        self.has_equal_ranks = self.is_endless or plan.partition.n_ranks == 1 or plan.uneven != "exact"
        self._rank = plan.partition.rank
        self._stream = ItemStream(plan.source, None if plan.collate is None else plan.collate.batch_size)
        self._schedule: StreamSchedule = self._stream.schedule(
            seed=plan.source.seed, uneven=plan.uneven, world_size=plan.partition.n_ranks
        )
        self._epoch = self._position = 0  # items that all ranks have had: of this epoch, or of all if the source repeats
        self._loader: ShmLoader[Any] | None = None
        self._iterator: Any = None
        self._errors = ItemErrors(plan.source.name)
        self._fetched: deque[Outcome] = deque()  # items that came together and have not been asked for
        self._num_fetched, self._next_look = 0, 8
        self._next_of_loader = (0, 0)  # where its next pass begins by itself
        self._has_moved = False  # to a place that a state says, where nothing was asked for yet
        self._turns = Turns()
        self._is_closed = False
        self._about: Sequence[tuple[str, Where]] | None = None  # stages that it is shown as, if not its own

    # ------------------------------------------------------------ items

    def __call__(self) -> Any:
        """The next batch or item.

        Raises:
            StopIteration: a pipeline that does not repeat is at its end.
            what a function raised, with the item's name; that batch or item is lost, and the next call goes on behind it.
            SampleTimeout, WorkerDied: an item took too long, or ended its worker twice.
        """
        with self._turns:
            return self._next()

    def _next(self) -> Any:
        if self._is_closed:
            raise RuntimeError("this pipeline is closed: make a new one")
        if self.is_ended:
            self._end()
            raise StopIteration
        if self.plan.collate is None:
            return self._next_item()
        return through(self.plan.batch_stages, self._next_batch(), self._where)

    def _where(self, _: int = 0) -> str:
        """The batch given last, for people."""
        step, stride, n = self._position - self._schedule.stride, self._schedule.stride, self._schedule.n
        epoch, first = divmod(step, n) if self.is_endless else (self._epoch, step)
        return f"batch {step // stride}, whose step begins with item {first} of epoch {epoch}"

    def __iter__(self) -> Self:
        # else only other ranks have something of the epoch, or left of it
        if self.is_ended and (self._is_over or (self._position and not self._has_moved)):
            self.begin_next_epoch()
        return self

    __next__ = __call__

    def __len__(self) -> int:
        """Batches, or items, that this rank has of one epoch. A source that repeats has no seam there: the whole number above."""
        schedule = self._schedule
        end = schedule.n if self.is_endless else schedule.end_of(self._epoch, self._rank)
        return -(-end // schedule.stride)

    @property
    def valid(self) -> int | None:
        """How many rows of the batch just given are real and not padding; None before the first, and for single items."""
        return None if self._loader is None or self.plan.collate is None else self._loader.valid

    # ------------------------------------------------------------ what comes next

    def _next_batch(self) -> Any:
        """The next batch; StopIteration at the end of the epoch. One that fails is lost: the position is then behind it."""
        iterator = self._running()
        try:
            batch = next(iterator)
        except StopIteration:
            self._end()
            raise
        except BaseException as error:
            self._position = iterator.place.step
            if self.plan.pool.num_workers == 0:  # a worker's error says it
                error.add_note(f"shmload: {self._where()}")
            raise
        self._position = iterator.place.step
        return batch

    def _next_item(self) -> Any:
        """The next item; raises what befell it, and is then behind it."""
        while not self._fetched:
            self._fetch()
        item, error = self._fetched.popleft()
        self._position += self._schedule.stride
        if error is not None:
            raise error
        return item

    def _fetch(self) -> None:
        iterator, first = self._running(), self._position
        items: Any = NOTHING
        lost: Exception | None = None
        try:
            items = iterator.next_step()
        except Exception as error:
            lost = error
        except BaseException:
            self._move(self._epoch, first)
            raise
        if iterator.place.step == first and lost is not None:  # the loader itself has failed
            raise lost
        items = [] if items is NOTHING else items
        outcomes = list(items_of(self._schedule, self._rank, first, items, self._errors.of_step.pop(first, {}), lost))
        num_lost = 0 if lost is None else sum(error is lost for _, error in outcomes)
        if num_lost > 1:  # one that cannot travel fails all that came with it: they are fetched anew, one by one
            del outcomes[-num_lost:]
            self._iterator, self._stream.rounds = None, 1
        elif self._loader is not None:
            self._stream.rounds = self._rounds_now(self._loader)
        self._fetched.extend(outcomes)

    def _running(self) -> Any:
        """The loader's pass, begun at the position if it is not under way."""
        if self._iterator is None:
            if self._loader is None:
                self._loader = self._make_loader()
            if self._next_of_loader != (self._epoch, self._position):  # an audit must not take each start for a resume
                self._loader.load_state_dict(dict(make_state(self._schedule, epoch=self._epoch, step=self._position)))
            self._iterator = iter(self._loader)
            self._next_of_loader = (self._epoch + 1, 0)
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
            ragged="list" if plan.collate is None else plan.collate.ragged,
            **{**options, **self.options},
        )
        loader._builder.about = places_of(self.stages, plan) if self._about is None else self._about
        if plan.collate is None:
            loader._builder.bad_samples = self._errors
        else:
            next_index = loader._builder.bad_samples.next_index
            loader._builder.bad_samples = NamedErrors(loader.on_error, loader.max_bad, next_index, plan.source.name)
        return loader

    def _rounds_now(self, loader: ShmLoader[Any]) -> int:
        """How many rounds of items are to be fetched together from now on, by what they have cost so far.

        It decides when items come, never which. It looks after 8 fetches, then each time their number has doubled.
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

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the stages and the position; workers and items stay here."""
        options = {**self.options, "block_size": self.block_size}
        return {"stages": self.stages, "options": options, "place": (self._epoch, self._position)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stages"], **state["options"])  # type: ignore[misc]
        if any(state["place"]):
            self._move(*state["place"])

    # ------------------------------------------------------------ position

    def state(self) -> dict[str, Any]:
        """Where the pipeline stands: flat, JSON-able, under 1 KiB, the same on all ranks after equal steps. Legal at any time."""
        schedule = self._schedule
        step = schedule.n if self._is_over else self._position
        state = dict(make_state(schedule, epoch=self._epoch, step=step))
        if self.is_endless:
            state["epoch"], state["position"] = divmod(step, schedule.n)
            state = with_checksum(state)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken, by any rank, on any number of ranks and workers; also while the pipeline runs.

        Raises:
            StateMismatch: it belongs to another pipeline; says what differs. Nothing is changed then.
        """
        self._move(*self._place_of(state))

    def _move(self, epoch: int, position: int) -> None:
        """Goes on there."""
        self._go(epoch, position)
        self._next_of_loader = (-1, 0)
        self._has_moved = True

    def _go(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._iterator = epoch, position, None
        self._has_moved = False
        self._stream.epoch = epoch
        self._fetched.clear()
        self._errors.of_step.clear()

    def _end(self) -> None:
        """The epoch has ended for this rank, which may be before it does for others: its user sees the end."""
        self._position = max(self._position, self._schedule.end_of(self._epoch, rank=0))

    @property
    def _is_over(self) -> bool:
        """Whether there is nothing more in this epoch for any rank; they may leave a rest out."""
        return self._position >= self._schedule.end_of(self._epoch, rank=0)

    set_state = load_state
    state_dict, load_state_dict = state, load_state  # torch's words, for torch.distributed.checkpoint

    # ------------------------------------------------------------ as a member of a Join

    @property
    def is_ended(self) -> bool:
        """Whether it has nothing more to give until its next epoch begins."""
        return self._position >= self._schedule.end_of(self._epoch, self._rank)

    def begin_next_epoch(self) -> None:
        """Goes to the start of the next epoch, of a pipeline that does not repeat."""
        self._go(self._epoch + 1, 0)

    def entry(self) -> list[Any]:
        """The state in a few words, for that of a Join."""
        state = self.state()
        entry = [self._mark(state), state["epoch"], state["position"]]
        return [*entry, state["counters"]] if "counters" in state else entry

    def entering(self, entry: Any, where: str) -> Callable[[], None]:
        """What takes it to where `entry` was taken.

        Raises:
            StateMismatch: it belongs to another pipeline.
        """
        state = self.state()
        if not isinstance(entry, list) or entry[:1] != [self._mark(state)] or len(entry) != len(self.entry()):
            raise StateMismatch(f"the state belongs to another pipeline{where}; this one is {state['order']}")
        state |= zip(("epoch", "position", "counters"), entry[1:], strict=False)
        return partial(self._move, *self._place_of(with_checksum(state)))

    def _place_of(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Where the run was when the state was taken."""
        checked = check_state(state)
        compare_state(checked, self._schedule)
        n, epoch, position = self._schedule.n, checked["epoch"], checked["position"]
        if position > n:
            raise StateMismatch(f"the state's position is {position}, and an epoch has {n} items")
        if (of_all := epoch * n + position) > MAX_N:
            raise StateMismatch(f"the state's epoch is {epoch}, and of {n} items there are at most {MAX_N // n} epochs")
        if "counters" in checked:
            self.plan.source.go_on_at(of_all, checked["counters"])
        return (0, of_all) if self.is_endless else (epoch, position)

    @staticmethod
    def _mark(state: dict[str, Any]) -> str:
        names = ("seed", "n", "uneven", "order")
        return f"{zlib.crc32(repr([state[name] for name in names]).encode()):08x}"

    # ------------------------------------------------------------ ends

    def explain(self, *, items: int = 256, seconds: float = 1.0) -> Explanation:
        """What each stage takes, where it runs, and what bounds the pipeline.

        Some items are made in this process, from where the pipeline stands, without its workers; of a pipeline that runs, it counts
        as well who waits for whom. Its position and the global random generators stay as they are. Its functions are called, with
        whatever they do beside.

        Args:
            items: so many are made, or a batch at least.
            seconds: or as many as can be in this time; one item goes all the way however long it takes.
        Returns:
            figures of this process and moment; `str()` of it is a table.
        Raises:
            ValueError: `items` or `seconds` is not above 0.
        """
        if not (items > 0 and seconds > 0):
            raise ValueError(f"explain needs items and seconds above 0; got items={items}, seconds={seconds}")
        from shmload.pipeline.explain import explained  # which is made of Conveyers

        return explained(self, items, seconds)

    def stats(self) -> dict[str, Any]:
        """ShmLoader's stats() of the loader that runs the pipeline; empty before the first item."""
        return {} if self._loader is None else self._loader.stats()

    def close(self) -> None:
        """Ends the workers. What was delivered stays valid; a closed pipeline gives nothing more."""
        self._is_closed, self._iterator = True, None
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
