"""Call the user's `after_batch` on a delivered batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmload.worker.reader import no_end


def after_batch(function: Callable[[Any], Any], batch: Any, where: str) -> Any:
    """What the user's function makes of a delivered batch; its error says which batch that was."""
    try:
        return function(batch)
    except StopIteration as error:
        raise no_end(error, f"after_batch ({where})") from error
    except Exception as error:
        error.add_note(f"shmload: raised by after_batch ({where}); that batch is lost, and the next is behind it")
        raise
