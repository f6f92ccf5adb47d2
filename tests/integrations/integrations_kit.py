"""Small datasets and models, at module level so that every start method can pickle them."""

from __future__ import annotations

from typing import Any

import torch


class Numbers:
    """Samples of their own number and noise, which seed mode keys by (seed, epoch, index)."""

    def __init__(self, n: int = 22) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), float(index)), "noise": torch.rand(()), "index": index}


class Tiny(torch.nn.Module):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x: Any) -> Any:
        return self.linear(x / 100).mean()


def facts(batch: Any) -> Any:
    """Returns the indices and noise of a batch, for comparison."""
    return [batch["index"].tolist(), batch["noise"].tolist()]
