"""Encode the parts of a state whose structure varies as one JSON string, and decode it without running code.

torch.distributed.checkpoint loads into the keys that a fresh object's state has, so every state of a loader must have the same
keys; what varies is therefore one string. A user's own state comes back exactly as it was: a value that JSON cannot represent is
written as {"$word": ...}. A value that has no word here either is pickled, so that saving never fails. Because a pickle can run
any code, it is only opened if the program has said that it trusts its states (torch.load's weights_only would let such a string
through).

    None, bool, int, float, str, list, dict of str     themselves; "$int", "$float" where JSON has no digits for it
    tuple, set, frozenset, other dicts                  "$tuple", "$set", "$frozenset", "$dict", "$ordered" (an OrderedDict)
    bytes, bytearray, complex                           "$bytes", "$bytearray", "$complex"
    numpy arrays and scalars                            "$array", "$scalar": a .npy file
    tensors                                             "$tensor": dtype, shape, bytes
    anything else                                       "$pickle": its type's name, bytes
"""

import base64
import io
import json
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmload.errors import StateMismatch

MAX_DEPTH = 100  # of nested containers; deeper ones are pickled, because a container may contain itself
_MAX_INT = 1 << 63


def sealed(value: Any) -> str:
    """Encode a value as JSON text. Parts of it that are wrapped in UsersOwn may be any objects."""
    return json.dumps(value, default=_marked, allow_nan=False)


def opened(text: str, *, is_trusted: bool) -> Any:
    """Decode a result of `sealed`. Values wrapped in UsersOwn come back without the wrapper.

    Args:
        text: the result of `sealed`.
        is_trusted: allow pickles, which can run any code.
    Raises:
        StateMismatch: the text contains a pickle and is not trusted.
        ValueError, TypeError, LookupError, RecursionError: `sealed` did not make the text.
    """
    return _opened(json.loads(text), is_trusted)


class UsersOwn:
    """A mark on a value that belongs to the user and must come back exactly as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _marked(own: Any) -> dict[str, Any]:
    if not isinstance(own, UsersOwn):
        raise TypeError(f"{type(own).__name__} is neither JSON nor marked as the user's own")
    return {"$own": _written(own.value, 0)}


def _opened(found: Any, is_trusted: bool) -> Any:
    if type(found) is list:
        return [_opened(part, is_trusted) for part in found]
    if type(found) is not dict:
        return found
    if found.keys() == {"$own"}:
        return _read(found["$own"], is_trusted)
    return {name: _opened(part, is_trusted) for name, part in found.items()}


def _written(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_MAX_INT <= value < _MAX_INT else {"$int": hex(value)}  # Python limits the digits of larger ones
    if kind is float:
        return value if math.isfinite(value) else {"$float": _text(struct.pack("<d", value))}
    if depth > MAX_DEPTH:
        return _pickled(value)
    if kind is list:
        return [_written(part, depth + 1) for part in value]
    if kind is dict and all(type(name) is str and not name.startswith("$") for name in value):
        return {name: _written(part, depth + 1) for name, part in value.items()}
    if (word := _WORDS.get(kind)) is not None:
        is_dict = isinstance(value, dict)  # the pairs of a dict do not count as a level
        return {word: _written(list(map(list, value.items()) if is_dict else value), depth - is_dict)}
    if kind is bytes or kind is bytearray:
        return {f"${kind.__name__}": _text(value)}
    if kind is complex:
        return {"$complex": _text(struct.pack("<dd", value.real, value.imag))}
    if kind is torch.Tensor and (tensor := _written_tensor(value)) is not None:
        return {"$tensor": tensor}
    if kind is np.ndarray and (written := _written_array(value)) is not None:
        return {"$array": written}
    if isinstance(value, np.generic) and (written := _written_array(np.asarray(value))) is not None:
        return {"$scalar": written}
    return _pickled(value)


def _pickled(value: Any) -> dict[str, Any]:
    return {"$pickle": [f"{type(value).__module__}.{type(value).__qualname__}", _text(pickle.dumps(value))]}


_HOLDERS: dict[str, type[Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$dict": dict, "$ordered": OrderedDict}
_WORDS: dict[Any, str] = {kind: word for word, kind in _HOLDERS.items()}


def _written_tensor(tensor: torch.Tensor) -> list[Any] | None:
    """Encode a tensor, or return None if it is more than numbers in CPU memory."""
    is_more = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or is_more:
        return None
    try:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    except RuntimeError:  # a dtype whose elements are smaller than a byte
        return None
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _text(raw)]


def _written_array(array: np.ndarray[Any, Any]) -> str | None:
    """Encode an array as a .npy file, or return None for objects and for dtypes that the format cannot name."""
    if array.dtype.hasobject or np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(array.dtype)) != array.dtype:
        return None
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(3, 0), allow_pickle=False)
    return _text(file.getvalue())


def _read(found: Any, is_trusted: bool) -> Any:
    if type(found) is list:
        return [_read(part, is_trusted) for part in found]
    if type(found) is not dict:
        return found
    if len(found) == 1:
        ((word, held),) = found.items()
        if word == "$pickle":
            return _unpickled(held[0], held[1], is_trusted=is_trusted)
        if (build := _HOLDERS.get(word)) is not None:
            return build([_read(part, is_trusted) for part in held])
        if word.startswith("$"):
            return _PLAIN[word](held)
    return {name: _read(part, is_trusted) for name, part in found.items()}


def _unpickled(kind: str, text: str, *, is_trusted: bool) -> Any:
    if not is_trusted:
        raise StateMismatch(
            f"the state holds an object of {kind} that only pickle can read, and a pickle can run any code: if nobody else can "
            "write where the state comes from, give ShmLoader trust_state=True; else let the object's owner give its state in "
            "numbers, text, bytes, arrays, tensors and containers of them"
        )
    return pickle.loads(_bytes(text))


def _read_tensor(held: list[Any]) -> torch.Tensor:
    name, shape, text = held
    dtype, raw = getattr(torch, name), bytearray(_bytes(text))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).reshape(shape)


def _read_array(text: str) -> np.ndarray[Any, Any]:
    file = io.BytesIO(_bytes(text))
    array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False, max_header_size=len(text))
    if file.read(1):
        raise ValueError(f"extra data after an array of {array.nbytes} bytes")
    return array


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "$int": lambda text: int(text, 16),
    "$float": lambda text: struct.unpack("<d", _bytes(text))[0],
    "$complex": lambda text: complex(*struct.unpack("<dd", _bytes(text))),
    "$bytes": lambda text: _bytes(text),
    "$bytearray": lambda text: bytearray(_bytes(text)),
    "$tensor": _read_tensor,
    "$array": _read_array,
    "$scalar": lambda held: _read_array(held)[()],
}


def _text(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
