"""WebDataset tar shards, plain or compressed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shmload.formats.tar.dataset import KEY, TarDataset
from shmload.formats.tar.shard import SUFFIX, load_index
from shmload.tools.inspect.summary import Head, Indexed, Sizes, Summary, described, nbytes_of, outcome, stamp

NAME = "tar"
_BLOCK = 512
_LOOKED_AT = 8  # samples whose values tell what an extension holds


def matches(head: Head) -> bool:
    block = head.begin[:_BLOCK]
    if len(block) < _BLOCK or head.compression == "zlib":
        return False
    if not any(block):  # an archive without members: its end marker
        return not any(head.begin[: 2 * _BLOCK]) and len(head.begin) >= 2 * _BLOCK
    try:
        told = int(block[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return told == sum(block) - sum(block[148:156]) + 8 * 32


def describe(head: Head, num_samples: int) -> Summary:
    path = str(head.path)
    if head.compression:
        return _streamed(head, num_samples)
    index = load_index(path, cache=False)
    dataset = TarDataset(head.path, cache=False)
    ends = np.concatenate([[0], np.cumsum(index.sizes, dtype=np.int64)])
    first = index.first.astype(np.int64)
    counts = {name: int((index.member_extensions == number).sum()) for number, name in enumerate(index.extensions)}
    samples = [dataset[i] for i in range(min(max(num_samples, _LOOKED_AT), len(dataset)))]
    sizes = Sizes.of(ends[first[1:]] - ends[first[:-1]])
    return Summary(
        path,
        NAME,
        head.nbytes,
        index.num_samples,
        _fields(samples, counts, index.num_samples),
        sizes,
        samples[:num_samples],
    )


def _streamed(head: Head, num_samples: int) -> Summary:
    from shmload.formats.tar.stream import TarStream  # which brings torch

    samples: list[Mapping[str, Any]] = []
    counts: Counter[str] = Counter()
    sizes = []
    for sample in TarStream(head.path, decode=False, rank=0, world_size=1):
        counts.update(name for name in sample if name != KEY)
        sizes.append(nbytes_of({name: value for name, value in sample.items() if name != KEY}))
    for sample in TarStream(head.path, rank=0, world_size=1):
        if len(samples) == max(num_samples, _LOOKED_AT):
            break
        samples.append(sample)
    fields = _fields(samples, counts, len(sizes))
    note = f"compressed by {head.compression}: it can only be read in order, by TarStream"
    return Summary(
        str(head.path), NAME, head.nbytes, len(sizes), fields, Sizes.of(sizes), samples[:num_samples], [note]
    )


def _fields(samples: Iterable[Mapping[str, Any]], counts: Mapping[str, int], num_samples: int) -> dict[str, str]:
    """Extensions, with what the first samples hold under them, and how many have none."""
    found = {}
    for name, count in counts.items():
        kinds = dict.fromkeys(_kind(sample[name]) for sample in samples if name in sample)
        missing = f", in {count:,} of {num_samples:,}" if count < num_samples else ""
        found[name] = (" or ".join(kinds) or "?") + missing
    return found


def _kind(value: Any) -> str:
    return described((value.dtype, value.shape)) if isinstance(value, np.ndarray) else type(value).__name__


def index(head: Head) -> Indexed:
    path = str(head.path)
    before = stamp(path + SUFFIX)
    made = load_index(path)  # which says it if the shard is compressed
    return outcome(path, path + SUFFIX, made.num_samples, before)
