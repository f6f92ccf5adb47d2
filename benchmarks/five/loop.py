"""The five pipelines as plain loops in one process, without a loader, to measure the cost of the whole programs."""

import random
from itertools import islice

from torch.utils.data import default_collate

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


def in_batches(items, size):
    items = iter(items)
    while some := list(islice(items, size)):
        yield default_collate(some)


def tokenize_and_pack(texts):
    return in_batches(windows_of(map(tokenize, texts)), 16)


def augment_and_mix(photos):
    return (mix(batch, own_rng()) for batch in in_batches((augment(photo, own_rng()) for photo in photos), 128))


def pairs(images, captions):
    return in_batches(map(pair, zip(images, captions, strict=True)), 64)


def buckets(texts):
    return map(padded, buckets_of(map(tokenize, texts)))


def mixture(prose, code, chat):
    return in_batches(mixed(prose, code, chat), 64)


def mixed(*sources):
    transforms, nexts = (of_prose, of_code, of_chat), [0] * 3
    while True:
        (which,) = random.choices(range(3), WEIGHTS.values())
        source = sources[which]
        yield fit(transforms[which](source[nexts[which] % len(source)]))
        nexts[which] += 1
