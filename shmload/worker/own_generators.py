"""Find the random generators inside a dataset, and reseed them before each sample, like the global generators.

Augmentations own generators: albumentations' pipelines, MONAI's transforms, a user's `rng` attribute. In seed mode, each of them
starts every sample at a stream keyed by (seed, epoch, index, path of the generator), so its numbers do not depend on the worker.
The state is set in place: other references to the generator stay valid. Without workers, the generators are the trainer's own
objects, and keep the state that the last sample left, as with torch's loader.

The search covers the dataset and its `collate_fn` (whose draws continue from the state that the last sample of the batch left),
their attributes, generators among the attributes of their classes, items of lists, tuples and dicts, arguments of partial
functions, closures of functions, and objects of bound methods. It visits the first fifty items of a container, and two thousand
objects in all. The path of a generator is the shortest one to it, and the first by name if there are several. So it is the same
in every worker, for every start method, in every run.

Not covered are generators made while a sample is read (except those that replace another in the same attribute), and generators in
global variables of modules or inside compiled objects. When a loader is constructed, it names the generators that were found and
cannot be seeded: a SystemRandom, a generator of a GPU, one of an unknown kind, and one in a set, because a set has no order.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import random
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import numpy as np

from shmload._core.twister import rekey_philox, reseed_congruences, reseed_pythons, sample_words, seeded
from shmload.worker.generator_set import OF_PROCESS
from shmload.worker.reseeding import python_offset

OBJECTS_MAX = 2000  # objects visited before the search ends, because a dataset may hold millions
ITEMS_MAX = 50  # items visited in one container; lists of transforms are short
_NUMPYS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), np.ndarray, np.generic, type, types.ModuleType)
_METHODS = (types.MethodType, types.BuiltinMethodType)  # the second for `random.Random(1).random`, which is compiled
_NO_ORDER = "{}"  # in the path of an item of a set
_ZEROS = np.zeros(4, np.uint64)
Words = tuple[int, int, int, int]


class OwnGenerators:
    """The generators inside one loader's dataset and collate_fn, in one process.

    It is false if no generator can be seeded.

    Args:
        dataset: the dataset.
        collate_fn: the user's function, or None.

    Attributes:
        unreachable: paths of the generators that cannot be seeded, like ["dataset.transform.rng"].
    """

    unreachable: list[str]

    def __init__(self, dataset: Any, collate_fn: Any = None) -> None:
        self._roots: dict[str, Any] = {"dataset": dataset, "collate_fn": collate_fn}
        self._look()

    def __bool__(self) -> bool:
        """Return whether any generator can be seeded."""
        return bool(self._all)

    def _look(self) -> None:
        """Search for the generators, at construction and again after one was replaced."""
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        self._puts: list[tuple[Callable[[Words], None], int]] = []
        self._pythons: list[random.Random] = []
        self._python_streams: list[int] = []
        self._congruences: list[tuple[int, int]] = []
        self._congruence_streams: list[int] = []
        self._all: list[Any] = []  # keeps the generators alive as long as their addresses are used
        self.unreachable = []
        offset = python_offset()
        for path, generator, holder, name in _found(self._roots):
            put = None if _NO_ORDER in path else _put_of(generator)
            if put is None:
                self.unreachable.append(path)
                continue
            self._all.append(generator)
            if type(holder) is dict:
                self._places.append((holder, name, generator))
            if type(generator) is random.Random and offset:
                self._pythons.append(generator)
                self._python_streams.append(_stream(path))
            elif isinstance(generator, (np.random.Generator, np.random.BitGenerator)) and (place := _pcg64_addresses(generator)):
                self._congruences.append(place)
                self._congruence_streams.append(_stream(path))
            else:
                self._puts.append((put, _stream(path)))

    def begin(self, seed: int, epoch: int, index: int) -> None:
        """Set each generator to the start of its stream for this sample."""
        for holder, name, generator in self._places:
            if holder.get(name) is not generator:
                self._look()
                break
        if self._pythons:
            reseed_pythons(seed, epoch, index, self._pythons, self._python_streams, python_offset())
        if self._congruences:
            reseed_congruences(seed, epoch, index, self._congruences, self._congruence_streams)
        for put, stream in self._puts:
            put(sample_words(seed, epoch, index, stream))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators after the block."""
        restore = self.present()
        try:
            yield
        finally:
            restore()

    def present(self) -> Callable[[], None]:
        """Return a function that gives all generators the states that they have now."""
        restores = [_restorer_of(generator) for generator in self._all]

        def restore() -> None:
            for each in restores:
                each()

        return restore

    def states(self) -> list[Any]:
        """Return the states of all generators, in a form that can be compared."""
        return [_state_of(generator) for generator in self._all]


def make_generator_of(collate_fn: Any) -> None:
    """Let a collator of transformers make its generator, so that it can be found. It would make it in its first call."""
    seed, make = getattr(collate_fn, "seed", None), getattr(collate_fn, "get_generator", None)
    if seed and make is not None and getattr(collate_fn, "generator", seed) is None:
        collate_fn.generator = make(seed)


def separate(dataset: Any, collate_fn: Any) -> tuple[Any, Any]:
    """Return copies of a dataset and its collate_fn with generators of their own, which share everything else with the originals.

    Only the generators, and the objects on the way to them, are copied, by `copy.deepcopy`. So threads that share a dataset do not
    draw from one generator.

    Raises:
        ValueError: a generator cannot be copied, because it is in a closure or an attribute of a class, for example.
    """
    roots = dataset, collate_fn
    parts, owners, generators = _graph(roots)
    if not generators:
        return roots
    on_the_way = set(generators)
    pending = list(generators)
    while pending:
        new = owners.get(pending.pop(), set()) - on_the_way
        on_the_way |= new
        pending += new
    near = list(chain(roots, *(parts.get(owner, ()) for owner in on_the_way)))
    shared = {id(part): part for part in near if id(part) not in on_the_way}
    memo = dict(shared)
    compiled = [part for part in near if id(part) in on_the_way and isinstance(part, types.BuiltinMethodType)]
    copies: tuple[Any, Any] = copy.deepcopy(roots, memo)
    if compiled:  # deepcopy takes them for plain functions
        others = {id(part): getattr(copy.deepcopy(part.__self__, memo), part.__name__) for part in compiled}
        _put(copies, others, set(shared))
    found = _found({"dataset": copies[0], "collate_fn": copies[1]})
    if left := [path for path, generator, _, _ in found if id(generator) in generators]:
        raise ValueError(", ".join(left))
    return copies


def _put(roots: Iterable[Any], others: dict[int, Any], shared: set[int]) -> None:
    """Replace objects in lists, dicts, attributes and partial functions, and in tuples within these.

    Args:
        roots: where to begin.
        others: the new objects, by the ids of those that they replace.
        shared: ids of objects that must not change.
    """
    torch = sys.modules.get("torch")
    kinds, seen = _kinds()
    skipped = (*_ATOMS, *kinds, types.FunctionType, *((torch.Tensor,) if torch else ()))
    seen |= shared
    seen_max = len(seen) + OBJECTS_MAX

    def new(part: Any) -> Any:
        if type(part) is tuple:
            return tuple(map(new, part)) if any(new(each) is not each for each in part) else part
        return others.get(id(part), part)

    level = list(roots)
    while level and len(seen) < seen_max:
        below: list[Any] = []
        for value in level:
            if isinstance(value, skipped) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, functools.partial):
                keywords = {key: new(part) for key, part in value.keywords.items()}
                value.__setstate__(  # type: ignore[attr-defined]  # which pickle calls
                    (new(value.func), new(value.args), keywords, value.__dict__)
                )
            if isinstance(value, list):
                value[:] = map(new, value)
            for holder in () if isinstance(value, _METHODS) else (value, getattr(value, "__dict__", None)):
                if isinstance(holder, dict):
                    holder.update({key: new(part) for key, part in holder.items() if new(part) is not part})
            below += [part for _, part, _, _ in _parts_of(value, kinds)]
        level = below


def _graph(roots: Iterable[Any]) -> tuple[dict[int, list[Any]], dict[int, set[int]], dict[int, Any]]:
    """Return the parts of each object by its id, the ids of the objects that have it as a part, and the generators."""
    torch = sys.modules.get("torch")
    kinds, seen = _kinds()
    parts: dict[int, list[Any]] = {}
    owners: dict[int, set[int]] = {}
    generators: dict[int, Any] = {}
    level = list(roots)
    while level and len(parts) < OBJECTS_MAX:
        below: list[Any] = []
        for value in level:
            if id(value) in seen or isinstance(value, _ATOMS):
                continue
            seen.add(id(value))
            if isinstance(value, kinds):
                generators[id(value)] = value
                continue
            is_tensor = torch is not None and isinstance(value, torch.Tensor)
            parts[id(value)] = own = [] if is_tensor else [part for _, part, _, _ in _parts_of(value, kinds)]
            for part in own:
                owners.setdefault(id(part), set()).add(id(value))
            below += own
        level = below
    return parts, owners, generators


def _kinds() -> tuple[tuple[type, ...], set[int]]:
    """Return the classes of generators, and the ids of the global ones."""
    torch = sys.modules.get("torch")
    globals_own = (OF_PROCESS.python, OF_PROCESS.numpy, OF_PROCESS.numpys_bits, torch and torch.default_generator)
    return (random.Random, *_NUMPYS, *((torch.Generator,) if torch else ())), set(map(id, globals_own))


def _stream(path: str) -> int:
    """Return the number of the stream of sample keys for the generator at `path`."""
    return int.from_bytes(hashlib.blake2b(path.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _found(roots: dict[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (path, generator, the container that holds it, its name there) for each generator."""
    torch = sys.modules.get("torch")
    kinds, seen = _kinds()
    level: list[tuple[str, Any, Any, str]] = [(name, root, None, "") for name, root in roots.items()]
    num_looked_at = 0
    while level:
        parts: list[tuple[str, Any, Any, str]] = []
        for path, value, holder, name in sorted(level, key=lambda one: one[0]):
            if id(value) in seen or isinstance(value, _ATOMS):
                continue
            seen.add(id(value))
            if isinstance(value, kinds):
                yield path, value, holder, name
                continue
            num_looked_at += 1
            if num_looked_at > OBJECTS_MAX:
                return
            if torch is None or not isinstance(value, torch.Tensor):
                parts += ((path + step, part, within, key) for step, part, within, key in _parts_of(value, kinds))
        level = parts


def _parts_of(value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (step of the path, part, the dict that holds it or None, its key there) for each part of an object.

    Args:
        value: the object.
        kinds: classes of generators.
    """
    if isinstance(value, dict):
        for number, (key, part) in enumerate(islice(list(value.items()), ITEMS_MAX)):
            yield f"[{key!r}]" if isinstance(key, (str, int)) else f"[{number}.]", part, value, key
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part, None, "") for i, part in enumerate(islice(value, ITEMS_MAX)))
    elif isinstance(value, (set, frozenset)):
        yield from ((_NO_ORDER, part, None, "") for part in islice(value, ITEMS_MAX))
    elif isinstance(value, _METHODS):
        yield ".__self__", value.__self__, None, ""
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f".{name}", cell.cell_contents, None, ""
            except ValueError:  # the cell is still empty
                continue
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        yield from ((f".__defaults__[{i}]", part, None, "") for i, part in enumerate(defaults))
    else:
        if isinstance(value, functools.partial):
            yield from ((".func", value.func, None, ""), (".args", value.args, None, ""), (".keywords", value.keywords, None, ""))
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield from ((f".{name}", part, own, name) for name, part in list(own.items()))
        yield from ((f".{name}", part, None, "") for name, part in _of_classes(value, kinds) if name not in (own or ()))


def _of_classes(value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (name, part) for each slot of an object, and for each generator among the attributes of its classes."""
    for kind in type(value).__mro__[:-1]:  # the last one, `object`, has none
        for name, part in list(vars(kind).items()):
            if isinstance(part, types.MemberDescriptorType) and hasattr(value, name):
                yield name, getattr(value, name)
            elif isinstance(part, kinds):
                yield name, part


def _put_of(generator: Any) -> Callable[[Words], None] | None:
    """Return a function that sets a generator's state from words; None if it cannot be set."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return lambda words: generator.seed(words[0])
    if isinstance(generator, np.random.RandomState):
        if isinstance(_bits_of(generator), np.random.MT19937):
            return lambda words: generator.seed(words[0] & 0xFFFFFFFF)
        states = _STATES.get(type(_bits_of(generator)))
        return None if states is None else lambda words: generator.set_state(states(words))  # also discards a gaussian
    if isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        bits: Any = _bits_of(generator)
        state_of = _STATES.get(type(bits))
        return None if state_of is None else lambda words: setattr(bits, "state", state_of(words))
    if generator.device.type == "cpu":
        return lambda words: generator.manual_seed(words[0])
    return None


def _bits_of(generator: Any) -> Any:
    """Return a numpy generator's bit generator, which may be the generator itself."""
    return (
        generator
        if isinstance(generator, np.random.BitGenerator)
        else getattr(generator, "bit_generator", generator._bit_generator)
    )


def _pcg64_addresses(generator: Any) -> tuple[int, int] | None:
    """Return the addresses of a PCG64's state and of its buffered half word; None if unknown. numpy's default is PCG64."""
    bits = _bits_of(generator)
    return _pcg64_place(bits) if type(bits) is np.random.PCG64 and _knows_pcg64() else None


def _pcg64_place(bits: np.random.PCG64) -> tuple[int, int] | None:
    """Return the addresses for `_pcg64_addresses`, untested.

    At `state_address` is a pointer to the state, in the same object; after the pointer comes the half word.
    """
    first, end = id(bits), id(bits) + type(bits).__basicsize__
    address: Any = bits.ctypes.state_address
    if not first <= address <= end - 16:
        return None
    (place,) = struct.unpack("<Q", ctypes.string_at(address, 8))
    return (place, address + 8) if first <= place <= end - 32 else None


@functools.cache
def _knows_pcg64() -> bool:
    """Return whether writing to the presumed addresses of a PCG64 sets its state."""
    bits = np.random.PCG64(1)
    place = _pcg64_place(bits) if sys.implementation.name == "cpython" else None
    expected = bits.state["state"]
    if place is None or ctypes.string_at(place[0], 32) != b"".join(
        int(expected[n]).to_bytes(16, "little") for n in ("state", "inc")
    ):
        return False
    np.random.Generator(bits).integers(9, dtype=np.uint32)  # buffers half a word
    reseed_congruences(1, 2, 3, [place], [4])
    return bits.state == _STATES[np.random.PCG64](sample_words(1, 2, 3, 4))


@functools.cache
def _knows_philox() -> bool:
    """Return whether writing to the presumed address of a Philox sets its state."""
    bits = np.random.Philox(1)
    place = _philox_place(bits) if sys.implementation.name == "cpython" else 0
    if not place:
        return False
    (key,) = struct.unpack("<Q", ctypes.string_at(place + 8, 8))
    if ctypes.string_at(key, 16) != bits.state["state"]["key"].tobytes():
        return False
    np.random.Generator(bits).integers(9, size=3, dtype=np.uint32)  # moves the counter, fills the buffer and keeps half a word
    rekey_philox(place, 2, 3)
    return repr(bits.state) == repr(np.random.Philox(key=np.array([2, 3], np.uint64)).state)


def _philox_place(bits: np.random.Philox) -> int:
    """Return numpy's `state_address` for `rekey_philox`, untested; 0 if the pointers there lead out of the object."""
    first, end = id(bits), id(bits) + type(bits).__basicsize__
    place: Any = bits.ctypes.state_address
    if not first <= place <= end - 64:
        return 0
    return int(place) if all(first <= each <= end - 32 for each in struct.unpack("<2Q", ctypes.string_at(place, 16))) else 0


def philox_place(bits: np.random.Philox) -> int:
    """Return the address of a Philox's state for `rekey_philox`; 0 if it is not known."""
    return _philox_place(bits) if _knows_philox() else 0


def _state_of(generator: Any) -> Any:
    """Return the state of a generator, in a form that can be compared."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False))
    if isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        return repr(_bits_of(generator).state)
    return generator.get_state().numpy().tobytes()


def _restorer_of(generator: Any) -> Callable[[], Any]:
    """Return a function that gives a generator its present state."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        bits = _bits_of(generator)
        return functools.partial(setattr, bits, "state", bits.state)
    return functools.partial(generator.set_state, generator.get_state())  # of a RandomState or of torch


def _of_pcg64(name: str) -> Callable[[Words], dict[str, Any]]:
    def state_of(words: Words) -> dict[str, Any]:
        state = {"state": words[0] << 64 | words[1], "inc": words[2] << 64 | words[3] | 1}  # inc must be odd
        return {"bit_generator": name, "state": state, "has_uint32": 0, "uinteger": 0}

    return state_of


def _philox(words: Words) -> dict[str, Any]:
    state = {"counter": _ZEROS, "key": np.array(words[:2], np.uint64)}
    return {"bit_generator": "Philox", "state": state, "buffer": _ZEROS, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}


def _sfc(words: Words) -> dict[str, Any]:
    return {
        "bit_generator": "SFC64",
        "state": {"state": np.array([*words[:3], 1], np.uint64)},  # the last word is a counter
        "has_uint32": 0,
        "uinteger": 0,
    }


def _twister(words: Words) -> dict[str, Any]:
    ((_, plain),) = seeded([words[0]])
    return {"bit_generator": "MT19937", "state": {"key": np.frombuffer(plain, np.uint32), "pos": 624}}


_STATES: dict[type, Callable[[Words], dict[str, Any]]] = {
    np.random.PCG64: _of_pcg64("PCG64"),
    np.random.PCG64DXSM: _of_pcg64("PCG64DXSM"),
    np.random.Philox: _philox,
    np.random.SFC64: _sfc,
    np.random.MT19937: _twister,
}
