"""Language-model windows: 1,025 of uint16 tokens in a mapped file, delivered as int64."""

from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shmload.tools.bench.workloads.workload import Field, Workload

WINDOW = 1025  # inputs and, shifted by one, targets of 1,024
STRIDE = WINDOW - 1
NUM_TOKENS = 50_000_000
VOCABULARY = 50_257


class Tokens:
    """Windows over a file of tokens; neighbours share one token."""

    schema: dict[str, Field] = {"tokens": ("int64", (WINDOW,))}  # noqa: RUF012  # never changed

    def __init__(self, path: str, num_samples: int | None = None) -> None:
        self.path, self.num_samples = path, num_samples
        self.tokens = np.asarray(np.memmap(path, np.uint16, mode="r"))

    def __reduce__(self) -> tuple[type["Tokens"], tuple[str, int | None]]:
        return Tokens, (self.path, self.num_samples)  # a pickled map would carry the file's contents

    def __len__(self) -> int:
        return self.num_samples or (len(self.tokens) - 1) // STRIDE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": self.tokens[index * STRIDE : index * STRIDE + WINDOW].astype(np.int64)}

    def read_batch_into(self, indices: Sequence[int], out: MutableMapping[str, Any]) -> None:
        for row, index in zip(out["tokens"], indices, strict=True):
            row[...] = self.tokens[index * STRIDE : index * STRIDE + WINDOW]

    def stored(self, index: int) -> tuple[bytes, int]:
        """What a peer keeps of a sample."""
        return self.tokens[index * STRIDE : index * STRIDE + WINDOW].tobytes(), index

    @staticmethod
    def decoded(payload: bytes, number: int) -> dict[str, Any]:
        """The sample of what was stored."""
        return {"tokens": np.frombuffer(payload, np.uint16).astype(np.int64)}


def on_disk(arguments: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Windows hardly overlap: as usual."""
    return arguments, [arguments["path"]]


def prepare(folder: Path, small: bool) -> dict[str, Any]:
    path = folder / "tokens.bin"
    draw = np.random.default_rng(3)
    path.write_bytes(draw.integers(0, VOCABULARY, NUM_TOKENS // (20 if small else 1), np.uint16).data)
    return {"path": str(path)}


TOKENS = Workload(
    name="tokens",
    title="windows of 1,025 uint16 tokens of a mapped file, as int64",
    dataset=f"{__name__}:Tokens",
    batch_size=32,
    unit="windows",
    meaning="batches are small here, so this is mostly what a loader costs per batch",
    prepare=prepare,
    num_with_peers=20 * 1024,
    on_disk=on_disk,
)
