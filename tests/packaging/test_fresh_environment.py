"""The wheel in a user's environment: elsewhere, with the core's requirements and no extra. Runs if SHMLOAD_DIST is set."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

DIST = os.environ.get("SHMLOAD_DIST")
pytestmark = [
    pytest.mark.skipif(DIST is None, reason="SHMLOAD_DIST names no folder with a wheel"),
    pytest.mark.slow(reason="creates an environment and runs programs in it that import torch"),
    pytest.mark.timeout(900),
]
README = next(p / "README.md" for p in Path(__file__).parents if (p / "README.md").exists())

EVERY_MODULE = """
import importlib, pkgutil, shmload
needy = []
for module in pkgutil.walk_packages(shmload.__path__, "shmload."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        needy.append(f"{module.name}: {error}")
print("\\n".join(needy))
"""
WITHOUT_EXTRAS = """
import json, sys
from pathlib import Path
import numpy as np
import shmload
from shmload.formats import HDF5Dataset, ImageDecoder, ParquetDataset, SafetensorsDataset, TarDataset, TarWriter, ZarrDataset
photo = next((Path(shmload.__file__).parent / "data").glob("*.jpg"))
def tar():
    with TarWriter("a.tar") as writer:
        writer.write({"__key__": "0", "jpg": photo.read_bytes()})
    TarDataset("a.tar", decode="pil")[0]
for name in ("a.parquet", "a.h5", "a.safetensors"):
    Path(name).write_bytes(b"anything")
Path("a.zarr").mkdir()
said = {}
for extra, use in {
    "images": lambda: ImageDecoder()(photo.read_bytes()),
    "parquet": lambda: ParquetDataset("a.parquet")[0],
    "hdf5": lambda: HDF5Dataset("a.h5")[0],
    "zarr": lambda: ZarrDataset("a.zarr")[0],
    "safetensors": lambda: SafetensorsDataset("a.safetensors")[0],
    "images in tar": tar,
}.items():
    try:
        use()
        said[extra] = "nothing"
    except ImportError as error:
        said[extra] = str(error)
print(json.dumps(said))
"""


def requirements(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Returns these packages and everything they require, without any extra."""
    requirement = pytest.importorskip("packaging.requirements").Requirement
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        wanted = map(requirement, found[name].requires or [])
        waiting += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a virtual environment with the wheel; its requirements are links to this environment's, so nothing is downloaded."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("platlib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (wheel,) = Path(str(DIST)).glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(folder), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    required = importlib.metadata.Distribution.at(next(site.glob("shmload-*.dist-info"))).requires or []
    core = [re.split(r"[^\w-]", line)[0] for line in required if "extra ==" not in line]
    assert "torch" in core
    for distribution in requirements(core).values():
        for top in {Path(file).parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def run(environment: Path, folder: Path, *command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SHMLOAD_DIST")}
    executable, *arguments = command
    done = subprocess.run(
        [str(environment / "bin" / executable), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
        env=env | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == status, done.stderr
    return done


def test_environment_has_no_extra(environment: Path, tmp_path: Path) -> None:
    look = "from importlib.util import find_spec as f; print([n for n in ('PIL', 'matplotlib', 'pyarrow', 'cv2') if f(n)])"
    assert run(environment, tmp_path, "python", "-c", look).stdout == "[]\n"


def test_every_module_imports_except_those_for_a_library(environment: Path, tmp_path: Path) -> None:
    missing = "the package {} is needed and is not installed: pip install 'shmload[{}]'"
    done = run(environment, tmp_path, "python", "-W", "error", "-c", EVERY_MODULE)
    assert dict(line.split(": ", 1) for line in done.stdout.splitlines()) == {
        "shmload.formats.arrow.arrow_column": "No module named 'pyarrow'",
        "shmload.formats.arrow.arrow_groups": "No module named 'pyarrow'",
        "shmload.formats.arrow.arrow_schema": "No module named 'pyarrow'",
        "shmload.formats.arrow.arrow_types": "No module named 'pyarrow'",
        "shmload.formats.parquet.row_groups": "No module named 'pyarrow'",
        "shmload.formats.ray_groups": "No module named 'pyarrow'",
        "shmload.integrations.accelerate": missing.format("accelerate", "integrations"),
        "shmload.integrations.ray": missing.format("ray", "ray"),
        "shmload.worker.arrow": "No module named 'pyarrow'",
    }
    assert done.stderr == ""


def test_first_example_runs(environment: Path, tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    (tmp_path / "example.py").write_text(code)
    done = run(environment, tmp_path, "python", "-W", "error", "example.py")
    assert done.stdout.count("torch.Size([2, 2])") == 2
    assert done.stderr == ""


def test_loader_needs_neither_typer_nor_rich(environment: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = sys.modules['rich'] = None\nfrom shmload import ShmLoader\n"
    code += "with ShmLoader(range(4), batch_size=2, num_workers=1, seed=1) as loader: print(sum(map(sum, loader)).item())"
    assert run(environment, tmp_path, "python", "-W", "error", "-c", code).stdout == "6\n"


def test_smoke_test_passes(environment: Path, tmp_path: Path) -> None:
    done = run(environment, tmp_path, "python", "-W", "error", str(Path(__file__).parent / "smoke.py"))
    assert done.stdout.endswith("as it should be\n")
    assert done.stderr == ""


def test_bench_command_works(environment: Path, tmp_path: Path) -> None:
    command = ("shmload", "bench", "--quick", "--workload", "rows", "--json")
    report = json.loads(run(environment, tmp_path, *command).stdout)
    assert report["failures"] == []
    assert [workload["name"] for workload in report["workloads"]] == ["rows"]


def test_missing_extra_is_named_in_the_error(environment: Path, tmp_path: Path) -> None:
    messages = json.loads(run(environment, tmp_path, "python", "-c", WITHOUT_EXTRAS).stdout)
    for extra, error in messages.items():
        assert f"pip install 'shmload[{extra.split()[0]}]'" in error, messages
    done = run(environment, tmp_path, "shmload", "bench", "--quick", "--workload", "rows", "--plot", "a.png")
    assert "needs matplotlib: pip install 'shmload[plot]'" in done.stdout
    assert not (tmp_path / "a.png").exists()
