"""What an object itself can do: whether it has a method or an attribute of a protocol, and does not only answer to its name.

Mocks, dicts with attributes and proxies answer any name, and wrappers pass names on to what they wrap: read by a method
of the inner dataset's, samples would come without the wrapper's transform.
"""

from __future__ import annotations

import inspect
from typing import Any


def ability_of(value: Any, name: str) -> Any:
    """What an object's class defines, or the object was given, under a name; None: nothing but what a `__getattr__` says."""
    try:
        inspect.getattr_static(value, name)
    except AttributeError:
        return None
    return getattr(value, name, None)
