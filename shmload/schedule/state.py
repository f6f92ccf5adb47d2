"""The saved state of a seeded run: a flat, JSON-able dict of eleven fields, for any loader, pipeline or growing cache.

The order is a pure function, so a state holds no indices: which order it is (n, seed, shuffle, global_batch, uneven,
schedule) and how far the run came (epoch, position). World size is left out on purpose: any number of ranks with the
same global batch may resume; where the order makes the batches itself, any number. Mixtures add `counters`, composites
and snapshots `children`; absent where there are none.

The checksum of a state: whatever has kept it since, the loader that takes it knows whether every value is what it was.

It is that of canonical JSON, so JSON there and back, torch.save, another order of keys and tuples in place of lists change nothing.
It shows damage. Who writes a state on purpose can write its checksum, too; that a state runs no code is the codec's affair.

The parts of a state whose shape varies, as one string of JSON.

torch.distributed.checkpoint loads into the keys that a fresh object's state has, so every state of a loader must have the same.
A user's own state comes back exactly as it was: what JSON has no word for is written as {"$word": ...}, and reading that runs
no code. What has no word here either is pickled, so that saving does not fail; as a pickle can run any code, one is opened only
where the program has said that it trusts its states (torch.load's weights_only would let such a string through).

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
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NotRequired, TypedDict, cast, get_origin, get_type_hints

import numpy as np
import torch

from shmload.errors import StateMismatch
from shmload.schedule.schedule import BatchSchedule, KeyedOrder, Schedule

MAX_DEPTH = 100  # of containers in each other; what lies deeper is pickled, as what holds itself must be
_MAX_INT = 1 << 63


def sealed(value: Any) -> str:
    """The value as a string: JSON, and in it what is marked as the user's own."""
    return json.dumps(value, default=_marked, allow_nan=False)


def opened(text: str, *, is_trusted: bool) -> Any:
    """Inverse of `sealed`.

    Args:
        is_trusted: pickles in it may be opened.
    Raises:
        StateMismatch: it holds a pickle and is not trusted.
        ValueError, TypeError, LookupError, RecursionError: it is not what `sealed` gives.
    """
    return _opened(json.loads(text), is_trusted)


class UsersOwn:
    """A value in what is sealed that the user has made, and that must come back exactly as it is."""

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


# ------------------------------------------------------------ writing


def _written(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_MAX_INT <= value < _MAX_INT else {"$int": hex(value)}  # Python limits the digits of others
    if kind is float:
        return value if math.isfinite(value) else {"$float": _text(struct.pack("<d", value))}
    if depth > MAX_DEPTH:
        return _pickled(value)
    if kind is list:
        return [_written(part, depth + 1) for part in value]
    if kind is dict and all(type(name) is str and not name.startswith("$") for name in value):
        return {name: _written(part, depth + 1) for name, part in value.items()}
    if (word := _WORDS.get(kind)) is not None:
        is_dict = isinstance(value, dict)  # whose pairs are no level of their own
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
    """None for one that is more than numbers on the CPU."""
    is_more = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or is_more:
        return None
    try:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    except RuntimeError:  # a dtype without a size in bytes
        return None
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _text(raw)]


def _written_array(array: np.ndarray[Any, Any]) -> str | None:
    """As a .npy file; None for one of objects, or of a dtype that numpy cannot name."""
    if array.dtype.hasobject or np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(array.dtype)) != array.dtype:
        return None
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(3, 0), allow_pickle=False)
    return _text(file.getvalue())


# ------------------------------------------------------------ reading


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
        raise TypeError(f"{name} is no dtype")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).reshape(shape)


def _read_array(text: str) -> np.ndarray[Any, Any]:
    file = io.BytesIO(_bytes(text))
    array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False, max_header_size=len(text))
    if file.read(1):
        raise ValueError(f"behind an array of {array.nbytes} bytes lies more")
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


CHECK = "check"
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def with_checksum(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with its checksum, in place of one that it may have."""
    return {**state, CHECK: _checksum(state)}


def check_checksum(state: Mapping[str, Any]) -> None:
    """Returns if a state is what it was when it was saved.

    Raises:
        StateMismatch: it is not.
    """
    expected = _checksum(state)
    if type(state.get(CHECK)) is not int or state[CHECK] != expected:
        raise StateMismatch(
            f"the state is damaged or was changed by hand: its checksum is {expected}, it says {state.get(CHECK)!r}. Load what "
            "state_dict() returned, of an earlier checkpoint if this one's file is damaged"
        )


def _checksum(state: Mapping[str, Any]) -> int:
    try:
        return zlib.crc32(_canonical({name: value for name, value in state.items() if name != CHECK}).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise StateMismatch(f"a state is JSON, and this is not: {error}. Load what state_dict() returned") from error


STATE_VERSION = 1


class State(TypedDict):
    """The fields of a state; numbers are Python ints."""

    version: int  # of this format
    schedule: int  # version of the order
    mode: str  # "seed"
    seed: int
    epoch: int
    position: int  # samples of the epoch consumed by all ranks; batches where the order makes the batches
    n: int  # 0 where each epoch has its own: then `children` names it
    global_batch: int  # 0 where the order makes the batches
    shuffle: bool
    uneven: str  # what happens to the rest: "pad", "drop" or "exact"
    check: int  # state.py
    order: NotRequired[str]  # which order it is, where it is not the plain one
    counters: NotRequired[list[int]]  # a mixture's draws so far, per member
    children: NotRequired[dict[str, Any]]  # states of members


_KINDS: dict[str, tuple[type, ...]] = {name: (get_origin(kind) or kind,) for name, kind in get_type_hints(State).items()}


def check_head(state: object, mode: str, version: int, remedy: str) -> Mapping[Any, Any]:
    """The state, if it is one of that mode, and of no newer version.

    Raises:
        StateMismatch: it is not.
    """
    if not isinstance(state, Mapping):
        raise StateMismatch(f"a state is a dict as state_dict() returns it, got {type(state).__name__}")
    if (saved := state.get("mode", mode)) != mode:
        raise StateMismatch(f"this state is of mode {saved!r}, the loader is in mode {mode!r}: {remedy}")
    if isinstance(found := state.get("version"), int) and found > version:
        raise StateMismatch(f"this state has format version {found}, this shmload reads up to {version}: install a newer one")
    return state


def faults_in(
    state: Mapping[Any, Any], kinds: Mapping[str, tuple[type, ...]], *, optional: Collection[str] = (), signed: Collection[str] = ()
) -> list[str]:
    """What is wrong with the fields of a state, for people.

    Args:
        kinds: by name, the types that a field may have. Whole numbers are 0 or more; lists hold such, or dicts.
        optional: names that may be missing.
        signed: names of numbers that may be negative.
    """
    faults = [f"{name} is missing" for name in sorted(kinds.keys() - {*optional, *state})]
    for name, value in state.items():
        if name not in kinds:
            faults.append(f"{name} is unknown")
        elif type(value) not in kinds[name]:
            faults.append(f"{name} must be {kinds[name][0].__name__}, it is {value!r:.100}")
        elif type(value) is int and value < 0 and name not in signed:
            faults.append(f"{name} must not be negative, it is {value}")
        elif type(value) is list and not all(type(each) is dict or (type(each) is int and each >= 0) for each in value):
            faults.append(f"{name} is {value!r:.100}")
    return faults


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which fields a state does not have as they are now, for people."""
    return [f"{name}: saved {saved.get(name)!r}, now {value!r}" for name, value in now.items() if saved.get(name) != value]


def make_state(schedule: Schedule | BatchSchedule, *, epoch: int, step: int, children: Mapping[str, Any] | None = None) -> State:
    """The state of a run that goes on at (epoch, step); `step` may be `num_steps`, the epoch's end."""
    state: dict[str, Any] = {
        "version": STATE_VERSION,
        **_identity(schedule),
        "epoch": int(epoch),
        "position": int(schedule.position(step)),
    }
    counters = schedule.counters(epoch, step)
    if counters is not None:
        state["counters"] = counters
    if children is not None:
        state["children"] = dict(children)
    return cast(State, with_checksum(state))


def check_state(state: object) -> State:
    """`state` itself, if it has the fields of a state and they can be read.

    Raises:
        StateMismatch: it is no state of a seeded run, or one of a newer format, or damaged; every fault is named.
    """
    head = check_head(state, "seed", STATE_VERSION, "build the loader as it was at saving")
    faults = faults_in(head, _KINDS, optional=State.__optional_keys__)
    if faults:
        raise StateMismatch(f"this is no state of a seeded run: {'; '.join(faults)}. Load what state_dict() returned")
    check_checksum(head)
    return cast(State, head)


def compare_state(state: State, schedule: Schedule | BatchSchedule) -> None:
    """Return if `state` was saved under the order that `schedule` makes, whatever the number of ranks.

    Raises:
        StateMismatch: it was not; every field that differs is named with both values.
    """
    now = _identity(schedule)
    if not (differing := differences(state, {**now, "order": now.get("order")})):
        return
    remedy = "build the loader with the saved values, or start a new run without this state"
    if isinstance(schedule, Schedule) and 0 != state["global_batch"] != schedule.global_batch:
        remedy += (
            f"; global_batch is batch_size * world_size, here {schedule.batch_size} * {schedule.world_size}: "
            "change both together and it stays"
        )
    raise StateMismatch(f"the state belongs to another order: {'; '.join(differing)}. Remedy: {remedy}")


def resume(state: object, schedule: Schedule | BatchSchedule) -> tuple[int, int]:
    """Where a run goes on: (epoch, step) under `schedule`, which may have another world size.

    A state saved at an epoch's end gives step == num_steps of that epoch.

    Raises:
        StateMismatch: `state` is none, belongs to another order, or stands between two steps.
    """
    checked = check_state(state)
    compare_state(checked, schedule)
    try:
        step = schedule.step_at(checked["position"])
    except ValueError as error:
        raise StateMismatch(f"the state's position fits no step: {error}") from error
    if isinstance(schedule.order, KeyedOrder) and "counters" in checked:
        schedule.order.go_on_at(checked["position"], checked["counters"], epoch=checked["epoch"])
    return checked["epoch"], step


def _identity(schedule: Schedule | BatchSchedule) -> dict[str, Any]:
    """The fields that say which order it is."""
    identity = {
        "schedule": schedule.version,
        "mode": "seed",
        "seed": schedule.seed,
        "n": schedule.n,
        "global_batch": schedule.global_batch,
        "shuffle": schedule.shuffle,
        "uneven": schedule.rest_rule,
    }
    return identity if schedule.order is None else {**identity, "order": schedule.order.identity}
