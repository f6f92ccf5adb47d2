"""The five pipelines in Hugging Face's datasets, read by torch's DataLoader."""

import numpy as np
import torch
from datasets import concatenate_datasets, interleave_datasets
from torch.utils.data import DataLoader, IterableDataset, default_collate

from benchmarks.five.work import (
    WEIGHTS,
    augment,
    buckets_of,
    fit,
    mix,
    of_chat,
    of_code,
    of_prose,
    own_rng,
    padded,
    pair,
    tokenize,
    windows_of,
)


def tokenize_and_pack(texts):
    def packed(rows):
        windows = list(windows_of(map(tokenize, rows["text"])))
        return {name: [window[name] for window in windows] for name in windows[0]}

    stream = texts.to_iterable_dataset(num_shards=2).map(packed, batched=True, batch_size=256, remove_columns=["text"])
    return DataLoader(stream.with_format("torch"), batch_size=16, num_workers=2)


def image_of(row):
    return np.frombuffer(row["image"], np.uint8).reshape(32, 32, 3)


def augment_and_mix(photos):
    def collate(rows):
        return mix(default_collate([augment({**row, "image": image_of(row)}, own_rng()) for row in rows]), own_rng())

    return DataLoader(photos.to_iterable_dataset(num_shards=2), batch_size=128, num_workers=2, collate_fn=collate)


def pairs(images, captions):
    def collate(rows):
        return default_collate([pair((image_of(row), row["caption"])) for row in rows])

    both = concatenate_datasets([images, captions], axis=1)
    return DataLoader(both.to_iterable_dataset(num_shards=2), batch_size=64, num_workers=2, collate_fn=collate)


class Bucketed(IterableDataset):
    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        return buckets_of(tokenize(row["text"]) for row in self.stream)


def buckets(texts):
    stream = texts.to_iterable_dataset(num_shards=2)
    return DataLoader(Bucketed(stream), batch_size=None, num_workers=2, collate_fn=padded)


def mixture(prose, code, chat):
    def of(function, texts):
        stream = texts.to_iterable_dataset(num_shards=2)
        return stream.map(lambda row: fit(function(row["text"])), remove_columns=["text"])

    def collate(rows):  # `datasets` has converted arrays to lists
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    sources = [of(of_prose, prose), of(of_code, code), of(of_chat, chat)]
    mixed = interleave_datasets(sources, list(WEIGHTS.values()), seed=1, stopping_strategy="all_exhausted")
    return DataLoader(mixed, batch_size=64, num_workers=2, collate_fn=collate)
