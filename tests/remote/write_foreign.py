"""Writes chunks of MosaicML Streaming and LitData with those libraries.

    python tests/remote/write_foreign.py FOLDER

Both have to be importable (`pip install --no-deps --target DIR mosaicml-streaming litdata` and what they import, DIR in
PYTHONPATH). tests/remote/data was written by mosaicml-streaming 0.13.0 and litdata 0.2.76. layout_kit.sample defines the content
of a sample.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.fernet import Fernet
from PIL import Image

FERNET_KEY = b"c2htbG9hZCB0ZXN0cywgYW5kIG5vdGhpbmcgZWxzZSE="


class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces torchvision, which MosaicML's package imports for its image datasets; they are not used here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = types.ModuleType(spec.name)
        made.__getattr__ = lambda name: _absent(name)  # type: ignore[method-assign]  # a module's own (PEP 562)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def numbers(number: int) -> np.ndarray[Any, Any]:
    return np.arange(number + 1, dtype=np.float32)


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.full((2, 3, 3), number, np.uint8))


MDS = {
    "x": "ndarray",
    "y": "ndarray:int16",
    "z": "ndarray:uint8:2,3",
    "label": "int",
    "name": "str",
    "half": "float16",
    "more": "json",
    "raw": "bytes",
    "picture": "pil",
    "exact": "str_decimal",
    "digits": "str_int",
    "files": "jpeg_array",
}


def mds_sample(number: int) -> dict[str, Any]:
    from decimal import Decimal

    return {
        "x": numbers(number),
        "y": np.full((1 + number % 2, 2), number, np.int16),
        "z": np.full((2, 3), number, np.uint8),
        "label": number - 3,
        "name": f"näme {number}",
        "half": np.float16(number / 2),
        "more": {"n": [number]},
        "raw": bytes([number]) * number or b"-",
        "picture": picture(number),
        "exact": Decimal(number) / 4,
        "digits": number,
        "files": [b"one", b"%d" % number],
    }


def lit_sample(number: int) -> dict[str, Any]:
    return {
        "x": numbers(number),
        "y": np.full((1 + number % 2, 2), number, np.int16),
        "label": number - 3,
        "name": f"näme {number}",
        "t": torch.full((2, 3), float(number)),
        "flat": torch.arange(number + 1),
        "half": number / 2,
        "is_even": number % 2 == 0,
        "raw": bytes([number]) * number,
        "picture": picture(number),
        "nested": [number, (number, f"{number}")],
    }


def row_sample(number: int) -> dict[str, Any]:
    """Returns a sample for LitData's Arrow rows, which have no arrays."""
    return {
        "label": number - 3,
        "name": f"näme {number}",
        "half": number / 2,
        "raw": bytes([number]) * number,
        "nested": {"n": [number, number], "s": f"{number}"},
    }


def write(folder: Path) -> None:
    sys.meta_path.insert(0, Stub())
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter
    from litdata.utilities.encryption import FernetEncryption
    from streaming import MDSWriter

    for name, compression in (("mds", None), ("mds_zstd", "zstd"), ("mds_gz", "gz"), ("mds_br", "br"), ("mds_snappy", "snappy")):
        with MDSWriter(out=str(folder / name), columns=MDS, compression=compression, size_limit=4000) as writer:
            for number in range(23):
                writer.write(mds_sample(number))
    fernet = FernetEncryption("which the key below takes the place of")
    whole = FernetEncryption("which the key below takes the place of", level="chunk")
    fernet.fernet = whole.fernet = Fernet(FERNET_KEY)
    zstd = {"compression": "zstd"}
    for name, more in (
        ("litdata", {}),
        ("litdata_zstd", {**zstd, "compression_level": "chunk"}),
        ("litdata_batch", {**zstd, "compression_batch_size": 3}),
        ("litdata_sample", {**zstd, "compression_level": "sample"}),
        ("litdata_fernet", {**zstd, "compression_level": "chunk", "encryption": fernet}),
        ("litdata_sealed", {"encryption": whole}),
        ("litdata_sealed_zstd", {**zstd, "compression_level": "chunk", "encryption": whole}),
    ):
        chunks = BinaryWriter(str(folder / name), chunk_size=7, **more)
        for number in range(23):
            chunks[number] = lit_sample(number)
        chunks.done()
        chunks.merge()
    for name, more in (("litdata_rows", {}), ("litdata_rows_zstd", zstd), ("litdata_rows_sealed", {"encryption": whole})):
        chunks = BinaryWriter(str(folder / name), chunk_size=7, **more)
        for number in range(23):
            chunks[number] = row_sample(number)
        chunks.done()
        chunks.merge()
    for name, more in (("litdata_tokens", {}), ("litdata_tokens_sealed", {"encryption": whole})):
        tokens = BinaryWriter(str(folder / name), chunk_bytes=400, item_loader=TokensLoader(10), **more)
        for number in range(23):
            tokens[number] = torch.arange(10 * number, 10 * number + 10)
        tokens.done()
        tokens.merge()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
