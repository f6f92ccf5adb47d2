"""Facts about the installed versions that tests need."""

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
