from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from shmload import ShardCorrupt, ShmLoader
from shmload.formats import SafetensorsDataset
from shmload.formats.safetensors import DTYPES


@pytest.mark.parametrize("name", sorted(name for name in set(DTYPES.values()) if hasattr(torch, name)))
def test_every_type_is_read(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    values = torch.arange(24, dtype=torch.uint8).reshape(12, 2)
    wanted = values.repeat_interleave(dtype.itemsize, 1).view(dtype) if name != "bool" else values > 9
    save_file({"x": wanted.contiguous()}, tmp_path / "a.safetensors")
    dataset = SafetensorsDataset(tmp_path / "a.safetensors")
    with ShmLoader(dataset, batch_size=12) as loader:
        (batch,) = loader
    assert dtype == batch["x"].dtype
    assert torch.equal(wanted.contiguous().view(torch.uint8), batch["x"].view(torch.uint8))
    assert torch.equal(torch.as_tensor(dataset[3]["x"]).view(torch.uint8), wanted[3].contiguous().view(torch.uint8))


def test_fields_are_selected(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(4, 2), "y": torch.ones(3), "one": torch.tensor(1.0)}, path)
    assert SafetensorsDataset(path, ["x"]).schema == {"x": ("float32", (2,))}
    with pytest.raises(ValueError, match=r"\['one'\] have no axis to count samples: name the other tensors in fields="):
        len(SafetensorsDataset(path))
    with pytest.raises(ValueError, match="these have x: 4, y: 3"):
        len(SafetensorsDataset(path, ["x", "y"]))
    with pytest.raises(ValueError, match=r"fields names \['z'\], which do not exist; it has \['one', 'x', 'y'\]"):
        len(SafetensorsDataset(path, ["z"]))


def test_metadata_is_not_a_field(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4)}, tmp_path / "a.safetensors", {"format": "pt"})
    assert SafetensorsDataset(tmp_path / "a.safetensors").schema == {"x": ("float32", ())}


@pytest.mark.parametrize(
    "place",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 40]},
        {"dtype": "F32", "shape": [1 << 61, 8], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
    ],
)
def test_header_with_wrong_offsets_is_an_error(tmp_path: Path, place: object) -> None:
    header = json.dumps({"x": place}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ShardCorrupt, match=r"a\.safetensors, offset 0: "):
        len(SafetensorsDataset(tmp_path / "a.safetensors"))


def test_rows_without_bytes_are_read(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4, 0)}, tmp_path / "a.safetensors")
    assert np.shape(SafetensorsDataset(tmp_path / "a.safetensors")[3]["x"]) == (0,)


def test_file_of_another_dtype_in_its_place_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    texts = [save({"x": torch.arange(4, dtype=dtype)}) for dtype in (torch.float32, torch.int32)]
    path.write_bytes(texts[0])
    dataset = SafetensorsDataset(path)
    assert dataset[1]["x"] == 1
    pickled = pickle.dumps(dataset)
    path.write_bytes(texts[1])
    with pytest.raises(ShardCorrupt, match=r"a.safetensors: its header has changed since the dataset was created"):
        dataset[1]
    with pytest.raises(ShardCorrupt, match=r"it had 4 rows of .*float32.* and now has 4 rows of .*int32"):
        pickle.loads(pickled)[1]
