"""Scan: a function that carries a state from item to item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmload.pipeline.stage_arguments import check_function
from shmload.schedule.state_codec import UsersOwn, sealed


@dataclass(frozen=True)
class Scan:
    """A function that carries a state from item to item, which is part of the position: a running mean, what was seen before.

    It runs in the trainer, over the items of all ranks in their order, so every rank's state is the same; what follows it runs
    there, too. An epoch begins with `initial`.

    Args:
        fn: (state, item) -> (state, item). Where it raises, that item is lost and the state stays.
        initial: numbers, text, bytes, arrays, tensors or containers of them, as states are saved.
    Raises:
        TypeError: `fn` cannot be called, or `initial` cannot be saved.
    """

    fn: Callable[[Any, Any], tuple[Any, Any]]
    initial: Any = None

    def __post_init__(self) -> None:
        check_function("Scan(fn)", self.fn, "a state and an item")
        saved(self.initial, "Scan(initial)")

    def __call__(self, state: Any, item: Any) -> tuple[Any, Any]:
        """The next state, and what becomes of the item."""
        made = self.fn(state, item)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise TypeError(f"the function of a Scan gives (state, item); it gave {made!r:.200}")
        return made


def saved(state: Any, whose: str) -> str:
    """A state of the user's, as text of a pipeline's state.

    Raises:
        TypeError: only pickle could write it.
    """
    text = sealed(UsersOwn(state))
    if '{"$pickle": ' in text:
        raise TypeError(
            f"{whose} is saved with the pipeline's state, and holds what only pickle can write: give it numbers, text, bytes, "
            "arrays, tensors and containers of them"
        )
    return text
