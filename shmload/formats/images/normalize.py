"""Normalize: convert the uint8 images of a batch to normalized floats, in the trainer, on the device where they are.

uint8 takes a quarter of the memory of float32, so workers write less to the ring and less is copied to the device. The values are
the same as those of `ImageDecoder(normalize=...)` in a worker: torchvision's arithmetic, (level / 255 - mean) / deviation in
float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from shmload._core.resample import look_up
from shmload.formats.images.decoder import levels_of


class Normalize:
    """A function that converts the images of a batch to normalized floats: for `after_batch` of ShmLoader, or a Map after Collate.

    Args:
        mean, std: one number per channel, on the scale from 0 to 1.
        field: the field of the batch, a key or an index; None if the batch is the images.
        layout: layout in the batch, "CHW" or "HWC".
        dtype: dtype of the result: torch.float32, float16 or bfloat16. All computations are in float32, and the result is rounded.
    Raises:
        ValueError, TypeError: an argument is invalid; (when called) the field is not uint8 images with this number of channels.
    Thread/process safety: any number of callers. Picklable.
    Example:
        >>> import torch
        >>> from shmload.formats import Normalize
        >>> white = torch.full((2, 3, 1, 1), 255, dtype=torch.uint8)
        >>> normalize = Normalize([0.5, 0.5, 0.5], [0.5, 0.5, 0.25])
        >>> normalize({"image": white, "label": torch.arange(2)})["image"].flatten().tolist()
        [1.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        field: str | int | None = "image",
        layout: str = "CHW",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        if not self.mean or len(self.mean) != len(self.std) or not all(each > 0 for each in self.std):
            raise ValueError(f"a mean and a standard deviation above 0 are needed for each channel; got {mean} and {std}")
        if layout not in ("CHW", "HWC"):
            raise ValueError(f'layout is "CHW" or "HWC"; got {layout!r}')
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"dtype is torch.float32, float16 or bfloat16; got {dtype}")
        self.field, self.layout, self.dtype = field, layout, dtype
        self._levels = levels_of(self.mean, self.std)
        self._constants: dict[torch.device, list[torch.Tensor]] = {}  # per device, because copying to a device takes time

    def __call__(self, batch: Any) -> Any:
        """Return the batch with float images in place of its uint8 images.

        Args:
            batch: images of shape (..., channels, height, width), or for "HWC" (..., height, width, channels); or a list of them,
                as in a ragged field; or a mapping, list or tuple that contains such a field.
        Returns:
            Images in new memory, on the same device; otherwise a shallow copy of the batch.
        """
        if self.field is None:
            return self._images(batch)
        try:
            images = batch[self.field]
        except (KeyError, IndexError, TypeError) as error:
            has = f"has {list(batch)}" if isinstance(batch, MutableMapping) else f"is {type(batch).__name__}"
            raise ValueError(f"Normalize(field={self.field!r}) needs a batch with that field; this one {has}") from error
        if isinstance(batch, tuple):
            fields = list(batch)
            fields[self.field] = self._images(images)  # type: ignore[index]  # the tuple has accepted it as an index
            return type(batch)(*fields) if hasattr(batch, "_fields") else tuple(fields)
        batch = copy.copy(batch)
        batch[self.field] = self._images(images)
        return batch

    def _images(self, images: Any) -> Any:
        if isinstance(images, list):
            return [self._images(each) for each in images]
        channels = len(self.mean)
        axis = -3 if self.layout == "CHW" else -1
        if not isinstance(images, torch.Tensor) or images.is_nested:
            raise TypeError(f"Normalize needs a tensor, or a list of them; got {type(images).__name__}")
        if images.dtype != torch.uint8 or images.ndim < 3 or images.shape[axis] != channels:
            raise ValueError(
                f"Normalize needs uint8 images of {channels} channels, laid out as {self.layout}; got {images.dtype} of shape "
                f"{tuple(images.shape)}"
            )
        if images.device.type == "cpu":
            images = images.contiguous()
            out = torch.empty(images.shape, dtype=torch.float32)
            is_planar = self.layout == "CHW"
            shape = (-1, channels, math.prod(images.shape[-2:])) if is_planar else (-1, math.prod(images.shape[-3:-1]), channels)
            if images.numel():
                look_up(images.view(shape).numpy(), out.view(shape).numpy(), self._levels, is_planar)
        else:
            scale, mean, std = self._constants_on(images.device)
            out = images.to(torch.float32).div_(scale).sub_(mean).div_(std)
        return out if self.dtype == torch.float32 else out.to(self.dtype)

    def _constants_on(self, device: torch.device) -> list[torch.Tensor]:
        """Return 255, the means and the deviations as tensors. A GPU would replace division by a number with its reciprocal."""
        if device not in self._constants:
            shape = (-1, 1, 1) if self.layout == "CHW" else (-1,)
            values = [torch.tensor(each, dtype=torch.float32) for each in (255.0, self.mean, self.std)]
            self._constants[device] = [values[0].to(device), *(each.reshape(shape).to(device) for each in values[1:])]
        return self._constants[device]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_constants": {}}

    def __repr__(self) -> str:
        return f"Normalize({self.mean}, {self.std}, field={self.field!r}, layout={self.layout!r}, dtype={self.dtype})"
