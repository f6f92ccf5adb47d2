"""Train a small GPT on the text of this repository: its pages and its Python files, as bytes.

Shows: a file of uint16 tokens; whole documents, packed by best fit into windows of a fixed length; segment IDs, which restrict
attention to one document and mark padding; and a checkpoint from which another loader continues with bit-identical losses. The
content of a window never changes, so a resume reads nothing again.

    python examples/language_model.py [--quick]

prints the packing (with the last window's number of padding tokens, and of tokens of each document), six losses, how long the
trainer waited, and whether the losses after the resume equal those of the uninterrupted run:

    7737 windows, density 0.998; segments of the last: [59, 35, 35]
    step 20: loss 3.924
    ...
    step 120: loss 2.624
    waited 0.3% of 10.4 s: 3840 windows
    resumed at step 60 with 2 workers: 60 losses, bit-identical
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from shmload import ShmLoader
from shmload.formats import TokenDataset

WINDOW = 129  # the model reads all tokens of a window but the last, and predicts all but the first
END = 256  # the token after each document; smaller tokens are bytes
WIDTH, HEADS, LAYERS = 64, 4, 2


def write_tokens(path: Path, max_bytes: int) -> None:
    """Write the text of the repository as little-endian uint16. Each paragraph is a document."""
    root = Path(__file__).parents[1]
    files = [*sorted(root.glob("*.md")), *sorted(root.glob("docs/*.md")), *sorted(root.glob("shmload/**/*.py"))]
    documents = [d for d in b"\n\n".join(map(Path.read_bytes, files))[:max_bytes].split(b"\n\n") if d.strip()]
    tokens = [np.append(np.frombuffer(document, np.uint8).astype("<u2"), END) for document in documents]
    np.concatenate(tokens).astype("<u2").tofile(path)


class Block(nn.Module):
    """Attention within a document, then a feed-forward layer for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # (batch, length, 3 * width) -> three of (batch, heads, length, width / heads)
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.layer(self.between(x))  # type: ignore[no-any-return]


class SmallGPT(nn.Module):
    """A model that predicts the next token from tokens, their segments and their positions within the segments."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(END + 1, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, END + 1))

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        # (batch, 1, length, length): a token attends to itself and to earlier tokens of its document
        mask = torch.tril(segments[:, None, :, None] == segments[:, None, None, :])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)  # type: ignore[no-any-return]


class Training:
    """A model, its optimizer and its loader: everything that a checkpoint contains."""

    def __init__(self, dataset: TokenDataset, batch_size: int, num_workers: int) -> None:
        torch.manual_seed(0)
        self.model = SmallGPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)
        self.loader = ShmLoader[Any](dataset, batch_size, shuffle=True, num_workers=num_workers, drop_last=True, seed=7)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}

    def losses(self) -> Iterator[float]:
        """Train on each batch, epoch after epoch. Yield each loss."""
        while True:
            for batch in self.loader:
                tokens, segments = batch["tokens"], batch["segment_ids"]
                predicted = self.model(tokens[:, :-1], segments[:, :-1], batch["position_ids"][:, :-1])
                # without padding, and without the first token of the next document
                is_target = (segments[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1])
                loss = functional.cross_entropy(predicted[is_target], tokens[:, 1:][is_target])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                yield loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on this repository's text.")
    parser.add_argument("--quick", action="store_true", help="train for few steps, only to see that it works")
    options = parser.parse_args()
    torch.set_num_threads(1)  # leaves a core to the workers
    num_steps, batch_size, max_bytes = (24, 16, 60_000) if options.quick else (120, 32, 1_000_000)
    saved_step = num_steps // 2
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder, "tokens.bin"), max_bytes)
        dataset = TokenDataset(f"{folder}/tokens.bin", WINDOW, dtype="uint16", separator=END, pack=True)
        segments = np.bincount(dataset[len(dataset) - 1]["segment_ids"]).tolist()
        print(f"{len(dataset)} windows, density {dataset.density:.3f}; segments of the last: {segments}")

        training, losses, begin = Training(dataset, batch_size, num_workers=1), [], perf_counter()
        with training.loader as loader:
            for step, loss in enumerate(training.losses(), 1):
                losses.append(loss)
                if step % (num_steps // 6) == 0:
                    print(f"step {step}: loss {np.mean(losses[-4:]):.3f}")
                if step == saved_step:
                    states = {name: part.state_dict() for name, part in training.parts.items()}
                    torch.save(states, f"{folder}/checkpoint.pt")
                if step == num_steps:
                    break
            stats, train_s = loader.stats(), perf_counter() - begin
        print(f"waited {stats['wait_s'] / train_s:.1%} of {train_s:.1f} s: {stats['samples']} windows")

        resumed = Training(dataset, batch_size, num_workers=2)  # stands for another process, with more workers
        for name, state in torch.load(f"{folder}/checkpoint.pt").items():
            resumed.parts[name].load_state_dict(state)
        with resumed.loader:
            again = [loss for _, loss in zip(range(saved_step, num_steps), resumed.losses(), strict=False)]
        same = "bit-identical" if again == losses[saved_step:] else "NOT the same"
        print(f"resumed at step {saved_step} with 2 workers: {len(again)} losses, {same}")


if __name__ == "__main__":
    main()
