"""Resample random windows and decode damaged files and parts of JPEGs: python fuzz.py [seconds] [seed]

Valid outcomes are a result of the right shape or a ValueError. A part of a valid JPEG must equal the same part of the decoded
whole,
and a part of a damaged one with restart markers must equal a sequential read. A reencoded file is the same picture, or the file
unchanged. Run it against a build with SHMLOAD_SANITIZE=address (and undefined), with libasan preloaded.
"""

from __future__ import annotations

import io
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import numpy as np
from PIL import Image

import shmload
from shmload._core.jpeg import decode as decode_part
from shmload._core.resample import resample
from shmload.formats import ImageDecoder, RandomResizedCrop, Resize
from shmload.formats.images.jpeg_header import JPEG, jpeg_header
from shmload.formats.images.libjpeg import unbound
from shmload.formats.images.restart_markers import recoded
from tests.formats.images.damaged import damage, file_with_markers, read_damaged

PHOTO = Path(shmload.__file__).parent / "data" / "chelsea.jpg"
DECODERS = [
    ImageDecoder(RandomResizedCrop(24), flip=0.5, max_pixels=1_000_000),
    ImageDecoder(RandomResizedCrop(24), decoder="simplejpeg", max_pixels=1_000_000),
    ImageDecoder(Resize((9, 31)), decoder="pillow", dtype="float32", max_pixels=100_000),
    ImageDecoder(RandomResizedCrop(5), upright=True, strict=False, layout="HWC", max_pixels=100_000),
]


def corpus() -> list[bytes]:
    """Returns small valid files: pieces of a photograph as several kinds of JPEG and PNG."""
    with Image.open(PHOTO) as opened:
        photo = opened.crop((100, 80, 180, 140))
    turned = Image.Exif()
    turned[0x0112] = 6
    ways = [
        (photo, "JPEG", {"quality": 90}),
        (photo, "JPEG", {"subsampling": 0, "restart_marker_blocks": 3}),
        (photo, "JPEG", {"subsampling": 1, "optimize": True}),
        (photo, "JPEG", {"quality": 50, "progressive": True, "exif": turned}),
        (photo.convert("L"), "JPEG", {}),
        (photo.convert("CMYK"), "JPEG", {}),
        (photo, "PNG", {}),
        (photo.convert("P"), "PNG", {}),
        (photo.convert("RGBA"), "PNG", {}),
        (photo.convert("I;16"), "PNG", {}),
        (photo, "GIF", {}),
        (photo, "WEBP", {}),
    ]
    found = []
    for picture, kind, options in ways:
        file = io.BytesIO()
        picture.save(file, kind, **options)
        found.append(file.getvalue())
    return found


def mutations(seed: int) -> Iterator[bytes]:
    """Yields files with bytes changed, removed or duplicated, mostly in their headers."""
    rng = random.Random(seed)
    valid = corpus()
    while True:
        data = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data)) if rng.random() < 0.4 else rng.randrange(min(700, len(data)))
            kind = rng.randrange(5)
            if kind <= 1:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            elif kind == 2:
                data[at : at + 2] = rng.choice((b"\0\0", b"\0\2", b"\xff\xff", b"\xff\xd9", b"\xff\xda", b"\xff\xc0"))
            elif kind == 3 and len(data) > 40:
                del data[at : at + rng.choice((1, 2, 30, len(data)))]
            else:
                data[at:at] = data[at : at + rng.randrange(1, 50)]
            if not data:
                break
        yield bytes(data)


def decode(data: bytes, decoder: ImageDecoder) -> bool:
    """Decodes a file. Returns whether it was accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about unusual files
        try:
            found = decoder(data)
        except ValueError:
            return False
    height, width = decoder.spec[1][:2] if decoder.layout == "HWC" else decoder.spec[1][1:]
    assert found.size == 3 * (height or 0) * (width or 0)
    return True


def decode_parts(data: bytes, rng: np.random.Generator) -> bool:
    """Decodes a random part of a JPEG with the native decoder. Returns whether it was accepted."""
    if unbound() or not data.startswith(JPEG):
        return False
    try:
        header = jpeg_header(data)
    except ValueError:
        return False
    if header.height * header.width > 1_000_000:
        return False
    reduction = int(rng.choice((1, 1, 2, 4, 8)))
    size = -(-header.height // reduction), -(-header.width // reduction)
    top, left = int(rng.integers(0, size[0])), int(rng.integers(0, size[1]))
    bottom, right = int(rng.integers(top + 1, size[0] + 1)), int(rng.integers(left + 1, size[1] + 1))
    is_strict, is_fast = bool(rng.integers(2)), bool(rng.integers(2))
    kept = []
    for part in ((top, left, bottom, right), (0, 0, *size)):
        memory = np.full((part[2] - part[0]) * size[1] * 3, 77, np.uint8)  # no spare byte, so that the sanitizer detects an overrun
        try:
            first, end, _ = decode_part(data, memory, size, part, reduction=reduction, is_strict=is_strict, is_fast=is_fast)
        except ValueError:
            return False
        assert 0 <= first <= part[1] < part[3] <= end <= size[1]
        nbytes = (part[2] - part[0]) * (end - first) * 3
        assert (memory[nbytes:] == 77).all()
        kept.append(memory[:nbytes].reshape(part[2] - part[0], end - first, 3)[:, part[1] - first : part[3] - first])
    if is_strict:
        assert np.array_equal(kept[0], kept[1][top:bottom, left:right])
    return True


def recode(data: bytes) -> bool:
    """Reencodes a file and check that it is the same picture. Returns whether it was reencoded."""
    if unbound():
        return False
    reencoded, why_not = recoded(data)
    if why_not:
        assert reencoded == data
        return False
    header = jpeg_header(data)
    if header.height * header.width <= 1_000_000:
        decoder = ImageDecoder()
        assert np.array_equal(decoder(data), decoder(reencoded))
    return True


def resample_at_random(rng: np.random.Generator) -> bool:
    """Resamples a window of a random image with every instruction set. Returns whether the window was accepted."""
    height, width = (int(n) for n in rng.integers(1, rng.choice((5, 40, 300)), 2))
    size = (int(rng.integers(1, rng.choice((3, 40, 200)))), int(rng.integers(1, rng.choice((3, 40, 200)))))
    top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
    bottom, right = int(rng.integers(top + 1, height + 1)), int(rng.integers(left + 1, width + 1))
    corner = (top + rng.random() * (bottom - top) * rng.integers(0, 2), left + rng.random() * (right - left) * rng.integers(0, 2))
    box = (*corner, (bottom - corner[0]) * (1 - rng.random() * rng.integers(0, 2)), (right - corner[1]) * rng.random())
    clip = (top, left, bottom, right)
    if rng.random() < 0.1:  # mostly invalid windows
        box = tuple(rng.choice((each, -1.0, 1e9, float("nan"), float("inf"), 0.0)) for each in box)
        clip = tuple(int(rng.choice((each, -1, 1 << 20))) for each in clip)
    image = rng.integers(0, 256, (height, width, 3), np.uint8)
    is_planar, is_flipped = bool(rng.integers(2)), bool(rng.integers(2))
    levels = rng.random((3, 256), np.float32) if rng.integers(2) else None
    shape = (3, *size) if is_planar else (*size, 3)
    results = []
    for vectors in range(3):
        out = np.empty(shape, np.uint8 if levels is None else np.float32)
        try:
            resample(image, out, size, box, clip, is_flipped=is_flipped, is_planar=is_planar, levels=levels, vectors=vectors)
        except ValueError:
            return False
        results.append(out)
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
    return True


if __name__ == "__main__":
    seconds, seed = (float(a) for a in (sys.argv[1:] + ["10", "0"][len(sys.argv) - 1 :]))
    end = monotonic() + seconds
    files, rng = mutations(int(seed)), np.random.default_rng(int(seed))
    num_files = num_decoded = num_windows = num_resampled = num_parts = num_recoded = 0
    words, seen = random.Random(int(seed)), Counter[str]()
    while monotonic() < end:
        for _ in range(20):
            num_resampled += resample_at_random(rng)
            num_windows += 1
        for decoder in DECODERS:
            data = next(files)
            num_decoded += decode(data, decoder)
            num_parts += decode_parts(data, rng)
            num_recoded += recode(data)
            num_files += 1
        file = file_with_markers(words)
        seen.update(read_damaged(damage(file, words), words) for _ in range(4))
    print(f"{num_windows} windows, {num_resampled} of them sound")
    print(f"{num_files} files, {num_decoded} of them decoded, and parts of {num_parts}, {num_recoded} reencoded")
    print(f"{seen.total()} with restart markers: {dict(seen)}")
