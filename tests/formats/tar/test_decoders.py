from __future__ import annotations

import gzip
import io
import pickle
import struct
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
import webdataset.tenbin
import webdataset.writer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from shmload.formats.tar import member_compression, numpy_members
from shmload.formats.tar.decoders import Decoders
from shmload.formats.tar.encoders import encode
from shmload.formats.tar.tenbin import decode_tenbin, encode_tenbin

PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def decoded(extension: str, data: bytes, decode: Any = True, **options: Any) -> Any:
    decoder = Decoders(decode, **options).of(extension)
    return data if decoder is None else decoder(data)


@pytest.mark.parametrize(
    ("extension", "value"),
    [("txt", "é"), ("html", "<p>"), ("cls", 3), ("class", 4), ("count", -5), ("json", {"a": [1]}), ("seg.json.gz", [2])],
)
def test_values_are_read_back_by_every_extension(extension: str, value: Any) -> None:
    assert value == decoded(extension, encode(extension, value))


@pytest.mark.parametrize("extension", ["npy", "a.npy", "npy.gz"])
def test_arrays_are_read_back(extension: str) -> None:
    for value in (np.arange(6).reshape(2, 3).T, np.float16(3), np.empty((0, 4)), np.array(["ab"])):
        np.testing.assert_array_equal(value, decoded(extension, encode(extension, value)))
    np.testing.assert_equal({"x": np.ones(2)}, decoded("npz", encode("npz", {"x": np.ones(2)})))


@pytest.mark.parametrize("extension", ["jpg", "png", "ppm"])
def test_pictures_of_floats_are_scaled_as_by_webdataset(extension: str) -> None:
    floats = np.linspace(0, 1, 64 * 48, dtype=np.float32).reshape(64, 48)
    for picture in (floats, np.stack([floats, floats**2, 1 - floats], -1)):
        ours = np.asarray(Image.open(io.BytesIO(encode(extension, picture))))
        theirs = np.asarray(Image.open(io.BytesIO(webdataset.writer.default_handlers[extension](picture))))
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match=r"a picture of floats needs values in \[0, 1\], got \[0.0, 255.0\]: scale it, or use npy"):
        encode(extension, 255 * floats)


@pytest.mark.parametrize("dtype", ["u2", "i4"])
def test_picture_with_more_values_than_a_jpeg_is_refused(dtype: str) -> None:
    with pytest.raises(
        ValueError, match=r"a JPEG has 8 bits for each value, got a picture of mode I.*: convert it to uint8, or use png"
    ):
        encode("jpg", np.full((9, 9), 1000, dtype))


@pytest.mark.parametrize("name", ["file", "allow_pickle"])
def test_array_whose_name_numpy_would_take_for_an_argument_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"npz: numpy's savez takes '{name}' for an argument of its own: give the array another name"
    ):
        encode("npz", {"a": np.ones(2), name: np.ones(3)})


@given(st.lists(hnp.arrays(st.sampled_from(["f4", "f8", "i1", "u2", "i8"]), hnp.array_shapes(min_dims=0, min_side=0)), max_size=3))
def test_tenbin_arrays_are_read_back(arrays: list[Any]) -> None:
    data = encode_tenbin(arrays)
    assert data == bytes(webdataset.tenbin.encode_buffer(arrays))
    np.testing.assert_equal(arrays, decode_tenbin(data))


@given(st.binary(max_size=200), st.integers(0, 199), st.integers(0, 255))
def test_damaged_tenbin_is_a_value_error_or_valid(noise: bytes, at: int, value: int) -> None:
    data = bytearray(encode_tenbin([np.arange(5)]) + noise)
    data[at % len(data)] = value
    try:
        found = decode_tenbin(bytes(data))
    except ValueError:
        return
    assert sum(array.nbytes for array in found) <= len(data)


def test_short_tenbin_header_is_a_value_error() -> None:
    chunk = b"~TenBin~" + struct.pack("<q", 8) + b"f4".ljust(8, b"\0") + bytes(56)
    with pytest.raises(ValueError, match="tenbin's header has at least 24 bytes; got 8"):
        decode_tenbin(chunk * 2)


def test_values_that_tenbin_cannot_store_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"tenbin holds arrays of f2, .*; got complex64"):
        encode_tenbin([np.ones(1, np.complex64)])


@pytest.mark.parametrize("extension", ["pkl", "pickle", "pyd", "pth"])
def test_pickles_stay_bytes_unless_requested(extension: str) -> None:
    data = encode(extension, {"a": 1})
    assert data == decoded(extension, data)
    assert decoded(extension, data, allow_pickle=True) == {"a": 1}


def test_npy_of_objects_is_an_error() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"an \.npy of objects is a pickle"):
        decoded("npy", file.getvalue())


def test_expanded_size_of_gzip_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_compression, "EXPANDED_LIMIT", 1000)
    with pytest.raises(ValueError, match="the gzip stream inflates to more than 1000 bytes"):
        decoded("bin.gz", gzip.compress(bytes(2000)))
    with pytest.raises(ValueError, match="the gzip stream is truncated"):
        decoded("bin.gz", gzip.compress(b"abc")[:-4])
    with pytest.raises(ValueError, match="the gzip stream is corrupted"):
        decoded("bin.gz", b"nothing")


def test_empty_gz_member_is_empty() -> None:
    assert (decoded("bin.gz", b""), decoded("txt.gz", b"")) == (b"", "")


def npz_of(method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytearray:
    """Returns a zip file, whose members need not be arrays."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return bytearray(file.getvalue())


def test_expanded_size_of_npz_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    array = encode("npy", np.zeros(100, np.uint8))
    monkeypatch.setattr(numpy_members, "EXPANDED_LIMIT", 2 * len(array))
    assert list(decoded("npz", npz_of(a=array, b=array))) == ["a", "b"]
    with pytest.raises(ValueError, match=f"npz: expands to {3 * len(array)} bytes, more than {2 * len(array)}; store it as"):
        decoded("npz", npz_of(a=array, b=array, c=array))


def test_npz_with_a_wrong_size_does_not_allocate_memory() -> None:
    bomb = npz_of(a=encode("npy", np.zeros(1 << 25, np.uint8)))
    directory = bomb.rindex(b"PK\x01\x02")
    bomb[directory + 24 : directory + 28] = (500).to_bytes(4, "little")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="npz: Bad CRC-32"):
            decoded("npz", bytes(bomb))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"nothing", "npz: File is not a zip file"),
        (bytes(npz_of(a=encode("npy", np.zeros(9)))[:-9]), "npz: File is not a zip file"),
        (bytes(npz_of(zipfile.ZIP_LZMA, a=b"x")), "npz: 'a.npy' is compressed by method 14; numpy writes 0 and 8"),
        (
            bytes(npz_of(a=encode("npy", np.zeros(1 << 10))[:-8])),
            r"its header says float64 of shape \(1024,\), and 8184 bytes follow",
        ),
    ],
)
def test_damaged_npz_is_an_error(data: bytes, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        decoded("npz", data)


def test_npz_members_that_are_not_arrays_stay_bytes() -> None:
    file = io.BytesIO(npz_of(a=encode("npy", np.eye(3)), b=b"text"))
    found, numpys = decoded("npz", file.getvalue()), np.load(file)
    assert list(found) == list(numpys)
    np.testing.assert_array_equal(found["a"], numpys["a"])
    assert found["b"] == numpys["b"] == b"text"


def test_unknown_extensions_and_unrequested_images_stay_bytes() -> None:
    assert (decoded("bin", b"x"), decoded("png", b"x")) == (b"x", b"x")
    assert decoded("cls", b"3", decode=False) == b"3"


def test_custom_decoders_take_precedence_and_are_pickled() -> None:
    mine = pickle.loads(pickle.dumps(Decoders({"cls": float})))
    assert [mine.of("cls")(b"2"), mine.of("id")(b"3")] == [2.0, 3]


@pytest.mark.parametrize(
    ("spec", "shape", "dtype"),
    [("l8", (4, 6), "uint8"), ("rgb8", (4, 6, 3), "uint8"), ("rgb", (4, 6, 3), "float32"), ("rgba", (4, 6, 4), "float32")],
)
def test_images_as_arrays(spec: str, shape: Any, dtype: str) -> None:
    found = decoded("png", encode("png", PICTURE), spec)
    assert (shape, dtype) == (found.shape, found.dtype)
    if spec.startswith("rgb8"):
        np.testing.assert_array_equal(PICTURE, found)


@pytest.mark.parametrize(("spec", "shape"), [("torchrgb8", (3, 4, 6)), ("torch", (3, 4, 6)), ("torchl", (4, 6))])
def test_images_as_tensors(spec: str, shape: Any) -> None:
    found = decoded("png", encode("png", PICTURE), spec)
    assert shape == found.shape
    assert (torch.uint8 if spec.endswith("8") else torch.float32) == found.dtype


@pytest.mark.parametrize(("spec", "mode"), [("pil", "RGB"), ("pill", "L"), ("pilrgba", "RGBA")])
def test_images_as_pictures(spec: str, mode: str) -> None:
    assert mode == decoded("jpg", encode("jpg", PICTURE), spec).mode


@pytest.mark.parametrize("spec", ["", "8", "pil8", "jpeg", "torch8"])
def test_unknown_image_spec_is_an_error(spec: str) -> None:
    with pytest.raises(ValueError, match="not an image spec, which are"):
        Decoders(spec)
