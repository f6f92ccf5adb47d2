"""The parts of a state whose shape varies, as one string.

torch.distributed.checkpoint loads into the keys that a fresh object's state has, so every state of a loader must have the same.
What is JSON stays JSON; a user's own state that JSON would change (tensors, tuples, int keys) is pickled, as torch.save would.
"""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any


def sealed(value: Any) -> str:
    """The value as a string."""
    return json.dumps(value, default=_pickled)


def opened(text: str) -> Any:
    """Inverse of `sealed`."""
    return json.loads(text, object_hook=_unpickled)


class UsersOwn:
    """A value in what is sealed that the user has made, and that must come back exactly as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _pickled(own: Any) -> dict[str, Any]:
    if not isinstance(own, UsersOwn):
        raise TypeError(f"{type(own).__name__} is neither JSON nor marked as the user's own")
    try:
        if _is_json(own.value):
            return {"own": own.value}
    except RecursionError:  # it holds itself
        pass
    return {"pickled": base64.b64encode(pickle.dumps(own.value)).decode()}


def _unpickled(found: dict[str, Any]) -> Any:
    if found.keys() == {"pickled"}:
        return pickle.loads(base64.b64decode(found["pickled"]))
    return found["own"] if found.keys() == {"own"} else found


def _is_json(value: Any) -> bool:
    """Whether JSON gives back the same value; dicts that would be taken for marks of ours are said not to be."""
    if type(value) is dict:
        return value.keys() not in ({"own"}, {"pickled"}) and all(
            type(name) is str and _is_json(part) for name, part in value.items()
        )
    if type(value) is list:
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)
