"""Decode images according to webdataset's image specs: Pillow images, numpy arrays (HWC), or torch tensors (CHW).

[torch|pil] l|rgb|rgba [8]        with 8: uint8, else float32 from 0 to 1; "torch" and "pil" alone mean RGB
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

_SPEC = re.compile(r"(torch|pil)?(l|rgb|rgba)?(8)?")


def image_decoder(spec: str) -> Callable[[bytes], Any]:
    """Return the decoder of images for one of webdataset's specs, such as "torchrgb8".

    Raises:
        ValueError: the spec is invalid.
    """
    match = _SPEC.fullmatch(spec)
    if match is None or not (match[1] or match[2]) or (match[3] and (match[1] == "pil" or not match[2])):
        raise ValueError(
            f"decode={spec!r}: not an image spec, which are [torch]l|rgb|rgba with or without 8, torch, pil, pill, pilrgb, pilrgba"
        )
    return partial(_decode_image, match[1] or "", (match[2] or "rgb").upper(), bool(match[3]))


def _decode_image(kind: str, mode: str, is_uint8: bool, data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("decoding images needs Pillow: pip install 'shmload[images]'") from error
    with Image.open(io.BytesIO(data)) as opened:
        picture = opened.convert(mode)
    if kind == "pil":
        return picture
    array = np.array(picture)  # (height, width[, channels])
    if not is_uint8:
        array = array.astype(np.float32) / np.float32(255)
    if not kind:
        return array
    import torch

    tensor = torch.from_numpy(array)
    return tensor.permute(2, 0, 1).contiguous() if array.ndim == 3 else tensor
