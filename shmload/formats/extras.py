"""Import optional libraries. Errors name the extra that installs them."""

from __future__ import annotations

import importlib
from typing import Any


def library(name: str, extra: str) -> Any:
    """Return a module of an optional package.

    Args:
        name: name of the module.
        extra: the extra of shmload that installs the package.
    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name not in (name, package):
            raise
        raise with_extra(error, extra) from error


def with_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return an error that a package is not installed, which names the extra that installs it."""
    package = (error.name or "").partition(".")[0]
    message = f"the package {package} is needed and is not installed: pip install 'shmload[{extra}]'"
    return ModuleNotFoundError(message, name=package)
