"""The five pipelines in torch's DataLoader."""

import random

from torch.utils.data import DataLoader, IterableDataset, StackDataset, default_collate, get_worker_info

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


class OfEachWorker(IterableDataset):
    def __init__(self, texts, stage):
        self.texts, self.stage = texts, stage

    def __iter__(self):
        worker = get_worker_info()
        mine = range(worker.id, len(self.texts), worker.num_workers)
        return iter(self.stage(tokenize(self.texts[index]) for index in mine))


def tokenize_and_pack(texts):
    return DataLoader(OfEachWorker(texts, windows_of), batch_size=16, num_workers=2)


def augment_and_mix(photos):
    def collate(rows):
        return mix(default_collate([augment(row, own_rng()) for row in rows]), own_rng())

    return DataLoader(photos, batch_size=128, num_workers=2, collate_fn=collate)


def pairs(images, captions):
    def collate(rows):
        return default_collate([pair(row) for row in rows])

    return DataLoader(StackDataset(images, captions), batch_size=64, num_workers=2, collate_fn=collate)


def buckets(texts):
    return DataLoader(OfEachWorker(texts, buckets_of), batch_size=None, num_workers=2, collate_fn=padded)


class Mixed(IterableDataset):
    def __init__(self, *sources):
        self.sources = sources

    def __iter__(self):
        transforms, nexts = (of_prose, of_code, of_chat), [get_worker_info().id] * 3
        while True:
            (which,) = random.choices(range(3), WEIGHTS.values())
            source = self.sources[which]
            yield fit(transforms[which](source[nexts[which] % len(source)]))
            nexts[which] += get_worker_info().num_workers


def mixture(prose, code, chat):
    return DataLoader(Mixed(prose, code, chat), batch_size=64, num_workers=2)
