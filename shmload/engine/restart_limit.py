"""Count the dead workers that one loader has replaced, and compare them with `max_restarts`."""

from __future__ import annotations

from shmload.engine.config import LoaderConfig


class RestartLimit:
    """The number of dead workers that a loader may still replace, over its whole life.

    Args:
        config: arguments of the loader.

    Attributes:
        num_left: this number; None for any number.
        rule: words for an error: that `max_restarts` is used up; empty if it was not given.
    """

    def __init__(self, config: LoaderConfig) -> None:
        wanted = config.max_restarts
        self.num_left = 0 if wanted is None and config.seed is None else wanted
        self.rule = f"; max_restarts={wanted} is used up" if wanted else ""

    def use_one(self) -> None:
        """Count a worker that is replaced."""
        if self.num_left is not None:
            self.num_left -= 1
