"""What tests need to know of the versions they run on."""

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
