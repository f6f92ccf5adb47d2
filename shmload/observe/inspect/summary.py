"""What there is to say of a file of samples, and how its values are shortened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

SHOWN = 6  # values of an array
SHOWN_CHARACTERS = 60  # of text
SIZED = 1000  # samples whose size is looked at where that means to read them


@dataclass(frozen=True)
class Sizes:
    """Bytes of samples."""

    min: int
    median: int
    max: int
    num_samples: int  # that were looked at

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Sizes | None:
        """Of some sizes; None if there are none."""
        found = np.asarray(sizes if isinstance(sizes, np.ndarray) else list(sizes), np.int64)
        if not len(found):
            return None
        return cls(int(found.min()), int(np.median(found)), int(found.max()), len(found))


@dataclass
class Summary:
    """One path.

    Attributes:
        fields: name -> what it holds, in words: "float32 (28, 28)".
        samples: the first ones, whole.
        notes: what else is worth knowing.
    """

    path: str
    format: str
    nbytes: int
    num_samples: int
    fields: dict[str, str] = field(default_factory=dict)
    sizes: Sizes | None = None
    samples: Sequence[Mapping[str, Any]] = ()
    notes: list[str] = field(default_factory=list)

    def as_dict(self, num_samples: int) -> dict[str, Any]:
        """The same as plain data, with so many samples, shortened."""
        return {
            "path": self.path,
            "format": self.format,
            "nbytes": self.nbytes,
            "num_samples": self.num_samples,
            "fields": self.fields,
            "sample_nbytes": None if self.sizes is None else asdict(self.sizes),
            "samples": [
                {name: shortened(value) for name, value in sample.items()} for sample in self.samples[:num_samples]
            ],
            "notes": self.notes,
        }


def shortened(value: Any) -> str:
    """A value in a line."""
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
    """A schema's field in words."""
    if not isinstance(spec, tuple):
        return spec.__name__ if isinstance(spec, type) else str(spec)
    dtype, shape = spec
    extents = ", ".join("any" if extent is None else str(extent) for extent in shape)
    return f"{dtype} ({extents}{',' if len(shape) == 1 else ''})" if shape else str(dtype)


def nbytes_of(sample: Mapping[str, Any]) -> int:
    """Bytes of the values of a sample."""
    total = 0
    for value in sample.values():
        if isinstance(value, str):
            total += len(value.encode("utf-8", "surrogateescape"))
        else:
            total += value.nbytes if hasattr(value, "nbytes") else len(value) if hasattr(value, "__len__") else 8
    return total


def _numbers(array: Any) -> str:
    flat = array.reshape(-1)
    shown = " ".join(f"{number:.4g}" if array.dtype.kind == "f" else str(number) for number in flat[:SHOWN].tolist())
    return shown + (" ..." if flat.size > SHOWN else "")
