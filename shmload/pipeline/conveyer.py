"""Conveyer: a composed pipeline, run by one ShmLoader.

    stages ──plan──▶ source: a stream of keys ──▶ slots, filled by workers with a RowProgram ──▶ batches, or items one by one

The loader is in seed mode with the stream as its batch sampler, so order, ranks, crash replay and resume are the loader's. What is
added here is the position: it counts items that all ranks have had, also within what was fetched together.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

from shmload.errors import StateMismatch
from shmload.loader import ShmLoader
from shmload.pipeline.items import ItemErrors, items_of
from shmload.pipeline.pace import Pace
from shmload.pipeline.plan import compose
from shmload.pipeline.program import RowProgram
from shmload.pipeline.stream import SourceOrder, Stream, StreamSchedule
from shmload.schedule.keyed import KeyedOrder
from shmload.schedule.state import check_state, compare_state, make_state

__all__ = ["Conveyer"]

OPTIONS = frozenset(
    {
        "audit",
        "max_bad",
        "max_restarts",
        "multiprocessing_context",
        "on_error",
        "pin_memory",
        "ring_bytes",
        "worker_init_fn",
    }
)


class Conveyer:
    """Stages in a row: `pipeline()` gives the next batch, or the next item where nothing collates.

    The same stages give the same batches, on any number of workers and ranks, from any position.

    Args:
        stages: a Range, a Permutation or a Join, then Map, DistributedBatchedMap and Partition as wanted, then Collate, if
            batches are to come, and Maps of whole batches.
        options: some of ShmLoader's arguments: audit, max_bad, max_restarts, multiprocessing_context, on_error, pin_memory,
            ring_bytes, worker_init_fn.
    Raises:
        TypeError, ValueError: the stages make no pipeline.
    Iteration goes on where the pipeline stands: without an end if the source repeats, else to the end of its epoch; iterating an
    ended one begins the next epoch. Arrays and tensors lie in shared memory and are yours for as long as anything aliases them.
    Example:
        >>> from shmload.pipeline import Collate, Conveyer, Map, Permutation
        >>> with Conveyer([Permutation(10, seed=7), Map(lambda i: {"i": i}), Collate(5)]) as pipeline:
        ...     batches = [pipeline()["i"], pipeline()["i"]]
        >>> sorted(int(i) for batch in batches for i in batch)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, stages: Sequence[Any], **options: Any) -> None:
        self.stages = list(stages)
        self.plan = plan = compose(self.stages)
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise TypeError(
                f"Conveyer takes of ShmLoader's arguments {', '.join(sorted(OPTIONS))}; got {', '.join(unknown)}"
            )
        self._options = options
        self._rank = plan.partition.rank
        self._stream = Stream(plan.source, None if plan.collate is None else plan.collate.batch_size)
        self._seed = plan.source.seed
        self._schedule: StreamSchedule = self._stream.schedule(
            seed=self._seed, uneven=plan.uneven, world_size=plan.partition.n_ranks
        )
        self._position = 0  # items that all ranks have had: of this epoch, or of all if the source repeats
        self._epoch = 0  # of a source that does not repeat
        self._loader: ShmLoader[Any] | None = None
        self._iterator: Any = None
        self._errors = ItemErrors()
        self._fetched: deque[Any] = deque()  # items that came together and have not been asked for
        self._pace = Pace(self._stream, plan)
        self._is_closed = False

    # ------------------------------------------------------------ items

    def __call__(self) -> Any:
        """The next batch or item.

        Raises:
            StopIteration: a pipeline that does not repeat is at its end.
            what a function raised, with the item's number; that batch or item is lost, and the next call goes on behind it.
            SampleTimeout, WorkerDied: an item took too long, or ended its worker twice.
        """
        if self._is_closed:
            raise RuntimeError("this pipeline is closed: make a new one")
        if self.is_ended:
            raise StopIteration
        if self.plan.collate is None:
            return self._next_item()
        batch = self._fetch()
        for function in self.plan.batch_functions:
            batch = function(batch)
        return batch

    def _next_item(self) -> Any:
        while not self._fetched:
            first = self._position
            try:
                items = self._fetch()
            except StopIteration:
                items = []
            self._fetched.extend(items_of(self._schedule, self._rank, range(first, self._reached), items, self._errors))
            self._position = first
            if not self._fetched:
                self._position = self._reached
                raise StopIteration
        item, error = self._fetched.popleft()
        self._position += self._schedule.stride
        if error is not None:
            raise error
        return item

    def _fetch(self) -> Any:
        """What comes next from the workers; the position is then behind it."""
        if self._iterator is None:
            self._iterator = self._begun()
        try:
            return next(self._iterator)
        finally:
            self._position = self._reached
            self._pace.fetched(self._loader)

    @property
    def _reached(self) -> int:
        return int(self._iterator.place.step)

    def _begun(self) -> Any:
        if self._loader is None:
            self._loader = self._make_loader()
        self._stream.epoch = self._epoch
        self._stream.rounds_at.clear()
        state = make_state(self._schedule, epoch=self._epoch, step=self._position)
        self._loader.load_state_dict(dict(state))
        return iter(self._loader)

    def _make_loader(self) -> ShmLoader[Any]:
        plan, is_single = self.plan, self.plan.collate is None
        options: dict[str, Any] = {"on_error": "skip"} if is_single else {}
        if plan.num_workers:
            options["prefetch_factor"] = plan.prefetch_factor(self._stream.batch_size or 1)
            options["sample_timeout_s"] = plan.timeout_s
        loader: ShmLoader[Any] = ShmLoader(
            plan.program,  # type: ignore[arg-type]  # a dataset by its methods
            batch_sampler=self._stream,
            num_workers=plan.num_workers,
            collate_fn=list if is_single else None,
            seed=self._seed,
            rank=self._rank,
            world_size=plan.partition.n_ranks,
            uneven=plan.uneven,
            ragged="list" if plan.collate is None else plan.collate.ragged,
            **{**options, **self._options},
        )
        if is_single:
            loader.bad_samples = self._errors
        return loader

    def __iter__(self) -> Self:
        if self.is_ended:
            self.begin_next_epoch()
        return self

    def __next__(self) -> Any:
        return self()

    def __len__(self) -> int:
        """Batches, or items, that this rank has of one epoch. A source that repeats has no seam there: the whole number above."""
        end = self._schedule.n if self.plan.source.repeating else self._schedule.end_of(self._stream.epoch, self._rank)
        return -(-end // self._schedule.stride)

    @property
    def valid(self) -> int | None:
        """How many rows of the batch just given are real and not padding; None before the first, and for single items."""
        return None if self._loader is None or self.plan.collate is None else self._loader.valid

    # ------------------------------------------------------------ as a ShmLoader's dataset and sampler in one

    def keyed_order(self, *, shuffle: bool, global_batch: int) -> KeyedOrder:
        """The order in which a ShmLoader in seed mode reads it.

        Raises:
            ValueError: the pipeline makes batches or a rank's part of its own.
        """
        self._check_bare()
        return SourceOrder(self.plan.source)

    def __getitem__(self, key: int) -> Any:
        """The item that a key of its order stands for."""
        self._check_bare()
        return RowProgram(self.plan.source, self.plan.functions)[key]

    def _check_bare(self) -> None:
        if self.plan.collate is not None or self.plan.partition.n_ranks > 1:
            raise ValueError(
                "a ShmLoader makes the batches and each rank's part itself: leave Collate and Partition out of the pipeline and "
                "give ShmLoader batch_size, rank and world_size, or call the pipeline itself"
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the stages and the position; workers and items stay here."""
        return {"stages": self.stages, "options": self._options, "place": (self._epoch, self._position)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stages"], **state["options"])  # type: ignore[misc]
        self._move(*state["place"])

    # ------------------------------------------------------------ position

    def state(self) -> dict[str, Any]:
        """Where the pipeline stands: flat, JSON-able, under 1 KiB, the same on all ranks after equal steps. Legal at any time."""
        position, epoch = self._position, self._epoch
        state = dict(make_state(self._schedule, epoch=epoch, step=position))
        if self.plan.source.repeating:
            state["epoch"], state["position"] = divmod(position, self._schedule.n)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken, by any rank, on any number of ranks and workers; also while the pipeline runs.

        Raises:
            StateMismatch: it belongs to another pipeline; says what differs.
        """
        checked = check_state(state)
        compare_state(checked, self._schedule)
        n = self._schedule.n
        if checked["position"] > n:
            raise StateMismatch(f"the state's position is {checked['position']}, and an epoch has {n} items")
        repeats = self.plan.source.repeating
        position = checked["epoch"] * n + checked["position"] if repeats else checked["position"]
        if "counters" in checked:
            self.plan.source.go_on_at(position, checked["counters"])
        self._move(0 if repeats else checked["epoch"], position)

    set_state = load_state
    state_dict, load_state_dict = state, load_state  # torch's words, for torch.distributed.checkpoint

    def _move(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._iterator = epoch, position, None
        self._stream.epoch = epoch
        self._fetched.clear()
        self._errors.of_step.clear()

    # ------------------------------------------------------------ as a member of a Join

    @property
    def is_endless(self) -> bool:
        """Whether it never ends."""
        return self.plan.source.repeating

    @property
    def is_ended(self) -> bool:
        """Whether it has nothing more to give until its next epoch begins."""
        return not self.is_endless and self._position >= self._schedule.end_of(self._epoch, self._rank)

    @property
    def has_equal_ranks(self) -> bool:
        """Whether every rank is given as much as any other."""
        return self.is_endless or self.plan.partition.n_ranks == 1 or self.plan.uneven != "exact"

    def begin_next_epoch(self) -> None:
        """Goes to the start of the next epoch, of a pipeline that does not repeat."""
        self._move(self._epoch + 1, 0)

    def entry(self) -> list[Any]:
        """The state in a few words, for that of a Join."""
        state = self.state()
        entry = [self._mark(state), state["epoch"], state["position"]]
        return [*entry, state["counters"]] if "counters" in state else entry

    def enter(self, entry: Any, where: str) -> None:
        """Goes on where `entry` was taken.

        Raises:
            StateMismatch: it belongs to another pipeline.
        """
        state = self.state()
        if not isinstance(entry, list) or entry[:1] != [self._mark(state)] or len(entry) != len(self.entry()):
            raise StateMismatch(f"the state belongs to another pipeline{where}; this one is {state['order']}")
        self.load_state({**state, **dict(zip(("epoch", "position", "counters"), entry[1:], strict=False))})

    @staticmethod
    def _mark(state: dict[str, Any]) -> str:
        names = ("seed", "n", "uneven", "order")
        return f"{zlib.crc32(repr([state[name] for name in names]).encode()):08x}"

    # ------------------------------------------------------------ ends

    def stats(self) -> dict[str, Any]:
        """ShmLoader's stats() of the loader that runs the pipeline; empty before the first item."""
        return {} if self._loader is None else self._loader.stats()

    def close(self) -> None:
        """Ends the workers. What was delivered stays valid; a closed pipeline gives nothing more."""
        self._is_closed = True
        self._iterator = None
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
