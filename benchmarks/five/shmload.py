"""The five pipelines in shmload."""

from benchmarks.five.work import BOUNDARIES, WEIGHTS, WINDOW, augment, fit, mix, of_chat, of_code, of_prose, pair, tokenize
from shmload import sample_rng
from shmload.pipeline import Items, Join


def tokenize_and_pack(texts):
    return Items(texts).map(tokenize, workers=2).pack(WINDOW).batch(16)


def augment_and_mix(photos):
    images = Items(photos).map(lambda photo: augment(photo, sample_rng()), workers=2)
    return images.batch(128).map_batches(lambda batch: mix(batch, sample_rng()))


def pairs(images, captions):
    return Items(images).zip(Items(captions)).map(pair, workers=2).batch(64)


def buckets(texts):
    of_like_length = Items(texts).map(tokenize, workers=2).bucket(len, BOUNDARIES, 32, ragged="pad")
    return of_like_length.conveyer(block_size=2048)


def mixture(prose, code, chat):
    sources = [(prose, of_prose), (code, of_code), (chat, of_chat)]
    members = [Items(texts, repeating=True).map(function) for texts, function in sources]
    return Join(list(zip(members, WEIGHTS.values(), strict=True))).map(fit, workers=2).batch(64)
