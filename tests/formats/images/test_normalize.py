"""Normalize computes torchvision's numbers, equal to those of the decoder in a worker, for every kind of batch."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmload
from shmload import ShmLoader
from shmload._core.resample import look_up
from shmload.formats import CenterCrop, ImageDecoder, ImageFolder, Normalize
from shmload.pipeline import Collate, Conveyer, Map, Range

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PHOTOS = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))
Pair = namedtuple("Pair", ["image", "label"])


def by_hand(images: torch.Tensor, layout: str = "CHW") -> torch.Tensor:
    """Normalizes level by level, in numpy."""
    axis = -3 if layout == "CHW" else -1
    levels = np.moveaxis(images.numpy(), axis, -1).astype(np.float32) / np.float32(255)
    made = (levels - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(made, -1, axis)))


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (9, 2)])
def test_every_number_equals_the_formula(layout: str, shape: tuple[int, ...]) -> None:
    sides = (3, 130, 150) if layout == "CHW" else (130, 150, 3)  # several chunks, the last one smaller
    images = torch.from_numpy(np.random.default_rng(7).integers(0, 256, (*shape, *sides), np.uint8))
    made = Normalize(MEAN, STD, field=None, layout=layout)(images)
    assert made.dtype == torch.float32
    assert torch.equal(made, by_hand(images, layout))
    assert torch.equal(Normalize(MEAN, STD, field=None, layout=layout, dtype=torch.float16)(images), made.to(torch.float16))


def test_noncontiguous_images_are_normalized() -> None:
    images = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)[::2, :, 1:, ::3].expand(2, 3, 7, 3)
    assert torch.equal(Normalize(MEAN, STD, field=None)(images), by_hand(images))


IMAGES = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2)
LABELS = torch.arange(2)


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        ({"image": IMAGES, "label": LABELS}, "image"),
        (OrderedDict(label=LABELS, image=IMAGES), "image"),
        ([IMAGES, LABELS], 0),
        ((LABELS, IMAGES), 1),
        (Pair(IMAGES, LABELS), 0),
    ],
    ids=["dict", "OrderedDict", "list", "tuple", "namedtuple"],
)
def test_batch_keeps_its_type_and_is_not_modified(batch: Any, field: Any) -> None:
    made = Normalize(MEAN, STD, field=field)(batch)
    assert type(made) is type(batch)
    assert torch.equal(made[field], by_hand(IMAGES))
    assert batch[field] is IMAGES
    others = [each for each in (made.values() if hasattr(made, "values") else made) if each.dtype == torch.int64]
    assert len(others) == 1
    assert others[0] is LABELS


@pytest.mark.parametrize("num_workers", [0, 2])
def test_images_of_a_folder_equal_those_normalized_by_workers(num_workers: int) -> None:
    def batches(image: ImageDecoder, **options: Any) -> list[Any]:
        dataset = ImageFolder(PHOTOS, image, labels=range(len(PHOTOS)))
        with ShmLoader(dataset, 3, shuffle=True, seed=1, num_workers=num_workers, **options) as loader:
            return list(loader)

    there = batches(ImageDecoder(CenterCrop(48), normalize=(MEAN, STD)))
    here = batches(ImageDecoder(CenterCrop(48)), after_batch=Normalize(MEAN, STD))
    for a, b in zip(there, here, strict=True):
        assert torch.equal(a["image"], b["image"])
        assert torch.equal(a["label"], b["label"])


def test_ragged_images_become_a_list_of_float_tensors() -> None:
    with ShmLoader(ImageFolder(PHOTOS[:2]), 2, num_workers=1, ragged="list") as loader:
        (batch,) = loader
    made = Normalize(MEAN, STD)(batch)["image"]
    assert [torch.equal(each, by_hand(image)) for each, image in zip(made, batch["image"], strict=True)] == [True, True]


def picture(index: int) -> dict[str, Any]:
    """Returns a gray picture of one level."""
    return {"image": np.full((3, 4, 5), index, np.uint8)}


def test_pipeline_normalizes_whole_batches() -> None:
    stages = [Range(6, repeating=False), Map(picture), Collate(3), Map(Normalize(MEAN, STD))]
    with Conveyer(stages) as pipeline:
        batches = [batch["image"] for batch in pipeline]
    expected = torch.stack([torch.from_numpy(picture(index)["image"]) for index in range(6)])
    assert torch.equal(torch.cat(batches), by_hand(expected))


def test_pickle_leaves_out_device_tensors() -> None:
    normalize = Normalize(MEAN, STD, field=None, layout="HWC", dtype=torch.bfloat16)
    images = torch.ones(1, 2, 2, 3, dtype=torch.uint8)
    made = normalize(images)
    copied = pickle.loads(pickle.dumps(normalize))
    assert repr(copied) == repr(normalize)
    assert copied._constants == {}
    assert torch.equal(copied(images), made)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"x": IMAGES}, {}, r"needs a batch with that field; this one has \['x'\]"),
        (IMAGES, {}, "needs a batch with that field; this one is Tensor"),
        ((IMAGES,), {"field": 3}, "this one is tuple"),
        ({"image": IMAGES.float()}, {}, r"uint8 images of 3 channels, laid out as CHW; got torch.float32 of shape \(2, 3, 2, 2\)"),
        ({"image": IMAGES}, {"layout": "HWC"}, "laid out as HWC"),
        ({"image": IMAGES[0, 0]}, {}, r"got torch.uint8 of shape \(2, 2\)"),
        ({"image": "text"}, {}, "needs a tensor, or a list of them; got str"),
    ],
)
def test_invalid_images_are_an_error(batch: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Normalize(MEAN, STD, **options)(batch)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], []), {}, "for each channel"),
        ((MEAN, STD[:2]), {}, "for each channel"),
        ((MEAN, (1, 0, 1)), {}, "above 0"),
        ((MEAN, STD), {"layout": "NCHW"}, 'layout is "CHW" or "HWC"'),
        ((MEAN, STD), {"dtype": torch.float64}, "dtype is torch.float32, float16 or bfloat16"),
    ],
)
def test_invalid_arguments_are_errors(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Normalize(*arguments, **options)


@pytest.mark.parametrize(
    ("shape", "levels", "message"),
    [
        ((2, 3, 5), (3, 255), r"\(3, 256\), got \(3, 255\)"),
        ((2, 3, 5), (5, 256), r"\(3, 256\)"),
        ((2, 3, 4), (3, 256), "out must have the shape of the images"),
    ],
)
def test_table_that_does_not_fit_the_images_is_an_error(shape: tuple[int, ...], levels: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        look_up(np.zeros((2, 3, 5), np.uint8), np.zeros(shape, np.float32), np.zeros(levels, np.float32), True)
