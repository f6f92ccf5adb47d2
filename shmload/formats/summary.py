"""`Summary`, the output of `shmload inspect` for a path, and functions that put values and types into words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

SHOWN = 6  # number of values shown of an array
SHOWN_CHARACTERS = 60  # number of characters shown of a text
SIZED = 1000  # number of samples whose size is determined, if that requires reading them


@dataclass(frozen=True)
class Sizes:
    """The sizes of samples in bytes."""

    min: int
    median: int
    max: int
    num_samples: int  # number of samples whose sizes are known

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Sizes | None:
        """Return the summary of some sizes; None if there are none."""
        found = np.asarray(sizes if isinstance(sizes, np.ndarray) else list(sizes), np.int64)
        if not len(found):
            return None
        return cls(int(found.min()), int(np.median(found)), int(found.max()), len(found))


@dataclass
class Summary:
    """The output of `shmload inspect` for one path.

    Attributes:
        path: the path.
        format: the title of its format.
        nbytes: size of the file, or of all files in the folder.
        num_samples: number of samples in it.
        fields: name -> type and shape in words: "float32 (28, 28)".
        sizes: sizes of its samples.
        samples: the first samples, not shortened.
        notes: further remarks.
    """

    path: str
    format: str
    nbytes: int
    num_samples: int
    fields: dict[str, str] = field(default_factory=dict)
    sizes: Sizes | None = None
    samples: Sequence[Mapping[str, Any]] = ()
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain data, with shortened samples."""
        plain = {**vars(self), "sample_nbytes": self.sizes and asdict(self.sizes)}
        del plain["sizes"]
        plain["samples"] = [{name: shortened(value) for name, value in sample.items()} for sample in self.samples]
        return plain


def shortened(value: Any) -> str:
    """Return a value as text in one line."""
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN_CHARACTERS else value[: SHOWN_CHARACTERS - 3] + "...")
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes: {bytes(value[:8]).hex(' ')}{' ...' if len(value) > 8 else ''}"
    if hasattr(value, "detach"):  # a tensor of a type that numpy lacks
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}: {_numbers(value.detach().float().numpy())}"
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{value.dtype} {value.shape}: {_numbers(value)}"
    if isinstance(value, (np.generic, np.ndarray)):
        return str(value.item())
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def described(spec: Any) -> str:
    """Return the type and shape of a schema's field in words: "float32 (28, any)"."""
    if not isinstance(spec, tuple):
        return spec.__name__ if isinstance(spec, type) else str(spec)
    dtype, shape = described(spec[0]), spec[1]
    extents = ", ".join("any" if extent is None else str(extent) for extent in shape)
    return f"{dtype} ({extents}{',' if len(shape) == 1 else ''})" if shape else str(dtype)


def nbytes_of(sample: Mapping[str, Any]) -> int:
    """Return the total size of a sample's values in bytes. A value whose size is unknown counts 8."""
    total = 0
    for value in sample.values():
        held = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        total += held.nbytes if hasattr(held, "nbytes") else len(held) if hasattr(held, "__len__") else 8
    return total


def _numbers(array: Any) -> str:
    flat = array.reshape(-1)
    shown = " ".join(f"{number:.4g}" if array.dtype.kind == "f" else str(number) for number in flat[:SHOWN].tolist())
    return shown + (" ..." if flat.size > SHOWN else "")


VALUES_SEEN = 8  # samples whose values show what an extension contains
RECORDS_SEEN = 100  # records whose fields are listed


def fields_seen(samples: Sequence[Mapping[str, Any]], counts: Mapping[str, int], num_seen: int) -> dict[str, str]:
    """Return the types and shapes of each field's values in words, and in how many samples it occurs if not in all.

    Args:
        samples: the samples whose values are examined.
        counts: number of samples that have each field.
        num_seen: number of samples that were counted.
    """
    found = {}
    for name, num in counts.items():
        shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for value in (sample[name] for sample in samples if name in sample):
            kind = str(value.dtype) if hasattr(value, "dtype") else type(value).__name__
            shapes[kind].add(tuple(getattr(value, "shape", ())))
        words = []
        for kind, several in sorted(shapes.items()):
            # a single value counts as a row of one if others are rows
            rows = {shape or (1,) for shape in several} if any(map(len, several)) else several
            for ndim in sorted({len(shape) for shape in rows}):
                axes = [_extents(axis) for axis in zip(*(shape for shape in rows if len(shape) == ndim), strict=True)]
                words.append(f"{kind} ({', '.join(axes)}{',' if len(axes) == 1 else ''})" if axes else kind)
        found[name] = (" or ".join(words) or "?") + (f", in {num:,} of {num_seen:,}" if num < num_seen else "")
    return found


def _extents(axis: Sequence[int]) -> str:
    """Return the extents of several arrays along one axis in words."""
    return f"{min(axis)}" if min(axis) == max(axis) else f"{min(axis)} to {max(axis)}"
