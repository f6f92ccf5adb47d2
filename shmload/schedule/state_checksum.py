"""Compute and check the checksum of a state, by which a loader detects a damaged or edited state.

It is computed over canonical JSON, so a JSON round trip, torch.save, reordered keys and tuples in place of lists do not change
it. It detects damage. It does not detect intent: a person who writes a state can write its checksum too (state_codec.py ensures
that a state runs no code).
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

from shmload.errors import StateMismatch

CHECK = "check"
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def with_checksum(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with its checksum, replacing an existing one."""
    return {**state, CHECK: _checksum(state)}


def check_checksum(state: Mapping[str, Any]) -> None:
    """Check that a state is unchanged since it was saved.

    Raises:
        StateMismatch: it was changed or damaged.
    """
    expected = _checksum(state)
    if type(state.get(CHECK)) is not int or state[CHECK] != expected:
        raise StateMismatch(
            f"the state is damaged or was changed by hand: its contents have the checksum {expected}, and it stores "
            f"{state.get(CHECK)!r}. Load what state_dict() returned, of an earlier checkpoint if this one's file is damaged"
        )


def _checksum(state: Mapping[str, Any]) -> int:
    try:
        return zlib.crc32(_canonical({name: value for name, value in state.items() if name != CHECK}).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise StateMismatch(f"a state is JSON, and this is not: {error}. Load what state_dict() returned") from error
