"""Count the dead workers that one loader has replaced, and compare them with `max_restarts`."""

from __future__ import annotations

from shmload.engine.config import LoaderConfig


class RestartLimit:
    """The number of dead workers that a loader may still replace, over its whole life.

    Args:
        config: arguments of the loader.

    Attributes:
        num_left: this number; None for any number.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self.num_left = 0 if config.max_restarts is None and config.seed is None else config.max_restarts

    def use_one(self) -> None:
        """Count a worker that is replaced."""
        if self.num_left is not None:
            self.num_left -= 1
