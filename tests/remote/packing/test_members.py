"""The members that samples are stored as: images and labels of every kind are read back with their type and value, by shmload and
webdataset.
"""

from __future__ import annotations

import io
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

import shmload
from shmload.remote import RemoteDataset, upload_cv_dataset
from shmload.remote.packing.members import Members, members_of
from shmload.storage.local_store import LocalStore
from tests.remote.packing.packing_kit import encoded, packed, samples_in

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves files open
PHOTO = Path(shmload.__file__).parent / "data" / "chelsea.jpg"
RNG = np.random.default_rng(5)
RGB = RNG.integers(0, 256, (5, 7, 3), np.uint8)


def written(sample: Any, quality: int | None = None) -> dict[str, bytes]:
    found: Members = members_of(sample, quality)
    return dict(found)


def read_back(folder: Path, sample: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Packs a sample and returns it as read by shmload and by webdataset."""
    manifest = packed([sample], LocalStore(folder))
    (ours,) = samples_in(folder, manifest, **options)
    url = str(folder / manifest.shards[0].name)
    (theirs,) = webdataset.WebDataset(url, shardshuffle=False, empty_check=False).decode(*([options["decode"]] if options else []))
    return ours, theirs


LABELS: dict[str, tuple[Any, str, Any]] = {  # name -> (value, extension, value that is read back)
    "int": (3, "cls", 3),
    "negative": (-7, "cls", -7),
    "large": (1 << 70, "cls", 1 << 70),
    "numpy's int": (np.int16(3), "cls", 3),
    "tensor of one int": (torch.tensor(3), "cls", 3),
    "array of one int": (np.array(3), "cls", 3),
    "bool": (True, "json", True),
    "numpy's bool": (np.bool_(False), "json", False),
    "float": (0.1, "json", 0.1),
    "None": (None, "json", None),
    "str": ("três\n", "txt", "três\n"),
    "empty str": ("", "txt", ""),
    "list": ([1, "a", None, [2.5]], "json", [1, "a", None, [2.5]]),
    "tuple": ((1, 2), "json", [1, 2]),
    "dict": ({"a": {"b": [1]}}, "json", {"a": {"b": [1]}}),
    "bytes": (b"\0\xff", "bin", b"\0\xff"),
    "array": (np.arange(6, dtype=np.int16).reshape(2, 3), "npy", np.arange(6, dtype=np.int16).reshape(2, 3)),
    "tensor": (torch.tensor([0.5, -1]), "npy", np.array([0.5, -1], np.float32)),
    "numpy's float": (np.float32(0.1), "npy", np.float32(0.1)),
    "tensor of one float": (torch.tensor(0.5), "npy", np.float32(0.5)),
    "no elements": (np.empty((0, 4)), "npy", np.empty((0, 4))),
    "dict of arrays": ({"boxes": torch.ones(2, 4), "n": 3}, "npz", {"boxes": np.ones((2, 4), np.float32), "n": np.array(3)}),
    "list of arrays": ([np.ones(2), np.zeros(1)], "npz", {"0": np.ones(2), "1": np.zeros(1)}),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_keep_their_type(name: str, tmp_path: Path) -> None:
    value, extension, wanted = LABELS[name]
    ours, theirs = read_back(tmp_path, (RGB, value))
    np.testing.assert_equal(ours[extension], wanted)
    if value is not None:  # webdataset takes None for "not decoded"
        np.testing.assert_equal(dict(theirs["npz"]) if extension == "npz" else theirs[extension], wanted)
    assert type(wanted) is type(ours[extension]) or extension == "npy"
    assert {"__key__", "png", extension} == set(ours)


def test_path_is_stored_as_its_file(tmp_path: Path) -> None:
    ours, _ = read_back(tmp_path, (str(PHOTO), PHOTO.parent / "LICENCES"))
    assert {"__key__": "00000000", "jpg": PHOTO.read_bytes(), "bin": (PHOTO.parent / "LICENCES").read_bytes()} == ours


PICTURES = {
    "1": Image.fromarray(RGB).convert("1"),
    "L": Image.fromarray(RGB).convert("L"),
    "LA": Image.fromarray(RGB).convert("LA"),
    "P": Image.fromarray(RGB).quantize(8),
    "RGB": Image.fromarray(RGB),
    "RGBA": Image.fromarray(np.dstack([RGB, RGB[:, :, :1]])),
    "I;16": Image.fromarray(RGB[:, :, 0].astype(np.uint16) * 257),
    "I": Image.fromarray(RGB[:, :, 0].astype(np.int32) * 70_000),
    "F": Image.fromarray(RGB[:, :, 0].astype(np.float32) / 7),
    "CMYK": Image.fromarray(RGB).convert("CMYK"),
    "YCbCr": Image.fromarray(RGB).convert("YCbCr"),
    "LAB": Image.frombytes("LAB", (7, 5), RGB.tobytes()),
}


@pytest.mark.parametrize("mode", PICTURES)
def test_images_of_every_mode_are_read_back(mode: str) -> None:
    picture = PICTURES[mode]
    assert mode == picture.mode
    ((extension, data),) = written(picture).items()
    again = Image.open(io.BytesIO(data))
    assert ("tif" if mode in ("I", "F", "CMYK", "YCbCr", "LAB") else "png", mode) == (extension, again.mode)
    assert picture.tobytes() == again.tobytes()
    assert picture.getpalette() == again.getpalette()


def test_palette_keeps_its_transparency() -> None:
    picture = PICTURES["P"].copy()
    picture.info["transparency"] = 0
    again = Image.open(io.BytesIO(written(picture)["png"]))
    assert picture.convert("RGBA").tobytes() == again.convert("RGBA").tobytes()


def test_image_mode_that_no_format_supports_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^field 'image': an image of mode HSV cannot be stored, only one of 1, CMYK, .*: return image.convert\('RGB'\), for example$",
    ):
        members_of((PICTURES["RGB"].convert("HSV"), 1), None)


grids = hnp.array_shapes(min_dims=2, max_dims=2, max_side=6)


@given(hnp.arrays(np.uint8, grids.flatmap(lambda shape: st.sampled_from([shape, (*shape, 1), (*shape, 3), (*shape, 4)]))))
@settings(max_examples=50)
def test_byte_arrays_are_stored_as_png_and_read_back(array: Any) -> None:
    if array.ndim == 3 and array.shape[0] in (1, 3, 4):
        array = np.repeat(array, 2, axis=0)
    again = np.asarray(Image.open(io.BytesIO(written(array)["png"])))
    np.testing.assert_array_equal(array[:, :, 0] if array.shape[2:] == (1,) else array, again)


SHAPES = [  # (shape, whether it is a tensor, the image's height, width and channels)
    ((5, 7), False, (5, 7)),
    ((5, 7, 3), False, (5, 7, 3)),
    ((3, 5, 7), False, (5, 7, 3)),
    ((3, 5, 4), False, (3, 5, 4)),
    ((3, 5, 4), True, (5, 4, 3)),
    ((1, 5, 7), True, (5, 7)),
    ((5, 7, 4), True, (5, 7, 4)),
]


@pytest.mark.parametrize(("shape", "is_tensor", "wanted"), SHAPES)
def test_channel_axis_follows_the_documented_rule(shape: Any, is_tensor: bool, wanted: Any) -> None:
    array = RNG.integers(0, 256, shape, np.uint8)
    pixels = np.asarray(Image.open(io.BytesIO(written(torch.from_numpy(array) if is_tensor else array)["png"])))
    assert wanted == pixels.shape
    straight = array if array.ndim == 2 or shape[-len(wanted) :] == wanted else array.transpose(1, 2, 0)
    np.testing.assert_array_equal(straight.reshape(wanted), pixels)


def test_output_of_to_tensor_is_stored_as_png_and_read_back_exactly(tmp_path: Path) -> None:
    tensor = torch.from_numpy(RGB).permute(2, 0, 1).float() / 255
    for found in read_back(tmp_path, (tensor, 1), decode="torchrgb"):
        torch.testing.assert_close(tensor, found["png"], rtol=0, atol=0)


@pytest.mark.parametrize(
    "array", [RGB / 254, RGB - 0.5, RGB.astype(np.int64), np.full((2, 2), np.nan), RGB[None], RGB.transpose(2, 0, 1)[:2]]
)
def test_images_that_png_cannot_represent_are_stored_as_npy(array: Any, tmp_path: Path) -> None:
    ours, theirs = read_back(tmp_path, (array, 1))
    np.testing.assert_array_equal(array, ours["npy"])
    np.testing.assert_array_equal(array, theirs["npy"])


def test_16_bit_pixels_are_kept() -> None:
    array = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
    np.testing.assert_array_equal(array, np.asarray(Image.open(io.BytesIO(written(array)["png"]))))


@pytest.mark.parametrize("image", [RGB, torch.from_numpy(RGB), PICTURES["RGB"], PICTURES["L"]])
def test_jpeg_is_used_only_if_a_quality_is_given(image: Any) -> None:
    assert list(written(image)) == ["png"]
    (extension, small), (_, large) = (next(iter(written(image, quality).items())) for quality in (20, 95))
    assert extension == "jpg"
    assert Image.open(io.BytesIO(small)).format == "JPEG"
    assert len(small) < len(large)


def test_quality_does_not_make_jpeg_of_images_that_jpeg_cannot_represent() -> None:
    assert list(written(PICTURES["RGBA"], 90)) == ["png"]
    assert list(written(PICTURES["P"], 90)) == ["png"]


@pytest.mark.parametrize(
    ("extension", "format"),
    [("jpg", "JPEG"), ("png", "PNG"), ("gif", "GIF"), ("bmp", "BMP"), ("tif", "TIFF"), ("webp", "WEBP"), ("ppm", "PPM")],
)
def test_encoded_images_are_copied_with_the_suffix_of_their_format(extension: str, format: str, tmp_path: Path) -> None:
    data = encoded(PICTURES["RGB"], format)
    (tmp_path / "photo.png").write_bytes(data)
    assert {extension: data} == written(data) == written(tmp_path / "photo.png") == written(str(tmp_path / "photo.png"))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("m.pgm", np.array([[70000, -1]], np.int32)),
        ("m.pgm", np.array([[-7]], np.int16)),
        ("m.tif", np.array([[-7]], np.int8)),
        ("m.tif", np.array([[70000]], np.uint32)),
        ("m.ppm", np.zeros((2, 2, 4), np.uint8)),
        ("m.pgm", Image.new("I", (2, 2), 70000)),
    ],
)
def test_picture_that_its_format_cannot_store_is_refused(name: str, array: Any) -> None:
    with pytest.raises(ValueError, match=r"(stores integers of 8 or 16 bits|store gray and RGB pictures of at most 16 bits)"):
        written({name: array})


def test_picture_of_large_numbers_is_stored_as_tiff(tmp_path: Path) -> None:
    manifest = packed([{"m.tif": np.array([[70000, -1]], np.int32)}], LocalStore(tmp_path))
    (sample,) = samples_in(tmp_path, manifest)
    with Image.open(io.BytesIO(sample["m.tif"])) as image:
        assert np.asarray(image).tolist() == [[70000, -1]]


def test_bytes_that_are_not_an_image_are_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(b"sound")
    assert written(b"sound") == {"bin": b"sound"}
    assert written(tmp_path / "a.flac") == {"flac": b"sound"}


def test_dict_keeps_its_names(tmp_path: Path) -> None:
    sample = {
        "image": RGB,
        "label": 3,
        "caption": "a cat",
        "Boxes/All": np.ones((2, 4)),
        "mask": PICTURES["L"],
        "depth.npy": np.zeros(2),
        "json": {"a": 1},
        "left.jpg": PHOTO.read_bytes(),
        "__note__": "left out",
    }
    ours, theirs = read_back(tmp_path, sample)
    names = {"png", "cls", "caption.txt", "boxes_all.npy", "mask.png", "depth.npy", "json", "left.jpg"}
    assert names == set(ours) - {"__key__"} == {name for name in theirs if not name.startswith("__")}
    assert (ours["caption.txt"], theirs["caption.txt"], ours["cls"], theirs["cls"]) == ("a cat", "a cat", 3, 3)
    assert PHOTO.read_bytes() == ours["left.jpg"]
    np.testing.assert_array_equal(np.ones((2, 4)), ours["boxes_all.npy"])


def test_named_tuple_is_stored_as_a_dict_of_its_fields() -> None:
    assert list(written(namedtuple("Found", "image label score")(RGB, 1, 0.5))) == ["cls", "png", "score.json"]


NAMED: dict[str, tuple[dict[str, Any], str, Any]] = {  # name -> (sample, its member, value that is read back)
    "an id of letters": ({"id": "a7"}, "id.txt", "a7"),
    "an id of digits": ({"id": "07"}, "id.txt", "07"),
    "an id": ({"id": np.int64(7)}, "id", 7),
    "a class in an array": ({"class": np.array([7])}, "class", 7),
    "a class in a tensor": ({"class": torch.arange(3)}, "class.npy", np.arange(3)),
    "an id of bytes": ({"id": b"5f2b-9"}, "id.bin", b"5f2b-9"),
    "a text of another encoding": ({"text": b"caf\xe9"}, "text.bin", b"caf\xe9"),
    "a text of bytes": ({"text": b"caf\xc3\xa9"}, "text", "caf\u00e9"),
    "a broken index": ({"index": 3.7}, "index.json", 3.7),
    "no count": ({"count": None}, "count.json", None),
    "a text that is none": ({"text": 5}, "text.cls", 5),
    "a name that is a format's, too": ({"eps": 1e-5}, "eps.json", 1e-5),
    "an array by the name of another": ({"rgb": np.ones(3)}, "rgb.npy", np.ones(3)),
    "JSON as it is": ({"json": '{"a": 1}'}, "json", {"a": 1}),
    "a sound": ({"wav": b"RIFF...."}, "wav", b"RIFF...."),
    "a named sound": ({"left.mp3": b"ID3"}, "left.mp3", b"ID3"),
    "an array of sound": ({"wav": np.ones(3, np.int16)}, "wav.npy", np.ones(3, np.int16)),
    "a tensor that requires grad": ({"npy": torch.ones(2, requires_grad=True)}, "npy", np.ones(2, np.float32)),
}


@pytest.mark.parametrize("name", NAMED)
def test_field_name_is_used_as_extension_if_its_value_is_read_back(name: str, tmp_path: Path) -> None:
    sample, member, wanted = NAMED[name]
    manifest = packed([sample], LocalStore(tmp_path))
    (indexed,) = samples_in(tmp_path, manifest)
    (fluent,) = RemoteDataset.from_urls(str(tmp_path)).decode()
    for ours in (indexed, fluent):
        assert {member} == {each for each in ours if not each.startswith("__")}
        np.testing.assert_equal(ours[member], wanted)
        assert type(ours[member]) is type(wanted)


@pytest.mark.parametrize("name", ["jpg", "left.jpg", "jpeg"])
@pytest.mark.parametrize("kind", [str, Path, Image.open])
def test_file_under_its_own_format_is_not_encoded_again(kind: Any, name: str) -> None:
    assert written({name: kind(PHOTO)}) == {name: PHOTO.read_bytes()}


def test_image_is_encoded_in_the_format_named_by_its_field() -> None:
    tensor = torch.from_numpy(RGB).permute(2, 0, 1)
    for value in (RGB, tensor, PICTURES["RGB"], tensor.double() / 255):
        np.testing.assert_array_equal(RGB, np.asarray(Image.open(io.BytesIO(written({"seg.png": value})["seg.png"]))))
    small, large = (len(written({"left.jpg": tensor}, quality)["left.jpg"]) for quality in (20, None))
    assert small < large


@pytest.mark.parametrize(
    "data", [b"BM" + bytes(range(1, 31)), b"P5 hello", b"P6\xff\xff\xff", b"GIF8 or more", b"BMW is a car", b"RIFF\0\0\0\0WAVE"]
)
def test_bytes_that_only_begin_like_an_image_are_stored_as_bytes(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes(data)
    assert written({"hash": data, "file": tmp_path / "a.dat"}) == {"hash.bin": data, "file.dat": data}


CYCLIC: list[Any] = [1]
CYCLIC.append(CYCLIC)
REFUSED = {
    "too many": (
        (1, 2, 3),
        TypeError,
        "a sample is an image and a label, or a dict of named fields; this one is of type tuple and length 3: return a dict",
    ),
    "nothing": ({}, ValueError, "a sample needs at least one field; this dict has none"),
    "no name": ({3: 1}, TypeError, "the fields of a sample have names that are str; this one has 3"),
    "an object": (
        (RGB, object()),
        TypeError,
        "field 'label': no format stores values of type object: return an image, array, number, str, bytes, or a list or dict of these",
    ),
    "a set in a dict": (
        {"a": {"b": {1}}},
        TypeError,
        "field 'a': no format stores values of type dict with set under 'b': JSON cannot, and .npz stores only arrays",
    ),
    "objects": (
        (RGB, np.array([{}])),
        TypeError,
        "field 'label': an array of objects would be a pickle: return numbers, or a list of str",
    ),
    "bfloat16": (
        (RGB, torch.ones(2, dtype=torch.bfloat16)),
        TypeError,
        "field 'label': a tensor of torch.bfloat16 has no numpy type: return tensor.float(), for example",
    ),
    "two of one": (
        {"a": 1, "A": 2},
        ValueError,
        "two fields of the sample would both be its member 'a.cls': give one another name",
    ),
    "a name of other letters": (
        {"метка": 1, "a": 2},
        ValueError,
        "the field 'метка' would be the member '_____', which readers leave out: only a-z, 0-9, `_`, `.` and `-` of a name are "
        "kept, and names that begin with `__` are no fields. Give it another name",
    ),
    "an integer that is none": (
        {"a.cls": 3.7},
        TypeError,
        "field 'a.cls': an integer is needed, got 3.7: use an extension that can store it, such as json or npy",
    ),
    "a text for an integer": (
        {"a.cls": "cat"},
        TypeError,
        "field 'a.cls': 'cls' holds no text, and got 'cat': end the name in .txt, or give bytes",
    ),
    "an array in the place of several": (
        {"a.npz": np.ones(3)},
        TypeError,
        "field 'a.npz': npz: a dict or list of arrays is needed, got a value of type ndarray: use npy for one array",
    ),
    "another format": ({"png": PHOTO}, ValueError, f"field 'png': {PHOTO} is a file of jpg: end the name in that, or in nothing"),
    "no image": (
        {"a.png": np.ones(3)},
        ValueError,
        "field 'a.png': an array of shape (3,) is not an image: it has 2 extents, or 3 of which one is 1, 3 or 4",
    ),
    "a list that contains itself": (
        {"a": CYCLIC},
        ValueError,
        "field 'a': a value of type list contains itself, or is nested too deeply for JSON: return a flatter value",
    ),
    "no such encoder": ({"a.txt": 3}, TypeError, "field 'a.txt': text is str or bytes; got int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_error_for_an_unsupported_value_names_the_field(name: str) -> None:
    sample, kind, text = REFUSED[name]
    with pytest.raises(kind) as caught:
        members_of(sample, None)
    assert text == str(caught.value)


MASKED = np.ma.array([[1, 2], [3, 4]], np.uint8, mask=[[0, 0], [0, 1]])


@pytest.mark.parametrize(
    ("name", "value"),
    [("x", MASKED), ("image", MASKED), ("x", {"a": MASKED}), ("x", [MASKED, MASKED]), ("x", MASKED[1, 1])]
    + [(f"x.{extension}", MASKED) for extension in ("npy", "png", "ten")]
    + [("x.npz", {"a": MASKED}), ("x.ten", [MASKED]), ("x.cls", MASKED[1, 1]), ("x.npy.gz", MASKED)],
)
def test_masked_array_is_an_error_because_no_format_stores_its_mask(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^field '{name}': a masked array would lose its mask: give array.filled\(value\)"):
        members_of({name: value}, None)


def test_error_names_a_missing_file() -> None:
    with pytest.raises(OSError, match=r"^field 'image': .*No such file.*'/nowhere/x.jpg'$"):
        members_of(("/nowhere/x.jpg", 1), None)


FLOATS = [RNG.normal(size=(3, 4, 5)).astype(np.float32) for _ in range(20)]
PIXELS = [np.rint(np.abs(each) * 50).clip(0, 255).astype(np.float32) / np.float32(255) for each in FLOATS]
BLANK = np.zeros_like(FLOATS[0])


def test_blank_float_image_is_stored_like_the_dataset_s_others(tmp_path: Path) -> None:
    for number, (images, kind) in enumerate([(FLOATS, "npy"), (PIXELS, "png")]):
        for at in (0, 5):
            samples = [(BLANK if index == at else image, index) for index, image in enumerate(images)]
            for form, dataset in (("list", samples), ("stream", iter(samples))):
                for workers in (0, 2):
                    folder = tmp_path / f"{number}-{at}-{form}-{workers}"
                    manifest = upload_cv_dataset(dataset if form == "list" else iter(samples), bucket=str(folder), workers=workers)
                    assert manifest.extensions == ("cls", kind)
                    view = RemoteDataset.from_urls(str(folder)).indexed()
                    if kind == "npy":
                        assert all(np.array_equal(sample["npy"], samples[sample["cls"]][0]) for sample in view)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_stream", [False, True])
def test_float_image_that_does_not_fit_the_dataset_s_format_is_an_error(tmp_path: Path, is_stream: bool, workers: int) -> None:
    images = [*PIXELS[:13], FLOATS[0], *PIXELS[13:]]  # the samples that are read first are others
    samples = [{"image": image, "label": index} for index, image in enumerate(images)]
    message = r"field 'image': this image of float32 has values that are not k / 255[\s\S]*'image.npy'[\s\S]*sample 13 of the"
    with pytest.raises(ValueError, match=message):
        upload_cv_dataset(iter(samples) if is_stream else samples, bucket=str(tmp_path / "a"), workers=workers)
    named = [{"image.npy": sample["image"], "label": sample["label"]} for sample in samples]
    assert upload_cv_dataset(named, bucket=str(tmp_path / "b"), workers=workers).extensions == ("cls", "image.npy")


def test_appended_float_images_have_the_format_of_the_existing_ones(tmp_path: Path) -> None:
    for compress in (None, "samples"):
        folder = str(tmp_path / str(compress))
        upload_cv_dataset(FLOATS, bucket=folder, workers=0, compress=compress)
        for again in (False, True):
            found = upload_cv_dataset(PIXELS, bucket=folder, workers=0, append=True, compress=compress)
            assert (found.num_samples, len(found.extensions)) == (40, 1), again
    pictures = str(tmp_path / "pictures")
    upload_cv_dataset(PIXELS, bucket=pictures, workers=0)
    with pytest.raises(ValueError, match="not k / 255"):
        upload_cv_dataset(FLOATS, bucket=pictures, workers=0, append=True)
