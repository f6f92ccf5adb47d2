"""Images as webdataset's specs name them: pictures of Pillow, numpy's HWC arrays, torch's CHW tensors.

[torch|pil] l|rgb|rgba [8]        with 8: uint8, else float32 from 0 to 1; "torch" and "pil" are RGB
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np

_NAMES = """
blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc ftc ftu gbr gif grib h5 hdf png apng jp2 j2k jpc jpf jpx j2c
icns ico im iim tif tiff jfif jpe jpg jpeg mpg mpeg msp pcd pxr pbm pgm ppm pnm psd bw rgb rgba sgi ras tga icb vda
vst webp wmf emf xbm xpm
"""
IMAGE_EXTENSIONS = frozenset(_NAMES.split())
_SPEC = re.compile(r"(torch|pil)?(l|rgb|rgba)?(8)?")


def image_decoder(spec: str) -> Callable[[bytes], Any]:
    """The decoder of a spec.

    Raises:
        ValueError: there is no such spec.
    """
    match = _SPEC.fullmatch(spec)
    if match is None or not (match[1] or match[2]) or (match[3] and (match[1] == "pil" or not match[2])):
        raise ValueError(
            f"decode={spec!r}: no image spec; those are [torch]l|rgb|rgba with or without 8, torch, pil, pill, pilrgb, pilrgba"
        )
    return _Image(match[1] or "", (match[2] or "rgb").upper(), is_uint8=bool(match[3]))


class _Image:
    """Decodes one picture."""

    def __init__(self, kind: str, mode: str, *, is_uint8: bool) -> None:
        self._kind, self._mode, self._is_uint8 = kind, mode, is_uint8

    def __call__(self, data: bytes) -> Any:
        try:
            from PIL import Image
        except ImportError as error:
            raise ImportError("decoding images needs Pillow: pip install 'shmload[images]'") from error
        with Image.open(io.BytesIO(data)) as opened:
            picture = opened.convert(self._mode)
        if self._kind == "pil":
            return picture
        array = np.array(picture)  # (height, width[, channels])
        if not self._is_uint8:
            array = array.astype(np.float32) / np.float32(255)
        if not self._kind:
            return array
        import torch

        tensor = torch.from_numpy(array)
        return tensor.permute(2, 0, 1).contiguous() if array.ndim == 3 else tensor
