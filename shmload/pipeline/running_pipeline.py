"""RunningPipeline: the calls, iteration, states and close that a Conveyer and a Join have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from shmload.engine.iterator_lock import IteratorLock
from shmload.pipeline.join_engine import JoinEngine
from shmload.pipeline.pipeline_engine import PipelineEngine


class RunningPipeline:
    """A pipeline that delivers batches or items.

    Args:
        engine: makes the batches or items, and keeps the position.
    """

    def __init__(self, engine: PipelineEngine | JoinEngine) -> None:
        self.engine: PipelineEngine | JoinEngine = engine
        self._iterator_lock = IteratorLock()
        self._is_closed = False

    def __call__(self) -> Any:
        """Return the next batch or item; a Join draws it from the member whose turn it is.

        Raises:
            StopIteration: a pipeline that does not repeat has reached the end of its epoch.
            any exception of a function, with the item's name; that batch or item is lost, and the next call continues after it.
            SampleTimeout, WorkerDied: an item took too long, or ended its worker twice.
        """
        with self._iterator_lock:
            if self._is_closed:
                raise RuntimeError("this pipeline is closed: make a new one")
            return self.engine.pull()

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch, or over the next epoch if this one has ended."""
        self.engine.begin_pass()
        return _Pass(self)

    __next__ = __call__

    def __len__(self) -> int:
        """Return the number of batches, or items, of this rank in one epoch; of a repeating source, rounded up."""
        return self.engine.num_steps

    # ------------------------------------------------------------ position

    @property
    def is_ended(self) -> bool:
        """Return whether nothing is left until the next epoch begins."""
        return self.engine.is_ended

    def begin_next_epoch(self) -> None:
        """Go to the start of the next epoch of a pipeline that does not repeat. Members of a Join continue where they are."""
        self.engine.begin_next_epoch()

    def state(self) -> dict[str, Any]:
        """Return the position, which JSON can represent, and which is the same on all ranks after equal steps. Call it at any time.

        It takes less than 1 KiB, 64 bytes more for each member of a Join, and what Scans and a Stream's iterable save in it.
        """
        return self.engine.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where any rank took `state`, on any number of ranks and workers. It can be called while the pipeline runs.

        Raises:
            StateMismatch: the state belongs to another pipeline; the message says what differs. Nothing is changed then.
        """
        self.engine.load(state)

    set_state = load_state
    state_dict, load_state_dict = state, load_state  # torch's names, for torch.distributed.checkpoint

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """End the workers. Delivered batches stay valid; a closed pipeline delivers nothing more."""
        self._is_closed = True
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Pass(Iterator[Any]):
    """Iterates a pipeline, and stays ended after the epoch's end: `iter` of the pipeline would begin the next epoch."""

    def __init__(self, pipeline: RunningPipeline) -> None:
        self._pipeline: RunningPipeline | None = pipeline

    def __next__(self) -> Any:
        if self._pipeline is None:
            raise StopIteration
        try:
            return self._pipeline()
        except StopIteration:
            self._pipeline = None
            raise
