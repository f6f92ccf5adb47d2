"""Normalize: float images of a delivered batch's bytes, in the trainer, on the device where they lie.

uint8 is a quarter of float32: that much less is written to the ring by the workers, and copied to a device. The numbers are
those that `ImageDecoder(normalize=...)` makes in a worker: torchvision's arithmetic, (level / 255 - mean) / deviation in float32.
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
    """Makes normalized floats of the images in a batch; for `after_batch` of ShmLoader, or a Map behind Collate of a pipeline.

    Args:
        mean, std: a number for each channel, on the scale from 0 to 1.
        field: of the batch: a key or an index; None: the batch is the images.
        layout: "CHW" or "HWC", as in the batch.
        dtype: of the result: torch.float32, float16 or bfloat16. All is reckoned in float32, and rounded last.
    Raises:
        ValueError, TypeError: an argument is none of these; (by a call) the field is no uint8 images of so many channels.
    Thread/process safety: any number of callers. Pickles.
    Example:
        >>> import torch
        >>> from shmload.formats import Normalize
        >>> batch = {"image": torch.full((2, 3, 1, 1), 255, dtype=torch.uint8), "label": torch.arange(2)}
        >>> Normalize([0.5, 0.5, 0.5], [0.5, 0.5, 0.25])(batch)["image"].flatten().tolist()
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
        self._constants: dict[torch.device, list[torch.Tensor]] = {}  # of where images lay: a copy to a device takes its time

    def __call__(self, batch: Any) -> Any:
        """The batch with float images in place of its uint8 ones.

        Args:
            batch: images of shape (..., channels, height, width), for "HWC" (..., height, width, channels); or a list of
                them, as a ragged field is delivered; or a mapping, list or tuple that holds such a field.
        Returns:
            images in new memory, on the device of those given; around them a shallow copy of the batch.
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
            fields[self.field] = self._images(images)  # type: ignore[index]  # a tuple has taken it
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
        """255, the means, the deviations. As tensors: a GPU multiplies by the reciprocal of a number, which may differ."""
        if device not in self._constants:
            shape = (-1, 1, 1) if self.layout == "CHW" else (-1,)
            values = [torch.tensor(each, dtype=torch.float32) for each in (255.0, self.mean, self.std)]
            self._constants[device] = [values[0].to(device), *(each.reshape(shape).to(device) for each in values[1:])]
        return self._constants[device]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_constants": {}}

    def __repr__(self) -> str:
        return f"Normalize({self.mean}, {self.std}, field={self.field!r}, layout={self.layout!r}, dtype={self.dtype})"
