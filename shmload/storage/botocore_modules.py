"""Import botocore, which only the extra `s3` installs."""

from __future__ import annotations

import importlib
from typing import Any

from shmload.errors import StoreError

__all__ = ["library"]


def library(name: str) -> Any:
    """Import and return a module of botocore.

    Args:
        name: name of the module.
    Raises:
        StoreError: botocore is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise StoreError("buckets (s3://) need boto3, which is not installed: pip install 'shmload[s3]'") from None
