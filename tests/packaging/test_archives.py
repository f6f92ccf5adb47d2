"""The contents of the wheel and the sdist. Runs if SHMLOAD_DIST is a folder with one of each; see .ci/run."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

metadata = pytest.importorskip("packaging.metadata")
DIST = os.environ.get("SHMLOAD_DIST")
pytestmark = pytest.mark.skipif(DIST is None, reason="SHMLOAD_DIST names no folder with a wheel and an sdist")
ABI = f"cp{sys.version_info[0]}{sys.version_info[1]}"
SUFFIXES = {".py", ".pyi", ".so", ".typed", ".jpg", ""}
# instruction sets above the x86-64 baseline: the names of functions with their own target attribute
ABOVE_BASELINE = re.compile(r"(_avx2|_avx512|: crc_of_(wide_run|run|copy|stream))(\.\w+)*$")
OF_ARM = re.compile(r"(: crc_of_\w+|: __aarch64_\w+)(\.\w+)*$")  # the second kind is the compiler's, which checks for LSE itself
ARM_81 = re.compile(r"\t(crc32c?[bhwx]|cas[abhlp]*|ld(add|set|clr|eor)[abhl]*|swp[abhl]*|[su]dot|fml[as]l|ptrue|cntd)\t")
AVX = re.compile(r"%[yz]mm\d|\tv(?!err|erw|mcall|mclear|mlaunch)[a-z0-9]+ ")


def the_only(pattern: str) -> Path:
    found = list(Path(str(DIST)).glob(pattern))
    assert len(found) == 1, found
    return found[0]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(the_only("*.whl")) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def sdist_files() -> list[PurePosixPath]:
    """Returns the files of the sdist, relative to its top folder."""
    with tarfile.open(the_only("*.tar.gz")) as archive:
        return [PurePosixPath(*PurePosixPath(m.name).parts[1:]) for m in archive.getmembers() if m.isfile()]


def files_of(wheel: Path) -> list[PurePosixPath]:
    return [PurePosixPath(path.relative_to(wheel)) for path in sorted(wheel.rglob("*")) if path.is_file()]


def test_wheel_contains_only_the_package(wheel: Path) -> None:
    inside = [path for path in files_of(wheel) if not path.parts[0].endswith(".dist-info")]
    assert {path.parts[0] for path in inside} == {"shmload"}
    assert {path.suffix for path in inside} == SUFFIXES
    assert [path.name for path in inside if not path.suffix] == ["LICENCES"]
    assert not [path for path in inside if "__pycache__" in path.parts]


def test_wheel_has_every_module_of_the_sources(wheel: Path, sdist_files: list[PurePosixPath]) -> None:
    kept = {".py", ".pyi", ".typed", ".jpg", ""}
    expected = {path for path in sdist_files if path.parts[0] == "shmload" and path.suffix in kept}
    assert {path for path in files_of(wheel) if path.parts[0] == "shmload" and path.suffix in kept} == expected
    assert PurePosixPath("shmload/py.typed") in expected


def test_wheel_has_each_compiled_module_with_its_stub(wheel: Path, sdist_files: list[PurePosixPath]) -> None:
    core = wheel / "shmload" / "_core"
    compiled = {path.name.split(".")[0] for path in core.glob(f"*.cpython-{ABI[2:]}-*.so")}
    assert compiled == {path.stem for path in core.glob("*.pyi")}
    assert compiled == {path.stem for path in sdist_files if path.suffix == ".pyx"}


def test_wheel_matches_its_record_and_tag(wheel: Path) -> None:
    (info,) = wheel.glob("*.dist-info")
    lines = (info / "WHEEL").read_text().splitlines()
    assert "Root-Is-Purelib: false" in lines
    (tag,) = [line.split(": ")[1] for line in lines if line.startswith("Tag")]
    assert re.fullmatch(rf"{ABI}-{ABI}-(linux|manylinux_2_28)_{os.uname().machine}", tag)
    assert the_only("*.whl").name.endswith(f"-{tag}.whl")
    record = dict(line.rsplit(",", 2)[:2] for line in (info / "RECORD").read_text().splitlines())
    assert set(record) == {str(path) for path in files_of(wheel)}
    for name, noted in record.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256((wheel / name).read_bytes()).digest()).rstrip(b"=").decode()
        assert noted in ("", f"sha256={digest}"), name


def test_metadata_is_valid_and_equals_the_projects(wheel: Path) -> None:
    (info,) = wheel.glob("*.dist-info")
    found = metadata.Metadata.from_email((info / "METADATA").read_bytes(), validate=True)
    project = tomllib.loads(sdist_text("pyproject.toml"))["project"]
    assert (found.name, str(found.version)) == ("shmload", project["version"])
    assert f'__version__ = "{project["version"]}"' in (wheel / "shmload" / "__init__.py").read_text()
    assert str(found.requires_python) == ">=3.11"
    assert found.license_expression == "MIT"
    assert found.license_files == ["LICENSE"]
    assert (info / "licenses" / "LICENSE").read_text().startswith("MIT License")
    assert found.description_content_type == "text/markdown"
    assert found.description == sdist_text("README.md")
    assert set(found.provides_extra) == set(project["optional-dependencies"])
    assert {r.name for r in found.requires_dist if r.marker is None or "extra" not in str(r.marker)} == {
        "numpy",
        "posix_ipc",
        "rich",
        "torch",
        "typer",
        "typing_extensions",
    }
    assert found.classifiers == project["classifiers"]
    assert {name.lower(): url for name, url in found.project_urls.items()} == {n.lower(): url for n, url in project["urls"].items()}
    assert "shmload = shmload.cli:main" in (info / "entry_points.txt").read_text()


def sdist_text(name: str) -> str:
    with tarfile.open(the_only("*.tar.gz")) as archive:
        (member,) = [m for m in archive.getmembers() if PurePosixPath(m.name).parts[1:] == (name,)]
        file = archive.extractfile(member)
        assert file is not None
        return file.read().decode()


def test_sdist_has_all_files_for_build_and_tests(sdist_files: list[PurePosixPath]) -> None:
    count = Counter(path.parts[0] for path in sdist_files)
    assert count["tests"] > 200
    assert count["src"] > 40
    assert count["benchmarks"] > 20
    assert count["docs"] > 15
    assert count["examples"] >= 4
    for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "SECURITY.md", "constraints.txt"):
        assert PurePosixPath(name) in sdist_files
    for name in (".ci/run", ".github/workflows/tests.yml"):
        assert PurePosixPath(name) in sdist_files
    assert [path for path in sdist_files if path.suffix in (".so", ".o", ".c", ".pyc") and path.parts[0] != "tests"] == []
    assert [path for path in sdist_files if {"__pycache__", "build", ".hypothesis"} & set(path.parts)] == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
def test_compiled_module_exports_only_its_init_function(wheel: Path) -> None:
    for module in (wheel / "shmload" / "_core").glob("*.so"):
        lines = subprocess.run(["nm", "-D", "--defined-only", module], capture_output=True, text=True, check=True).stdout
        assert [line.split()[-1] for line in lines.splitlines()] == [f"PyInit_{module.name.split('.')[0]}"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
def test_symbols_of_newer_c_libraries_are_looked_up_at_run_time(wheel: Path) -> None:
    (bell,) = (wheel / "shmload" / "_core").glob("bell.*.so")
    named = subprocess.run(["nm", "-D", "--undefined-only", bell], capture_output=True, text=True, check=True).stdout
    assert " sem_timedwait@" in named
    assert "sem_clockwait" not in named  # new in glibc 2.30; without it, waits use a clock that can be set


@pytest.mark.skipif(shutil.which("objdump") is None or os.uname().machine != "x86_64", reason="needs binutils for x86-64")
def test_instructions_above_the_baseline_are_only_in_functions_chosen_at_run_time(wheel: Path) -> None:
    found: Counter[str] = Counter()
    for module in (wheel / "shmload" / "_core").glob("*.so"):
        command = ["objdump", "-d", "--no-show-raw-insn", module]
        function = ""
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            if line.endswith(">:"):
                function = f"{module.name.split('.')[0]}: {line.split('<')[1][:-2]}"
            elif AVX.search(line) or "\tcrc32" in line:
                found[function] += 1
    assert {name for name in found if not ABOVE_BASELINE.search(name)} == set()
    assert sum(count for name, count in found.items() if "avx" in name) > 100  # the search must find what exists


def test_instructions_above_the_arm_baseline_are_only_in_functions_chosen_at_run_time(tmp_path: Path) -> None:
    objdump = "objdump" if os.uname().machine == "aarch64" else "aarch64-linux-gnu-objdump"
    wheels = sorted(Path(str(DIST)).glob("*_aarch64.whl")) or sorted(Path(str(DIST)).glob("arm/*_aarch64.whl"))
    if shutil.which(objdump) is None or not wheels:
        pytest.skip(f"needs {objdump} and a wheel for ARM, there or in the folder arm/")
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(tmp_path)
    found: Counter[str] = Counter()
    for module in (tmp_path / "shmload" / "_core").glob("*.so"):
        command, function = [objdump, "-d", "--no-show-raw-insn", module], ""
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            if line.endswith(">:"):
                function = f"{module.name.split('.')[0]}: {line.split('<')[1][:-2]}"
            elif ARM_81.search(line):
                found[function] += 1
    assert {name for name in found if not OF_ARM.search(name)} == set()
    assert any("crc_of_" in name for name in found)  # the search must find what exists


def test_no_compiler_flag_selects_the_build_machines_cpu() -> None:
    assert re.findall(r"-m(arch|tune|cpu|avx\w*|sse\w*|bmi\w*|fma)\b", sdist_text("setup.py")) == []
    assert "-ffast-math" not in sdist_text("setup.py")
    assert '"-fvisibility=hidden"' in sdist_text("setup.py")
