"""Every file of the formats' own test data is read as the format's library reads it, or gives a clear error."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.formats.corpus.expected import DEFECTS, FORMATS

HERE = Path(__file__).parent
NUM_PROCESSES = 2
UNREACHABLE = 3  # exit status of fetch.py
DEADLINE_S = 400
READERS = {
    "ArrayDataset",
    "HDF5Dataset",
    "ImageFolder",
    "ParquetDataset",
    "RemoteDataset",
    "TarDataset",
    "TarStream",
    "ZarrDataset",
}
PYTHON = (sys.executable, "-X", "faulthandler", "-m")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the packages' archives and their unpacked files."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip, which fetches the packages, is not installed here")
    lines = (HERE / "packages.txt").read_text().splitlines()
    folder = tmp_path_factory.mktemp("corpus")
    command = [*PYTHON, "tests.formats.corpus.fetch", str(folder), *(line for line in lines if line and not line.startswith("#"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode == UNREACHABLE:
        pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    for archive in done.stdout.splitlines():
        with tarfile.open(archive) as members:
            members.extractall(folder, filter="data")
        if Path(archive).stat().st_size > 2 << 20:  # larger archives add no coverage
            Path(archive).unlink()
    return folder


def compared(corpus: Path, paths: list[str]) -> list[dict[str, Any]]:
    """Returns the results of `compare`. A crash or a hang is attributed to the file that was being read."""
    command = [*PYTHON, "tests.formats.corpus.compare", str(corpus)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate("\n".join(paths), timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
    lines = [json.loads(line) for line in output.splitlines()]
    if process.returncode:
        file, reader = next((line["begins"] for line in reversed(lines) if "begins" in line), ("no file", "no reader"))
        lines.append(
            {
                "file": file,
                "reader": reader,
                "outcome": "differs",
                "said": f"the process ended by {process.returncode}: {errors[-2000:]}",
            }
        )
    return [line for line in lines if "outcome" in line]


@pytest.mark.slow(reason="downloads and reads thousands of files")
@pytest.mark.timeout(2 * DEADLINE_S)
def test_upstream_test_files_are_read_as_upstream_reads_them_or_give_a_clear_error(corpus: Path) -> None:
    paths = sorted(path.relative_to(corpus).as_posix() for path in corpus.rglob("*") if path.is_file())
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        found = [
            one for part in pool.map(lambda k: compared(corpus, paths[k::NUM_PROCESSES]), range(NUM_PROCESSES)) for one in part
        ]

    table = FORMATS + DEFECTS
    needed, wrong = set(), []
    for one in found:
        if one["outcome"] in ("equal", "refused"):
            continue
        entry = next((e for e in table if e.reader == one["reader"].split()[0] and re.search(e.said, one["said"])), None)
        if one["outcome"] == "stricter" and entry is not None:
            needed.add(entry)
        else:
            wrong.append(f"{one['file']}: {one['reader']}: {one['outcome']}: {one['said']}")
    assert not wrong, "\n".join(wrong)
    assert not set(table) - needed, "these files can be read now: remove them from expected.py"

    equal = Counter(one["reader"].split()[0] for one in found if one["outcome"] == "equal")
    assert set(equal) == READERS
