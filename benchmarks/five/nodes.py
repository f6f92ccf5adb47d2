"""The five pipelines in torchdata.nodes."""

from torch.utils.data import SequentialSampler, StackDataset, default_collate
from torchdata.nodes import Batcher, Loader, Mapper, MapStyleWrapper, MultiNodeWeightedSampler, ParallelMapper, Unbatcher

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


def read(dataset):
    return MapStyleWrapper(dataset, SequentialSampler(dataset))


def in_processes(source, function):
    return ParallelMapper(source, function, num_workers=2, method="process")


def tokenize_and_pack(texts):
    def packed(some):
        return list(windows_of(map(tokenize, some)))

    windows = Unbatcher(in_processes(Batcher(read(texts), 256, drop_last=False), packed))
    return Loader(Mapper(Batcher(windows, 16, drop_last=False), default_collate))


def augment_and_mix(photos):
    def made(rows):
        return mix(default_collate([augment(row, own_rng()) for row in rows]), own_rng())

    return Loader(in_processes(Batcher(read(photos), 128, drop_last=False), made))


def pairs(images, captions):
    def made(rows):
        return default_collate([pair(row) for row in rows])

    return Loader(in_processes(Batcher(read(StackDataset(images, captions)), 64, drop_last=False), made))


def buckets(texts):
    def made(some):
        return [padded(bucket) for bucket in buckets_of(map(tokenize, some))]

    return Loader(Unbatcher(in_processes(Batcher(read(texts), 2048, drop_last=False), made)))


def mixture(prose, code, chat):
    def of(function, source):
        return Mapper(read(source), lambda item: (function, item))

    def made(rows):
        return default_collate([fit(function(item)) for function, item in rows])

    sources = {"prose": of(of_prose, prose), "code": of(of_code, code), "chat": of(of_chat, chat)}
    weighted = MultiNodeWeightedSampler(sources, WEIGHTS)
    return Loader(in_processes(Batcher(weighted, 64), made))
