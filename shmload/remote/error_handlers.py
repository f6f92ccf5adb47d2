"""webdataset's handlers of errors, for stages of a RemoteDataset.

A handler is a function of the exception. It returns True to continue without the sample or False to end the pass, or it raises.
"""

from __future__ import annotations

import warnings


def reraise_exception(error: Exception) -> bool:
    """Raise the error.

    Args:
        error: raised by the stage.
    """
    raise error


def ignore_and_continue(error: Exception) -> bool:
    """Skip the sample.

    Args:
        error: raised by the stage.
    """
    return True


def warn_and_continue(error: Exception) -> bool:
    """Skip the sample with a warning.

    Args:
        error: raised by the stage.
    """
    warnings.warn(repr(error), stacklevel=2)
    return True


def ignore_and_stop(error: Exception) -> bool:
    """End the pass.

    Args:
        error: raised by the stage.
    """
    return False


def warn_and_stop(error: Exception) -> bool:
    """End the pass with a warning.

    Args:
        error: raised by the stage.
    """
    warnings.warn(repr(error), stacklevel=2)
    return False
