"""Choose between threads and processes for a loader with `backend="auto"`, once, when its first workers start.

While a thread decodes with Python's lock (the GIL) held, no other thread runs Python code, the trainer's included. If decoding
holds the lock for a share s of the time, n threads hold it for n * s of the time as long as they do not wait for each other, and
together they are at most 1 / s times as fast as one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shmload.engine.argument_checks import check_thread_workers
from shmload.engine.config import LoaderConfig

log = logging.getLogger("shmload")

# largest share of the time for which all threads together may hold the lock: others then find it free at least every other time
HELD_MAX = 0.5


class NotSent(Exception):
    """The dataset cannot be sent to a process."""


@dataclass(frozen=True)
class BackendChoice:
    """What "auto" has chosen.

    Attributes:
        backend: the value of `backend` that it stands for.
        reason: why, as a phrase.
        held_share: share of the time for which decoding holds Python's lock; None if it was not measured.
    """

    backend: Literal["process", "thread"]
    reason: str
    held_share: float | None = None

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


def chosen_backend(config: LoaderConfig, measure: Callable[[LoaderConfig], float]) -> BackendChoice:
    """Return the workers for a loader: threads where they are as good as processes, else processes.

    Args:
        config: arguments of the loader.
        measure: returns the share of the time for which decoding holds the lock. It raises NotSent if the dataset cannot be sent
            to a process, or any other exception whose message says why it has no result.
    """
    choice = _choice(config, measure)
    log.info('backend="auto": %s', choice)
    return choice


def _choice(config: LoaderConfig, measure: Callable[[LoaderConfig], float]) -> BackendChoice:
    if config.share is not None:
        return BackendChoice("process", f"share={config.share!r} needs processes")
    try:
        check_thread_workers(vars(config))
    except ValueError as error:
        return BackendChoice("process", f"threads are refused: {error}")
    if not has_gil():
        return BackendChoice("thread", "this Python has no GIL")
    try:
        share = measure(config)
    except NotSent as error:
        return BackendChoice("thread", f"processes are refused: {error}")
    except Exception as error:
        return BackendChoice("process", f"the first samples could not be measured: {error}")
    limit = HELD_MAX / config.num_workers
    text = f"decoding holds the GIL for {share:.0%} of the time; {config.num_workers} threads allow {limit:.1%}"
    return BackendChoice("thread" if share <= limit else "process", text, share)


def has_gil() -> bool:
    """Return whether threads of this interpreter take turns."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())
