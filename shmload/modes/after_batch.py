"""Call the user's `after_batch` on a delivered batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmload.worker.failure import stop_iteration_error


def after_batch(function: Callable[[Any], Any], batch: Any, where: str) -> Any:
    """Return `function(batch)`. An error that it raises gets a note with the batch's position.

    Args:
        function: the user's `after_batch`.
        batch: the batch that was just delivered.
        where: the batch's position, for messages.
    """
    try:
        return function(batch)
    except StopIteration as error:
        raise stop_iteration_error(error, f"after_batch ({where})") from error
    except Exception as error:
        error.add_note(f"shmload: raised by after_batch ({where}); that batch is lost; the next call returns the batch after it")
        raise
