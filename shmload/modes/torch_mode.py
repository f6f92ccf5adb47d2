"""Torch mode: the order, randomness and pace of torch's DataLoader, over the engine.

The iterators derive from torch's own base (torch_pass.py), so that generators are used in torch's sequence: the sampler's iterator
first, then the workers' base seed, then one index per batch, `prefetch_factor * num_workers` ahead and one more for each batch
delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from shmload._core.trainer import Order
from shmload.engine.builder import EngineBuilder
from shmload.engine.config import LoaderConfig
from shmload.engine.delivery_log import DeliveryLog
from shmload.modes.continuation import restored
from shmload.modes.dataset_pass import continue_pass
from shmload.modes.draw_origin import GENERATORS, Origin, origin_of, set_own
from shmload.modes.epoch_metrics import EpochWatches
from shmload.modes.pass_context import PassContext
from shmload.modes.pass_progress import fresh_state
from shmload.modes.substitute import next_of_dataset
from shmload.modes.torch_inline_iterator import TorchInlineIterator
from shmload.modes.torch_iterator import TorchIterator
from shmload.modes.torch_pass import TorchPass
from shmload.modes.torch_samplers import is_torchs_own, own_generator
from shmload.modes.torch_state import TorchState, check_torch_state, packed_state
from shmload.worker.snapshot import load_own_states


class TorchPasses(PassContext):
    """The passes of a loader in torch mode. It begins each pass, at its start or where a state was taken."""

    valid = None  # because no row is padding

    def __init__(self, config: LoaderConfig, builder: EngineBuilder, log: DeliveryLog, watches: EpochWatches) -> None:
        super().__init__(config, builder, log, watches)
        self._loaded: TorchState | None = None  # the state from which the next pass continues

    @property
    def first_step(self) -> int:
        """Return the step that the next pass begins with: 0, or the position of a loaded state."""
        return 0 if self._loaded is None or self._loaded["is_finished"] else int(self._loaded["position"])

    def iterator(self, loader: DataLoader[Any]) -> TorchPass:
        """Begin the next pass.

        Args:
            loader: the object that torch's iterators see as their loader.
        """
        state, self._loaded = self._loaded, None
        config, generator = self.config, self.config.generator
        kind = TorchIterator if config.num_workers else TorchInlineIterator
        if state is None:
            with self.generators.drawing(generator) as is_early:
                return kind(loader, self, is_early=is_early)
        continue_pass(config.dataset, state)
        if not config.num_workers and not state["num_workers"]:
            snapshot = (state["workers"] or [{}])[0]
            load_own_states(config.dataset, snapshot)
            self.is_over = "is_over" in snapshot
        if not state["is_finished"]:
            return self._resumed(kind, loader, state)
        self.generators.forget()
        if "origin" not in state["sampler"]:
            return kind(loader, self, state)
        origin = Origin.loads(state["sampler"]["origin"])
        set_own(origin, generator, own_generator(config.index_sampler, generator))
        with self.generators.drawing_from(origin) as is_early:
            return kind(loader, self, state, is_early=is_early)

    def _resumed(self, kind: type[TorchIterator | TorchInlineIterator], loader: DataLoader[Any], state: TorchState) -> TorchPass:
        """Return the rest of a pass. Generators that the program has restored itself are used as they are.

        This is only possible if both runs have workers, or neither has. Otherwise a sampler draws at another time than in the saved
        run.
        """
        marks = state.get("generators", {})
        is_same_kind = bool(self.config.num_workers) == bool(state["num_workers"])
        found = restored(marks) if is_same_kind else set()
        iterator = kind(loader, self, state, is_early=not marks or found != marks.keys())
        found |= restored(marks) if is_same_kind else set()  # an iterator of a dataset restores them when it loads its state
        self.generators.forget()
        moved = [name for name in GENERATORS if name in marks and name not in found]
        if iterator.place is not None and moved:
            self.generators.keep(origin_of(None).replaced(iterator.place, moved))
        return iterator

    def state_dict(self, now: Callable[[], LoaderConfig]) -> dict[str, Any]:
        """Return the state of the newest pass, or the state before the next one if that has ended.

        Args:
            now: returns the loader's arguments. It is called only between passes, because a state may be wanted with every batch.
        """
        if self._loaded is not None:
            return packed_state(self._loaded)
        if self.progress is None or self.progress.is_finished:
            config = now()
            own = own_generator(config.index_sampler, config.generator)
            place = replace(self.generators.place(config.generator), of_sampler=None if own is None else own.get_state())
            state = fresh_state(config, self.progress, place)
        else:
            state = self.progress.state()
            state["generators"] = self.generators.marks(is_torch_enough=is_torchs_own(self.config.index_sampler))
        return packed_state({**state, "passes": self.log.num_passes})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where the state was taken.

        Args:
            state: a result of `state_dict`.
        Raises:
            StateMismatch: the state belongs to another loader or is damaged.
        """
        # torchdata's loader returns {} if there is no state
        self._loaded = None if state == {} else check_torch_state(state, self.config)
        self.progress = None
        if self._loaded is not None and "passes" in self._loaded:
            is_finished = self._loaded["is_finished"]
            self.log.num_passes = self._loaded["passes"] - (not is_finished)
            num_complete = sum(self._loaded["counts"]) if "counts" in self._loaded else self._loaded["done"]
            beyond = () if is_finished else self._loaded["beyond"]
            self.log.resumed(self.log.num_passes, 0 if is_finished else num_complete, beyond=beyond)

    def state_of_copy(self) -> TorchState | None:
        """Return the state from which a copy of the loader continues."""
        return self._loaded

    def go_on_as_copy(self, state: TorchState | None) -> None:
        """Continue at the position of the loader that this one was copied from."""
        self._loaded = state

    def set_epoch(self, epoch: int) -> None:
        """Call the sampler's `set_epoch`, if it has one."""
        batches: Any = self.config.batch_sampler
        for sampler in (batches, getattr(batches, "sampler", None), self.config.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # type: ignore[union-attr]  # it has one
                return

    def substitute(self, order: Order, row: int, tries: int) -> Any:
        """Return the index that replaces a bad sample at the given try."""
        return next_of_dataset(self.config, order, row)

    def close(self) -> None:
        """Do nothing, because each iterator ends its own workers."""
