"""The expected batches, computed without the engine's code.

Values: the samples themselves and torch's `default_collate`; where torch refuses samples, the rules of docs/batches.md in a few
lines of Python. Order and draws: in torch mode, torch's own DataLoader over the indices; in seed mode, one rank without workers
gives the row of an epoch's samples, and this module computes how ranks divide it and what happens to the rest.
"""

from __future__ import annotations

import hashlib
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from tests.crossing.cases import BY_BATCH, IN_PLACE, Case
from tests.crossing.datasets import COLLATE, FileFloat, FileInt, bad_indices, delivered, many_of, size_of
from tests.crossing.options import order_of, ragged_option
from tests.crossing.values import Encoding

END = "the end"
SKIPPED = object()  # a batch that delivers nothing


@dataclass(frozen=True)
class Fails:
    """An expected error in place of a batch."""

    kind: str


# ------------------------------------------------------------ a batch of samples


class Collated:
    """Batches as docs/batches.md describes them."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._asked = ragged_option(case)
        declares = case.kind in (*IN_PLACE, "tfrecord", "tar", "remote", "parquet", "growing", "hf")
        self._declared = {"v", "v.npy"} if declares else {"image"} if case.kind == "images" else set()
        self._has_schema = declares or case.kind in ("arrays", "npy", "hdf5", "zarr", "safetensors", "tokens", "images")

    def batch(self, samples: list[Any]) -> Any:
        """Returns the expected batch of these samples."""
        case = self._case
        if case.collate:
            return COLLATE[case.collate](samples)
        has_ragged = case.kind == "images" or bool(set(case.fields) & set("vw"))
        has_lists = case.kind == "nested" or bool(set(case.fields) & set("lLN"))
        is_bare = self._asked is None or (self._asked == "list" and not has_lists)
        if is_bare and not has_ragged:
            try:
                with torch.no_grad():
                    return default_collate(samples)
            except (TypeError, RuntimeError):
                if not case.is_seeded and self._asked is None and not self._has_schema:
                    raise
        elif not case.is_seeded and self._asked is None and not self._has_schema:
            return default_collate(samples)
        if case.kind == "tensordataset":
            return default_collate(samples)
        return self._column(samples, "", is_field=False)

    def _mode(self, name: str, value: Any) -> str | None:
        if isinstance(self._asked, dict):
            return self._asked.get(name, "list" if name in self._declared else None)
        if name in self._declared:
            return self._asked or "list"
        if self._asked in (None, "list") or (self._has_schema and self._declared & set(self._names())):
            return None
        if self._has_schema:
            return None
        return self._asked if np.ndim(value) >= 1 else None

    def _has_rows(self, name: str) -> bool:
        """Returns whether lists in a field are rows and not containers."""
        return name in self._asked if isinstance(self._asked, dict) else self._asked is not None

    def _names(self) -> set[str]:
        return {f"{name}.npy" if self._case.kind in ("tar", "remote") else name for name in self._case.fields}

    def _column(self, values: Sequence[Any], name: str, *, is_field: bool = True) -> Any:
        head = values[0]
        kinds = set(map(type, values))
        if all(isinstance(value, (int, float, np.number, np.bool_)) for value in values):
            return default_collate(values)
        if len(kinds) > 1 or head is None or isinstance(head, (set, str, bytes)):
            return Column(values)
        if isinstance(head, dict):
            return {key: self._column([value[key] for value in values], key) for key in head}
        if isinstance(head, Encoding):
            return Encoding({key: self._column([value[key] for value in values], key) for key in head}, head.origin)
        if isinstance(head, tuple) and hasattr(head, "_fields"):
            return type(head)(*(self._column(v, n) for n, v in zip(head._fields, zip(*values, strict=True), strict=True)))
        if isinstance(head, list) and self._has_rows(name):
            if all(type(number) in (int, float) for value in values for number in value):
                dtype = np.float64 if any(type(number) is float for value in values for number in value) else np.int64
                return self._arrays([np.array(value, dtype) for value in values], name)
            if is_field:
                return Column(values)
        if isinstance(head, (tuple, list)):
            return [self._column(column, name) for column in zip(*values, strict=True)]
        if hasattr(head, "__dataclass_fields__"):
            names = [field.name for field in fields_of(head)]
            return type(head)(*(self._column([getattr(value, n) for value in values], n) for n in names))
        if isinstance(head, (np.ndarray, torch.Tensor)):
            return self._arrays(values, name)
        return default_collate(values)

    def _arrays(self, values: Sequence[Any], name: str) -> Any:
        if isinstance(values[0], torch.Tensor) and values[0].layout != torch.strided:
            return Column(values)
        rows = [torch.as_tensor(value) for value in values]
        mode = self._mode(name, rows[0])
        if mode is None:
            if len({row.shape for row in rows}) == 1:
                with torch.no_grad():
                    return torch.stack(rows)
            return Rows(rows)
        if mode == "list":
            return Rows(rows)
        lengths = torch.tensor([len(row) for row in rows])
        if mode == "pad":
            whole = torch.zeros(len(rows), int(lengths.max()), dtype=rows[0].dtype)
            for place, row in zip(whole, rows, strict=True):
                place[: len(row)] = row
            return ("Padded", whole, lengths)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return ("Jagged" if mode == "jagged" else "nested", torch.cat(rows), offsets)

    def single(self, sample: Any) -> Any:
        """Returns the expected sample of a loader without batching."""
        return default_convert(sample)


class Column(list[Any]):
    """Values that are not stacked: a list, or a tuple where torch transposes tuples."""


class Rows(list[Any]):
    """Ragged rows: a list of tensors, or a single tensor if the rows happen to have equal shapes."""


# ------------------------------------------------------------ comparing


def difference(expected: Any, got: Any, where: str = "batch") -> str:
    """Returns a description of the first difference, or an empty string."""
    if isinstance(expected, Rows):
        if isinstance(got, torch.Tensor) and len({row.shape for row in expected}) > 1:
            return f"{where}: one tensor, although rows differ in shape"
        if not isinstance(got, (list, torch.Tensor)) or len(got) != len(expected):
            return f"{where}: {_describe(got)} instead of {len(expected)} rows"
        return _first(
            difference(row, other, f"{where}[{number}]") for number, (row, other) in enumerate(zip(expected, got, strict=True))
        )
    if isinstance(expected, tuple) and expected and isinstance(expected[0], str) and expected[0] in ("Padded", "Jagged", "nested"):
        return _ragged_difference(expected, got, where)
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(expected, got, where)
    if isinstance(expected, Column):
        expected = type(got)(expected) if isinstance(got, (list, tuple)) else list(expected)
    if isinstance(expected, (FileInt, FileFloat)):  # formats return numbers as numpy scalars or zero-dimensional arrays
        is_same = np.ndim(got) == 0 and not isinstance(got, str) and type(expected)(got) == expected
        return "" if is_same else f"{where}: {_describe(got)} instead of {_describe(expected)}"
    if type(expected) is not type(got):
        return f"{where}: {_describe(got)} instead of {_describe(expected)}"
    if isinstance(expected, np.ndarray):
        is_same = expected.dtype == got.dtype and expected.shape == got.shape and np.array_equal(expected, got)
        return "" if is_same else f"{where}: {_describe(got)} instead of {_describe(expected)}"
    if isinstance(expected, Encoding) and expected.origin != got.origin:
        return f"{where}: of {got.origin!r} instead of {expected.origin!r}"
    if isinstance(expected, dict | Encoding):
        if list(expected) != list(got):
            return f"{where}: the keys {list(got)} instead of {list(expected)}"
        return _first(difference(value, got[key], f"{where}[{key!r}]") for key, value in expected.items())
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(got):
            return f"{where}: {len(got)} instead of {len(expected)}: {_describe(got)}"
        return _first(difference(a, b, f"{where}[{number}]") for number, (a, b) in enumerate(zip(expected, got, strict=True)))
    if hasattr(expected, "__dataclass_fields__"):
        return _first(difference(getattr(expected, f.name), getattr(got, f.name), f"{where}.{f.name}") for f in fields_of(expected))
    return "" if expected == got else f"{where}: {_describe(got)} instead of {_describe(expected)}"


def _first(found: Iterator[str]) -> str:
    return next((one for one in found if one), "")


def _tensor_difference(expected: Any, got: Any, where: str) -> str:
    if not isinstance(got, torch.Tensor):
        return f"{where}: {_describe(got)} instead of {_describe(expected)}"
    if (expected.dtype, expected.shape, expected.layout) != (got.dtype, got.shape, got.layout):
        return f"{where}: {_describe(got)} instead of {_describe(expected)}"
    with torch.no_grad():
        a, b = expected.detach(), got.detach()
        if a.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        a, b = (t.as_subclass(torch.Tensor) for t in (a, b))
        return "" if torch.equal(a, b) else f"{where}: {_describe(b)} instead of {_describe(a)}"


def _ragged_difference(expected: tuple[Any, ...], got: Any, where: str) -> str:
    kind, values, others = expected
    if kind == "nested":
        if not (isinstance(got, torch.Tensor) and got.is_nested):
            return f"{where}: {_describe(got)} instead of a nested tensor"
        return difference(values, got.values(), f"{where}.values()") or difference(others, got.offsets(), f"{where}.offsets()")
    if type(got).__name__ != kind:
        return f"{where}: {_describe(got)} instead of {kind}"
    return difference(values, got[0], f"{where}.values") or difference(others, got[1], f"{where}[1]")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "a nested tensor"
        return f"{str(value.dtype)[6:]}{list(value.shape)} {str(value.detach().flatten()[:6].tolist()) if value.layout == torch.strided else value.layout}"
    return f"{type(value).__name__} {str(value)[:100]}"


# ------------------------------------------------------------ which samples come when


def own_draws(case: Case, epoch: int, index: int) -> list[float]:
    """Returns the draws of a sample from its dataset's generators, by numpy's Philox, which increments before it draws."""
    way = {"": "dataset", "subset": "dataset.dataset", "concat": "dataset.datasets[0].dataset"}[case.wrap]
    outer = (case.n - 1 - index) // 2 if case.wrap == "subset" else index

    def words(name: str) -> Any:
        stream = int.from_bytes(hashlib.blake2b(f"{way}.own.{name}".encode(), digest_size=8).digest(), "little")
        counter = (outer | epoch << 64 | stream << 128 | 2 << 192) - 1
        return np.random.Philox(key=[case.seed, 0], counter=counter).random_raw(4).tolist()

    a, b, c, d = words("numpy")
    bits = np.random.PCG64()
    bits.state = {**bits.state, "state": {"state": a << 64 | b, "inc": c << 64 | d | 1}}
    generator = torch.Generator().manual_seed(words("torch")[0])
    return [
        random.Random(words("python")[0]).random(),
        float(np.random.Generator(bits).random()),
        float(torch.rand((), generator=generator)),
    ]


class SeedOrder:
    """Epochs in seed mode: rows of (index, draws), and how ranks divide them."""

    def __init__(self, case: Case, made: Any) -> None:
        self._case = case
        self._made = made
        self._epochs: dict[int, list[list[Any]]] = {}

    def _row(self, epoch: int) -> list[list[Any]]:
        """Returns the epoch's batches of all ranks, read by one rank without workers."""
        if epoch not in self._epochs:
            from shmload import ShmLoader

            case = self._case
            options = order_of(replace(case, keys=""))  # the samples of an index are the same, whatever the type of the key
            if hasattr(options.get("sampler"), "set_epoch"):
                options["sampler"].set_epoch(epoch)
            if "batch_size" in options:
                options["batch_size"] = 1
            substitutes = case.bad and case.on_error == "substitute"
            readable = case if substitutes else _with_all_readable(case)
            keys = type(self._made)(readable, self._made.folder) if case.kind != "growing" else self._made
            loader: Any = ShmLoader(
                keys.keys(),
                **options,
                seed=case.seed,
                uneven="exact",
                collate_fn=None if case.kind == "growing" else COLLATE["list"],
                **({"on_error": "substitute"} if substitutes else {}),
            )
            loader.set_epoch(epoch)
            rows = [_keys(case, batch) for batch in loader]
            loader.close()
            self._epochs[epoch] = rows
            self._check(rows, epoch)
        return self._epochs[epoch]

    def _check(self, rows: list[list[Any]], epoch: int) -> None:
        """Checks that the order has each sample exactly once, unless the order may repeat samples."""
        case = self._case
        if case.keeps:
            for index, drawn in (key for row in rows for key in row):
                if drawn != (expected := own_draws(case, epoch, index)):
                    raise AssertionError(
                        f"epoch {epoch}: sample {index} draws {drawn} from its dataset's generators instead of {expected}"
                    )
        if case.order in ("weighted", "sampler", "batch_sampler") or case.kind == "mix" or case.on_error == "substitute":
            return
        found = sorted(index for row in rows for index, _ in row)
        expected = sorted(range(case.n - 1, -1, -2)) if case.wrap == "subset" else list(range(size_of(case)))
        if found != expected:
            raise AssertionError(f"epoch {epoch} has {found} instead of each of {len(expected)} samples once")

    def steps(self, epoch: int, ranks: int, batch_size: int | None) -> list[list[list[Any] | None]]:
        """Returns for each step what each rank gets: the keys of its samples, or None for no batch."""
        case = self._case
        rows = self._row(epoch)
        if case.order in BY_BATCH:
            if case.order == "batch_sampler":
                return [[row] for row in rows]
            steps = [list(rows[first : first + ranks]) for first in range(0, len(rows), ranks)]
            if steps and len(steps[-1]) < ranks:
                if case.uneven == "drop":
                    steps.pop()
                elif case.uneven == "pad":
                    steps[-1] += [rows[at % len(rows)] for at in range(ranks - len(steps[-1]))]
                else:
                    steps[-1] += [None] * (ranks - len(steps[-1]))
            return steps
        flat = [row[0] for row in rows]
        size = batch_size or 1
        stride = size * ranks
        result: list[list[list[Any] | None]] = []
        for first in range(0, len(flat), stride):
            part, each = flat[first : first + stride], size
            if len(part) < stride:
                if case.drop_last or (case.uneven == "drop" and case.order != "sampler"):
                    break
                if case.uneven == "exact" or case.order == "sampler":
                    dealt = np.array_split(np.arange(len(part)), ranks)
                    result.append([[part[at] for at in mine] or None for mine in dealt])
                    break
                each = -(-len(part) // ranks)
                part = part + [flat[at % len(flat)] for at in range(each * ranks - len(part))]
            result.append([part[rank * each : (rank + 1) * each] for rank in range(ranks)])
        return result


def _with_all_readable(case: Case) -> Case:
    return replace(case, bad=0)


def _keys(case: Case, batch: Any) -> list[Any]:
    """Returns (index, draws) of each row of a reference batch."""
    if case.kind == "growing":
        return [(int(index), None) for index in batch["i"]]
    return list(batch) if isinstance(batch, list) else [batch]


class Expected:
    """Maps keys to what must be delivered."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._collated = Collated(case)
        self._bad = bad_indices(case) if case.bad else set()

    def of(self, keys: Any) -> Any:
        """Returns a batch, or an error, or SKIPPED if every sample is left out and nothing is delivered."""
        case = self._case
        if isinstance(keys, Fails):
            return keys
        if case.batch_size is None and case.order not in BY_BATCH:
            (key,) = keys
            if key[0] in self._bad:
                return Fails("BadSampleError")
            return self._collated.single(delivered(case, *key))
        if self._bad and case.on_error == "raise" and any(index in self._bad for index, _ in keys):
            return Fails("BadSampleError")
        if self._bad and case.on_error == "skip":
            keys = [key for key in keys if key[0] not in self._bad]
        if self._bad and case.on_error == "substitute" and not case.is_seeded:
            keys = [(self._next_good(index), drawn) for index, drawn in keys]
        if not keys:
            return SKIPPED
        samples = [delivered(case, *key) for key in keys]
        if not case.many:
            return self._collated.batch(samples)
        made = many_of(case, [index for index, _ in keys], samples)
        is_row = isinstance(made, (list, tuple))
        return self._collated.batch(made) if case.collate or is_row else default_collate(made)

    def _next_good(self, index: int) -> int:
        while index in self._bad:
            index = (index + 1) % self._case.n
        return index


class TorchOrder:
    """Epochs in torch mode: torch's own DataLoader over the indices of the samples."""

    def __init__(self, case: Case, made: Any) -> None:
        reads_as_workers = case.is_noisy or case.kind == "iterable" or case.persistent
        options = order_of(case)
        if case.drop_last:
            options["drop_last"] = True
        workers = case.workers if reads_as_workers and isinstance(case.workers, int) else 0
        keys = type(made)(replace(case, bad=0), made.folder).keys()
        if workers:
            options["multiprocessing_context"] = "fork"
            options["persistent_workers"] = case.persistent
            if isinstance(case.prefetch, int):
                options["prefetch_factor"] = case.prefetch
        if "g" in case.also:
            options["generator"] = torch.Generator().manual_seed(case.seed)
        self._loader = DataLoader(keys, num_workers=workers, collate_fn=_as_keys, **options)
        self._generators = Generators(case.seed)
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self) -> Any:
        """Begins a pass, whose batches are read on demand and recorded."""
        with self._generators:
            iterator = iter(self._loader)
            self._iterators.add(iterator)
            return RecordedPass(iterator, self._generators)

    @property
    def workers(self) -> set[int]:
        """Returns the process ids of torch's own workers."""
        return {worker.pid for iterator in self._iterators for worker in getattr(iterator, "_workers", ())}


def _as_keys(keys: Any) -> Any:
    return keys if isinstance(keys, list) else [keys]


class RecordedPass:
    """A pass of torch's loader whose recorded steps can be read at any position."""

    def __init__(self, batches: Any, generators: Generators) -> None:
        self._batches = batches
        self._generators = generators
        self._seen: list[Any] = []
        self._has_ended = False

    def at(self, step: int) -> Any:
        """Returns the keys of a step, or END."""
        with self._generators:
            while len(self._seen) <= step and not self._has_ended:
                try:
                    self._seen.append(next(self._batches))
                except StopIteration:
                    self._has_ended = True
        return self._seen[step] if step < len(self._seen) else END


def seed_generators(seed: int) -> None:
    """Seeds the global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Generators:
    """Global generators that have a state of their own while this context is entered."""

    def __init__(self, seed: int) -> None:
        outside = self._now()
        seed_generators(seed)
        self._own = self._now()
        self._set(outside)

    @staticmethod
    def _now() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    @staticmethod
    def _set(states: tuple[Any, ...]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

    def __enter__(self) -> None:
        self._outside = self._now()
        self._set(self._own)

    def __exit__(self, *exc: object) -> None:
        self._own = self._now()
        self._set(self._outside)


__all__ = [
    "END",
    "SKIPPED",
    "Collated",
    "Expected",
    "Fails",
    "Generators",
    "SeedOrder",
    "TorchOrder",
    "difference",
    "seed_generators",
]
