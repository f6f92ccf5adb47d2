"""What becomes of a sample that a stage fails on, as webdataset names it: functions of the exception.

True: go on without the sample. False: end the pass. Or they raise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

__all__ = [
    "Handler",
    "ignore_and_continue",
    "ignore_and_stop",
    "reraise_exception",
    "warn_and_continue",
    "warn_and_stop",
]

Handler = Callable[[Exception], bool]


def reraise_exception(error: Exception) -> bool:
    """Raises it.

    Args:
        error: of the stage.
    """
    raise error


def ignore_and_continue(error: Exception) -> bool:
    """Leaves the sample out.

    Args:
        error: of the stage.
    """
    return True


def warn_and_continue(error: Exception) -> bool:
    """Leaves the sample out and says so.

    Args:
        error: of the stage.
    """
    warnings.warn(repr(error), stacklevel=2)
    return True


def ignore_and_stop(error: Exception) -> bool:
    """Ends the pass.

    Args:
        error: of the stage.
    """
    return False


def warn_and_stop(error: Exception) -> bool:
    """Ends the pass and says so.

    Args:
        error: of the stage.
    """
    warnings.warn(repr(error), stacklevel=2)
    return False
