"""Types of shmload for a type checker: the stubs compared with the modules, and a user's program."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shmload._core

ROOT = Path(shmload.__file__).parent.parent
CORE = Path(shmload._core.__file__).parent
FOUND_IN_ALL = r"""
# every Cython module has them
shmload\._core\..*__(reduce|setstate)_cython__
shmload\._core\..*__test__
# modules whose C functions other modules call have it
shmload\._core\.\w+\.__pyx_capi__
# buffers have no method by this name before Python 3.12
shmload\._core\.(mapped_file\.MappedFile|mapping\.Mapping)\.__buffer__
"""
SKIPPED = """
[mypy]
[mypy-torch.*,shmload.loader,shmload.schedule.mix,shmload.batch.*,shmload.schedule.*,shmload.worker.*]
follow_imports = skip
"""  # what the package's face names but the stubs do not need: a fifth of the time
PROGRAM = """
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from shmload import Mix, Permutation, ShmLoader, sample_rng
from shmload.formats import ArrayDataset, ImageDecoder, ImageFolder, RandomResizedCrop, TFRecordDataset, TokenDataset


class Photos:
    schema = {"image": ("uint8", (3, 64, 64)), "label": "int64"}

    def __len__(self) -> int:
        return 100

    def read_into(self, index: int, out: Any) -> None:
        out["image"][...] = sample_rng().integers(0, 256, (3, 64, 64))


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(index)}

    def __len__(self) -> int:
        return 10


tensors = TensorDataset(torch.arange(10))
tokens = TokenDataset("tokens.bin", 9, dtype="uint16")
images = ImageFolder("photos", ImageDecoder(RandomResizedCrop(224), flip=0.5))
mix = Mix([(tokens, 0.5), (range(3), 1), (tensors, 2)], stop="all")
reveal_type(ShmLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, seed=7))  # ShmLoader[dict[str, Tensor]]
reveal_type(ShmLoader(range(10)))  # ShmLoader[int]
reveal_type(ShmLoader([("a", 1)]))  # ShmLoader[tuple[str, int]]
reveal_type(ShmLoader(Photos(), 16, True, multiprocessing_context="spawn"))  # ShmLoader[Any]
reveal_type(ShmLoader(mix, rank=0, world_size=2, uneven="drop", on_error="skip"))  # ShmLoader[Any]
for dataset in (tokens, images, ArrayDataset("x.npy"), TFRecordDataset("a.tfrecord", {"x": "int64"})):
    loader = ShmLoader[Any](dataset, persistent_workers=True, prefetch_factor=4)
with ShmLoader(tensors, pin_memory=False) as entered:
    reveal_type(entered.state_dict())  # dict[str, Any]
    reveal_type(len(entered))  # int
    for batch in entered:
        reveal_type(batch)  # Any
    for shown in entered.progress("training"):
        reveal_type(shown)  # Any
reveal_type(Permutation(10, seed=1, epoch=0)[3])  # int
ShmLoader(3)  # error: arg-type
ShmLoader(tensors, uneven="some")  # error: arg-type
ShmLoader(tensors, ragged="rows")  # error: arg-type
ShmLoader(tensors, ragged={"x": "pad", "y": "rows"})  # error: dict-item
ShmLoader(tensors, backend="gevent")  # error: arg-type
ShmLoader(tensors, share="all")  # error: arg-type
ShmLoader(tensors, batchsize=3)  # error: call-arg
Mix([(3, 1.0)])  # error: list-item
"""


def checked(command: list[str], folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    if not (ROOT / "pyproject.toml").exists():  # installed: found like any package with py.typed
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    else:
        env["MYPYPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=500, cwd=folder, env=env)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow(reason="stubtest checks every compiled module")
@pytest.mark.timeout(600)
def test_stubtest_finds_nothing_in_the_compiled_modules(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(SKIPPED)
    (tmp_path / "allowed").write_text(FOUND_IN_ALL)
    modules = [f"shmload._core.{stub.stem}" for stub in sorted(CORE.glob("*.pyi"))]
    assert len(modules) > 20
    options = ["--mypy-config-file", "mypy.ini", "--allowlist", "allowed", "--ignore-unused-allowlist"]
    # PEP 800 marks are for checkers that test whether two classes can have a common subclass
    found = checked(["mypy.stubtest", *modules, *options, "--ignore-disjoint-bases", "--concise"], tmp_path)
    assert found == ""


@pytest.mark.slow(reason="mypy checks a program and what it imports")
@pytest.mark.timeout(600)
def test_strictly_typed_program_gets_the_intended_types(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    lines = PROGRAM.splitlines()
    options = ["--strict", "--config-file", "mypy.ini", "--cache-dir", os.devnull, "--no-error-summary"]
    notes: dict[int, str] = {}
    for line in checked(["mypy", "program.py", *options], tmp_path).splitlines():
        if found := re.match(r'program\.py:(\d+): note: Revealed type is "(.*)"', line):
            notes[int(found[1])] = re.sub(r"[\w.]+\.(\w+)", r"\1", found[2])
        elif found := re.match(r"program\.py:(\d+): error: .*\[([\w-]+)\]", line):
            notes[int(found[1])] = f"error: {found[2]}"
        else:
            assert ": note: " in line, line
    expected = {number: line.split("  # ")[1] for number, line in enumerate(lines, 1) if "  # " in line}
    assert notes == expected


@pytest.mark.slow(reason="pyright checks a program and what it imports")
@pytest.mark.skipif(not shutil.which(os.environ.get("SHMLOAD_PYRIGHT", "")), reason="SHMLOAD_PYRIGHT names no pyright")
@pytest.mark.timeout(600)
def test_program_gets_the_same_types_from_pyright(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [os.environ["SHMLOAD_PYRIGHT"], "--outputjson", "--pythonpath", sys.executable, "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    notes = {}
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        revealed = re.fullmatch(r'Type of ".*" is "(.*)"', found["message"])
        notes[found["range"]["start"]["line"] + 1] = revealed[1] if revealed else found["severity"]
    lines = enumerate(PROGRAM.splitlines(), 1)
    expected = {number: line.split("  # ")[1].partition(":")[0] for number, line in lines if "  # " in line}
    assert notes == expected


def test_package_has_a_py_typed_marker() -> None:
    assert (ROOT / "shmload" / "py.typed").exists()
