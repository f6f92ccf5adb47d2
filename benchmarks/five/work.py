"""The functions of the five pipelines, which are the same for every library. docs/pipelines.md shows those for items and batches.

Users write `windows_of`, `buckets_of` and `padded` themselves if a library has no stage for them.
"""

import json
import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

WINDOW = 1024
BOUNDARIES = (32, 64, 128, 256)
WEIGHTS = {"prose": 0.6, "code": 0.3, "chat": 0.1}

# ------------------------------------------------------------ functions for items and batches


def tokenize(text: str) -> np.ndarray:
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return np.array([zlib.crc32(word.encode()) % 50_000 + 1 for word in words])


def augment(photo: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    top, left = rng.integers(0, 9, 2)
    image = np.pad(photo["image"], ((4, 4), (4, 4), (0, 0)))[top : top + 32, left : left + 32]
    if rng.random() < 0.5:
        image = image[:, ::-1]
    brighter = np.clip(image.astype(np.float32) * rng.uniform(0.7, 1.3), 0, 255)
    return {"image": brighter.astype(np.uint8), "label": photo["label"]}


def mix(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, torch.Tensor]:
    image = torch.as_tensor(batch["image"]).float()
    label = torch.nn.functional.one_hot(torch.as_tensor(batch["label"]), 10).float()
    share, order = rng.beta(0.4, 0.4), torch.from_numpy(rng.permutation(len(label)))
    return {"image": torch.lerp(image[order], image, share), "label": torch.lerp(label[order], label, share)}


def pair(both: tuple[np.ndarray, str]) -> dict[str, np.ndarray]:
    image, caption = both
    tokens = np.zeros(16, np.int64)
    found = tokenize(caption)[:16]
    tokens[: len(found)] = found
    return {"image": image.transpose(2, 0, 1).astype(np.float32) / 255, "caption": tokens}


def of_prose(text: str) -> dict[str, Any]:
    return {"tokens": tokenize(text), "source": 0}


def of_code(lines: str) -> dict[str, Any]:
    indented = re.sub(r"^( {4})+", lambda found: "\t" * (len(found[0]) // 4), lines, flags=re.MULTILINE)
    return {"tokens": np.frombuffer(indented.encode(), np.uint8).astype(np.int64) + 50_001, "source": 1}


def of_chat(line: str) -> dict[str, Any]:
    turns = json.loads(line)["turns"]
    return {"tokens": tokenize(" ".join(f"{turn['role']}: {turn['text']}" for turn in turns)), "source": 2}


def fit(sample: dict[str, Any]) -> dict[str, Any]:
    tokens = np.zeros(128, np.int64)
    found = sample["tokens"][:128]
    tokens[: len(found)] = found
    return {"tokens": tokens, "source": sample["source"]}


# ------------------------------------------------------------ stages that some libraries lack


@cache
def rng_of(pid: int) -> np.random.Generator:
    return np.random.default_rng()


def own_rng() -> np.random.Generator:
    return rng_of(os.getpid())  # with one generator for all, forked workers would draw the same numbers


def windows_of(sequences: Iterable[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    window, used, number = {}, WINDOW, 0
    for tokens in sequences:
        if used + len(tokens) > WINDOW:
            if window:
                yield window
            window = {name: np.zeros(WINDOW, np.int64) for name in ("tokens", "segment_ids", "position_ids")}
            used = number = 0
        end, number = used + len(tokens), number + 1
        window["tokens"][used:end] = tokens
        window["segment_ids"][used:end] = number
        window["position_ids"][used:end] = np.arange(len(tokens))
        used = end
    if window:
        yield window


def buckets_of(sequences: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
    buckets: list[list[np.ndarray]] = [[] for _ in range(len(BOUNDARIES) + 1)]
    for tokens in sequences:
        bucket = buckets[bisect_left(BOUNDARIES, len(tokens))]
        bucket.append(tokens)
        if len(bucket) == 32:
            yield bucket.copy()
            bucket.clear()
    yield from filter(None, buckets)


def padded(sequences: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(tokens) for tokens in sequences])
    tensors = [torch.from_numpy(tokens) for tokens in sequences]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), lengths
