"""The stages that run in the trainer on single items: Scans, and the Maps after a Scan.

Random numbers of an item are keyed by seed, epoch, block and place in the block, so they are the same after a resume and for any
number of ranks. The trainer's own generators are unchanged afterward.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from shmload.errors import StateMismatch
from shmload.pipeline.scan import Scan, saved
from shmload.schedule.state_codec import opened
from shmload.worker.failure import Failure
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import generators_kept, sample_of
from shmload.worker.stage_engine import FailedItem, with_note


class TrainerStages:
    """The stages after the workers, with the states that Scans carry from item to item.

    Args:
        stages: pairs of a name and a Scan or a function of an item.
        seed: seed of the pipeline.
    Attributes:
        carried: the states that the Scans carry now.
    """

    def __init__(self, stages: Sequence[tuple[str, Any]], seed: int) -> None:
        self._stages, self._seed = stages, seed
        self._initial = [stage.initial for _, stage in stages if isinstance(stage, Scan)]
        self.restart()

    def __bool__(self) -> bool:
        return bool(self._stages)

    def restart(self) -> None:
        """Begin with the initial states."""
        self.carried = [copy.deepcopy(state) for state in self._initial]

    def restarted(self) -> TrainerStages:
        """Return the same stages in their initial states."""
        return TrainerStages(self._stages, self._seed)

    @functools.cached_property
    def _own(self) -> OwnGenerators:
        return OwnGenerators([stage for _, stage in self._stages])

    def __call__(self, items: list[Any], epoch: int, block: int, offset: int) -> list[Any]:
        """Run the stages on items, in order.

        Args:
            items: the items; a FailedItem is passed on.
            epoch, block: the epoch, and the items' block in it.
            offset: place of the first item in the block.
        """
        first = ((block + 1) << 32 | offset) % (1 << 62)  # above the numbers of blocks, by which workers key their draws
        keys, results, carried = list(range(first, first + len(items))), [], self.carried.copy()
        try:
            with generators_kept():
                for row, item in enumerate(items):
                    if type(item) is not FailedItem:
                        with sample_of(self._seed, epoch, keys[row], 0, keys=keys, row=row, own=self._own):
                            item = self._result(item, f"block {block} of epoch {epoch}")
                    results.append(item)
        except BaseException:  # an interrupt: the same items come again
            self.carried = carried
            raise
        return results

    def _result(self, item: Any, of_what: str) -> Any:
        which = 0
        for name, stage in self._stages:
            try:
                if isinstance(stage, Scan):
                    self.carried[which], item = stage(self.carried[which], item)
                    which += 1
                else:
                    item = stage.function(item)
            except Exception as error:
                return FailedItem(Failure.of(with_note(error, name, f"an item of {of_what}"), "in the trainer", ""))
        return item

    # ------------------------------------------------------------ states

    def saved(self, carried: list[Any]) -> dict[str, str]:
        """Return carried states, for the state of a pipeline."""
        return {"scans": saved(carried, "what a Scan carries")} if self._initial else {}

    def check(self, children: Mapping[str, str]) -> None:
        """Check saved states.

        Raises:
            StateMismatch: they are missing, or of another number of Scans.
        """
        if self._initial and len(self._opened(children)) != len(self._initial):
            raise StateMismatch(f"the state has another number of Scans than {len(self._initial)}")

    def load(self, children: Mapping[str, str]) -> None:
        """Continue with saved states, or with the initial ones if none are given."""
        self.restart()
        if self._initial and "scans" in children:
            self.carried = self._opened(children)

    @staticmethod
    def _opened(children: Mapping[str, str]) -> list[Any]:
        try:
            carried = opened(children["scans"], is_trusted=False)
        except (KeyError, ValueError, TypeError) as error:
            raise StateMismatch(f"the state does not contain what the pipeline's Scans carried ({error!r})") from error
        return carried if isinstance(carried, list) else []
