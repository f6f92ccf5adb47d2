"""Images of bytes made floating-point numbers on the device, so that a quarter of the bytes cross the bus.

The arithmetic is that of torchvision's ToTensor and Normalize: `(x / 255 - mean) / std` in float32, one rounding an operation, and
for a narrower type one more at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_AXES = {"HWC": -1, "CHW": -3}  # where the channels are


@dataclass(frozen=True)
class Normalise:
    """What becomes of a batch's images once they are on the device: `(x / 255 - mean) / std`, by the stream that copied them.

    An image is a uint8 tensor of 4 dimensions, or 3 (one image, or a ragged field's), with as many channels as there are means;
    whatever else a batch holds stays as it is. A batch without any is an error.

    Args:
        mean, std: a number for each channel, of values from 0 to 1.
        dtype: of the result: float32, float16 or bfloat16. It is computed in float32.
        source: "HWC", the channels last, as decoders write them, or "CHW".
        target: the same of the result, which is contiguous. `target="HWC"` with `.permute(0, 3, 1, 2)` is what torch calls
            channels_last, without another copy.
    Raises:
        ValueError, TypeError: they do not go together.
    Example:
        >>> from shmload import Normalise
        >>> Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)).target
        'CHW'
    """

    mean: Sequence[float]
    std: Sequence[float]
    dtype: torch.dtype = torch.float32
    source: Literal["HWC", "CHW"] = "HWC"
    target: Literal["HWC", "CHW"] = "CHW"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(
                f"normalise needs one mean and one std a channel; got {len(self.mean)} means and {len(self.std)} stds"
            )
        if not all(value > 0 for value in self.std):
            raise ValueError(f"normalise divides by std, which is above 0; got {self.std}")
        if self.dtype not in DTYPES:
            raise TypeError(f"normalise makes torch.float32, torch.float16 or torch.bfloat16; got {self.dtype}")
        for name in ("source", "target"):
            if getattr(self, name) not in _AXES:
                raise ValueError(f'{name} is "HWC" or "CHW"; got {getattr(self, name)!r}')

    def is_meant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an image, or some."""
        if tensor.dtype is not torch.uint8 or tensor.ndim not in (3, 4):
            return False
        return tensor.shape[_AXES[self.source]] == len(self.mean)

    def shape_of(self, tensor: torch.Tensor) -> torch.Size:
        """The shape of what is made of it."""
        return self._turned(tensor).shape

    def made_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers, by the current stream of the tensor's device."""
        turned = self._turned(tensor)
        scale, mean, std = _constants(self.mean, self.std, self.target, turned.device)
        values = turned.to(torch.float32, memory_format=torch.contiguous_format)
        return values.div_(scale).sub_(mean).div_(std).to(self.dtype)

    def _turned(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.source == self.target:
            return tensor
        return tensor.movedim(_AXES[self.source], _AXES[self.target])


@lru_cache
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], target: str, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """255, mean and std on the device, made once: that waits for its stream."""
    # 255 as a tensor there: by a number of the host CUDA multiplies with the reciprocal, which rounds twice
    # (pytorch: aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu)
    shape = (-1, 1, 1) if target == "CHW" else (-1,)
    return tuple(torch.tensor(values, dtype=torch.float32, device=device).view(shape) for values in ((255,), mean, std))
