"""Scan: apply a function that carries a state from item to item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmload.schedule.state_codec import UsersOwn, sealed
from shmload.worker.stage_arguments import check_function


@dataclass(frozen=True)
class Scan:
    """A stage that applies a function with a state, such as a running mean, to each item. The state is part of the position.

    It runs in the trainer over the items of all ranks in order, so every rank has the same state. The stages after it run there,
    too. Each epoch begins with `initial`.

    Args:
        fn: (state, item) -> (state, item). It must not change the state that it is given, but return a new one, because the old one
            is needed again: if `fn` raises, that item is lost and the state is unchanged; after an interrupt, items are read again.
        initial: numbers, text, bytes, arrays, tensors or containers of them, because it is saved in states.
    Raises:
        TypeError: `fn` cannot be called, or `initial` cannot be saved.
    """

    fn: Callable[[Any, Any], tuple[Any, Any]]
    initial: Any = None

    def __post_init__(self) -> None:
        check_function("Scan(fn)", self.fn, "a state and an item")
        saved(self.initial, "Scan(initial)")

    def __call__(self, state: Any, item: Any) -> tuple[Any, Any]:
        """Return the next state and the resulting item."""
        made = self.fn(state, item)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise TypeError(f"the function of a Scan gives (state, item); it gave {made!r:.200}")
        return made


def saved(state: Any, whose: str) -> str:
    """Serialize a user's state for the state of a pipeline.

    Raises:
        TypeError: the state contains something that only pickle could write.
    """
    text = sealed(UsersOwn(state))
    if '{"$pickle": ' in text:
        raise TypeError(
            f"{whose} is saved with the pipeline's state, and contains a value that only pickle can write: give it numbers, text, "
            "bytes, arrays, tensors and containers of them"
        )
    return text
