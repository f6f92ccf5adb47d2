"""The items that the five pipelines read: a few thousand in memory, repeated as often as needed."""

import argparse
import inspect
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

NUM_KEPT = 2048


class Cycled(Sequence[Any]):
    """A sequence of `num_items` items, which repeats a few thousand distinct ones."""

    def __init__(self, kept: Sequence[Any], num_items: int) -> None:
        self.kept, self.num_items = kept, num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]  # without slices
        if not 0 <= index < self.num_items:
            raise IndexError(index)
        return self.kept[index % len(self.kept)]


@cache
def kept() -> dict[str, list[Any]]:
    """Returns the distinct items, by source."""
    rng = np.random.default_rng(3)
    words = ["".join(map(chr, rng.integers(97, 123, length))) for length in rng.integers(2, 11, 20_000)]

    def text(num_words: int) -> str:
        drawn = [words[place % len(words)] for place in rng.zipf(1.3, num_words).tolist()]
        return ". ".join(" ".join(drawn[first : first + 12]).capitalize() for first in range(0, num_words, 12)) + "."

    def turns() -> str:
        roles = ("user", "assistant") * int(rng.integers(1, 4))
        return json.dumps({"turns": [{"role": role, "text": text(int(rng.integers(5, 30)))} for role in roles]})

    code = inspect.getsource(argparse)
    starts = rng.integers(0, len(code) - 1000, NUM_KEPT).tolist()
    images, labels = rng.integers(0, 256, (NUM_KEPT, 32, 32, 3), np.uint8), rng.integers(0, 10, NUM_KEPT).tolist()
    lengths = np.clip(rng.lognormal(4.2, 0.8, NUM_KEPT), 5, 500).astype(int).tolist()  # in words
    return {
        "texts": [text(length) for length in lengths],
        "photos": [{"image": image, "label": label} for image, label in zip(images, labels, strict=True)],
        "images": list(images),
        "captions": [text(int(length)) for length in rng.integers(6, 20, NUM_KEPT)],
        "prose": [text(int(length)) for length in rng.integers(20, 200, NUM_KEPT)],
        "code": [code[start : start + 200 + start % 700] for start in starts],
        "chat": [turns() for _ in range(NUM_KEPT)],
    }


def data(num_items: int) -> dict[str, Cycled]:
    """Returns `num_items` items of each source."""
    return {name: Cycled(items, num_items) for name, items in kept().items()}


def data_of_datasets(num_items: int) -> dict[str, Any]:
    """Returns the same data as Hugging Face datasets, in which images are bytes, as in the files of `datasets`."""
    import datasets

    found = {}
    for name, items in kept().items():
        columns: dict[str, Any] = {"caption" if name == "captions" else "text": items}
        if name in ("photos", "images"):
            images = [item["image"] for item in items] if name == "photos" else items
            columns = {"image": [image.tobytes() for image in images]}
        if name == "photos":
            columns["label"] = [item["label"] for item in items]
        one = datasets.Dataset.from_dict(columns)
        found[name] = datasets.concatenate_datasets([one] * -(-num_items // len(items))).select(range(num_items))
    return found
