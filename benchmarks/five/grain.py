"""The five pipelines in Grain."""

import grain
from grain.experimental import FirstFitPackIterDataset, FlatMapIterDataset, FlatMapTransform, ZipMapDataset

from benchmarks.five.work import WEIGHTS, WINDOW, augment, buckets_of, fit, mix, of_chat, of_code, of_prose, padded, pair, tokenize

READING = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # as Grain advises for data in memory
WORKERS = grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2)


def tokenize_and_pack(texts):
    sequences = grain.MapDataset.source(texts).map(lambda text: {"tokens": tokenize(text)})
    windows = FirstFitPackIterDataset(sequences.to_iter_dataset(READING), length_struct={"tokens": WINDOW}, num_packing_bins=16)
    return windows.batch(16).mp_prefetch(WORKERS)


def augment_and_mix(photos):
    batches = grain.MapDataset.source(photos).random_map(augment, seed=1).batch(128).random_map(mix, seed=2)
    arrays = batches.map(lambda batch: {name: tensor.numpy() for name, tensor in batch.items()})
    return arrays.to_iter_dataset(READING).mp_prefetch(WORKERS)


def pairs(images, captions):
    both = ZipMapDataset([grain.MapDataset.source(images), grain.MapDataset.source(captions)])
    return both.map(pair).batch(64).to_iter_dataset(READING).mp_prefetch(WORKERS)


class Bucketed(FlatMapTransform):
    max_fan_out = 2048

    def flat_map(self, sequences):
        return [tuple(tensor.numpy() for tensor in padded(bucket)) for bucket in buckets_of(sequences)]


def buckets(texts):
    sequences = grain.MapDataset.source(texts).map(tokenize).batch(2048, batch_fn=list)
    return FlatMapIterDataset(sequences.to_iter_dataset(READING), Bucketed()).mp_prefetch(WORKERS)


def mixture(prose, code, chat):
    sources = [(prose, of_prose), (code, of_code), (chat, of_chat)]
    members = [grain.MapDataset.source(texts).repeat().map(function) for texts, function in sources]
    weighted = grain.MapDataset.mix(members, WEIGHTS.values())
    return weighted.map(fit).batch(64).to_iter_dataset(READING).mp_prefetch(WORKERS)
