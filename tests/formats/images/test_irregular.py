"""Files that violate a rule of their format but whose picture is intact are read as Pillow reads them, and counted."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shmload import ShmLoader
from shmload.errors import ShardCorrupt
from shmload.formats import ImageDecoder, ImageFolder, RandomResizedCrop
from shmload.metrics import irregular_files
from tests.formats.images.jpegs import after_app0

Encode = Callable[..., bytes]
DECODERS = ("auto", "libjpeg", "simplejpeg", "pillow")


def wrong_checksum(png: bytes, kind: bytes) -> bytes:
    at = png.index(kind)
    end = at + 4 + int.from_bytes(png[at - 4 : at])
    return png[:end] + bytes((png[end] ^ 1,)) + png[end + 1 :]


def wrong_adobe(jpeg: bytes) -> bytes:
    end = 4 + int.from_bytes(jpeg[4:6])  # of APP0, which decoders would trust
    return jpeg[:2] + b"\xff\xee\x00\x0eAdobe" + bytes((0, 100, 0, 0, 0, 0, 7)) + jpeg[end:]


def other_scan_parameters(jpeg: bytes) -> bytes:
    at = jpeg.index(b"\xff\xda")
    end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4])
    return jpeg[: end - 2] + b"\0" + jpeg[end - 1 :]


JPEGS: dict[str, Callable[[bytes], bytes]] = {
    "JFIF 0.00": lambda jpeg: jpeg.replace(b"JFIF\0\1\1", b"JFIF\0\0\0"),
    "zeros before the end": lambda jpeg: jpeg[:-2] + bytes(64) + jpeg[-2:],
    "zeros after a segment": lambda jpeg: after_app0(jpeg, bytes(3)),
    "junk after a segment": lambda jpeg: after_app0(jpeg, b"junk\xff\0junk"),
    "unknown color transform": wrong_adobe,
    "last coefficient 0": other_scan_parameters,
}
PNGS: dict[str, Callable[[bytes], bytes]] = {
    "no end": lambda png: png[:-12],
    "half an end": lambda png: png[:-5],
    "wrong checksum of the pixels": lambda png: wrong_checksum(png, b"IDAT"),
    "wrong checksum of the end": lambda png: wrong_checksum(png, b"IEND"),
}


def by_pillow(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def is_counted(read: Callable[[], object]) -> bool:
    before = irregular_files.value
    read()
    return irregular_files.value == before + 1


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("break_rule", JPEGS.values(), ids=JPEGS)
@pytest.mark.parametrize("progressive", [False, True])
def test_irregular_jpeg_that_pillow_reads_is_read_and_counted(
    photo: Image.Image, encode: Encode, break_rule: Callable[[bytes], bytes], progressive: bool, decoder: Any
) -> None:
    sound = encode(photo, progressive=progressive)
    if progressive and break_rule is other_scan_parameters:
        pytest.skip("in a progressive file these are other scans")
    data = break_rule(sound)
    assert data != sound
    assert np.array_equal(by_pillow(sound), by_pillow(data))
    found = ImageDecoder(layout="HWC", decoder=decoder)
    assert np.array_equal(by_pillow(data), found(data))
    has_junk = "after" in next(name for name, how in JPEGS.items() if how is break_rule)
    assert is_counted(lambda: found(data)) == (decoder != "pillow" or has_junk)  # Pillow does not warn about the others
    assert not is_counted(lambda: found(sound))
    if decoder != "pillow" or has_junk:
        with pytest.raises(ValueError, match=r"JFIF|extraneous|damaged JPEG|Adobe|SOS"):
            ImageDecoder(decoder=decoder, strict=True)(data)


@pytest.mark.parametrize("break_rule", PNGS.values(), ids=PNGS)
def test_irregular_png_that_pillow_reads_is_read_and_counted(
    photo: Image.Image, encode: Encode, break_rule: Callable[[bytes], bytes]
) -> None:
    data = break_rule(encode(photo, "PNG"))
    assert is_counted(lambda: ImageDecoder()(data))
    assert np.array_equal(by_pillow(data), ImageDecoder(layout="HWC")(data))
    with pytest.raises(ValueError, match="PNG"):
        ImageDecoder(strict=True)(data)


@pytest.mark.slow(reason="decodes hundreds of damaged files")
def test_png_that_pillow_rejects_is_an_error_and_pixels_are_never_wrong(photo: Image.Image, encode: Encode) -> None:
    data = encode(photo.resize((20, 15)), "PNG")
    decoder, num_read = ImageDecoder(layout="HWC"), 0
    changed = [data[:end] for end in range(8, len(data), 7)]
    changed += [data[:at] + bytes((data[at] ^ 4,)) + data[at + 1 :] for at in range(8, len(data), 5)]
    for each in changed:
        try:
            expected = by_pillow(each)
        except Exception:
            with pytest.raises(ValueError, match=r"\S"):
                decoder(each)
        else:
            try:
                assert np.array_equal(expected, decoder(each))
                assert np.array_equal(by_pillow(data), expected)
                num_read += 1
            except ValueError as error:  # the checksum within the pixels is wrong, and Pillow did not check it
                assert "incorrect data check" in str(error)  # noqa: PT017  # reading it is also valid
    assert num_read > 3


@pytest.mark.parametrize("decoder", ["libjpeg", "simplejpeg"])
def test_damaged_pixels_of_an_irregular_file_are_an_error(photo: Image.Image, encode: Encode, decoder: Any) -> None:
    data = bytearray(JPEGS["JFIF 0.00"](encode(photo)))
    data[len(data) // 2 : len(data) // 2 + 2] = b"\xff\xd3"
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        ImageDecoder(decoder=decoder)(bytes(data))
    assert is_counted(lambda: ImageDecoder(decoder=decoder, strict=False)(bytes(data)))


def test_bytes_before_a_restart_marker_are_damage(photo: Image.Image, encode: Encode) -> None:
    data = encode(photo, restart_marker_rows=1)
    at = data.index(b"\xff\xd0", data.index(b"\xff\xda"))
    with pytest.raises(ValueError, match="extraneous bytes before marker 0xd0"):
        ImageDecoder(decoder="libjpeg")(data[:at] + bytes(9) + data[at:])


def test_crops_of_irregular_files_with_restart_markers_are_read(photo: Image.Image, encode: Encode) -> None:
    data = encode(photo, restart_marker_blocks=1)
    decoder = ImageDecoder(RandomResizedCrop(8, scale=(0.1, 0.2)))
    for break_rule in JPEGS.values():
        assert decoder(break_rule(data)).shape == (3, 8, 8)


@pytest.mark.slow(reason="starts workers")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"transform": np.array}])
def test_stats_count_irregular_images(
    tmp_path: Path, photo: Image.Image, encode: Encode, num_workers: int, options: dict[str, Any]
) -> None:
    sound = encode(photo, "PNG")
    paths = [tmp_path / f"{number}.png" for number in range(8)]
    for number, path in enumerate(paths):
        path.write_bytes(sound[:-12] if number % 3 == 0 else sound)
    with ShmLoader(ImageFolder(paths, **options), batch_size=4, num_workers=num_workers) as loader:
        assert [len(batch["image"]) for batch in loader] == [4, 4]
        assert loader.stats()["num_irregular"] == 3
    with pytest.raises(ShardCorrupt, match=r"0\.png: a PNG cut off"):
        ImageFolder(paths, ImageDecoder(strict=True))[0]


def test_lossless_jpeg_is_decoded_or_gives_a_clear_error(photo: Image.Image) -> None:
    imagecodecs = pytest.importorskip("imagecodecs", reason="needs imagecodecs, which writes such JPEGs")
    gray = np.asarray(photo.convert("L"))
    for stored in (gray, np.asarray(photo)):
        data = imagecodecs.jpeg8_encode(stored, lossless=True)
        for decoder in DECODERS:
            try:
                found = ImageDecoder(layout="HWC", decoder=decoder)(data)
            except ValueError as error:
                assert str(error).startswith("a lossless JPEG, which this Pillow does not decode")  # noqa: PT017  # or decoding
            else:
                assert np.array_equal(np.broadcast_to(stored.reshape(90, 120, -1), (90, 120, 3)), found)


def as_frame(jpeg: bytes, marker: int) -> bytes:
    return jpeg.replace(b"\xff\xc0", bytes((0xFF, marker)), 1)


@pytest.mark.parametrize("decoder", DECODERS)
def test_error_for_unsupported_kinds_of_jpeg_names_a_remedy(photo: Image.Image, encode: Encode, decoder: Any) -> None:
    for marker, kind in (
        (0xC5, "a hierarchical JPEG"),
        (0xCB, "a lossless JPEG with arithmetic coding"),
        (0xC3, "a lossless JPEG"),
    ):
        with pytest.raises(ValueError, match=rf"{kind}.*Convert the file, or decode it with a function of your own"):
            ImageDecoder(decoder=decoder)(as_frame(encode(photo), marker))


@pytest.mark.parametrize("colors", ["CMYK", "YCCK"])
def test_four_channels_are_converted_as_by_pillow(photo: Image.Image, colors: str) -> None:
    imagecodecs = pytest.importorskip("imagecodecs", reason="needs imagecodecs, which writes such JPEGs")
    data = imagecodecs.jpeg8_encode(np.asarray(photo.convert("CMYK")), colorspace="CMYK", outcolorspace=colors)
    for decoder in DECODERS:
        assert np.array_equal(by_pillow(data), ImageDecoder(layout="HWC", decoder=decoder)(data))


PROFILES = {
    "twice": [(1, 1), (1, 1)],
    "number 0": [(0, 1)],
    "one of two": [(1, 2)],
    "beyond the last": [(3, 2)],
    "of two profiles": [(1, 2), (2, 3)],
}


@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("profile", PROFILES)
def test_jpeg_with_a_damaged_color_profile_is_read_alike_by_every_decoder(
    photo: Image.Image, encode: Encode, profile: str, decoder: Any, strict: bool | None
) -> None:
    parts = [b"ICC_PROFILE\0" + bytes(numbers) + b"abc" for numbers in PROFILES[profile]]
    damaged = after_app0(encode(photo), b"".join(b"\xff\xe2" + (len(part) + 2).to_bytes(2) + part for part in parts))
    read = ImageDecoder(layout="HWC", decoder=decoder, strict=strict)
    assert np.array_equal(by_pillow(encode(photo)), read(damaged))
    assert not is_counted(lambda: read(damaged))


def test_damaged_jpeg_with_a_damaged_color_profile_is_an_error(photo: Image.Image, encode: Encode) -> None:
    part = b"\xff\xe2\x00\x13ICC_PROFILE\0\0\1abc"
    jpeg = after_app0(encode(photo), part)
    for decoder in DECODERS:
        with pytest.raises(ValueError, match=r"\S"):
            ImageDecoder(decoder=decoder)(jpeg[: len(jpeg) // 2])
