"""Builds every compiled module with a sanitizer, in a copy of the tree, and runs the tests that exercise the C code there.
    python -m tests.sanitize address                      AddressSanitizer and UndefinedBehaviorSanitizer
    python -m tests.sanitize thread                       ThreadSanitizer
    python -m tests.sanitize address tests/formats/tar    other tests; everything from the first word on is for pytest
    python -m tests.sanitize thread --keep FOLDER         builds in FOLDER, and the next time only what has changed
Reports are written to files, because many workers write them at the same time and a test may pass although its worker reported;
they are collected at the end. The exit status is 1 if there was a report or a test failed. Python and torch are not instrumented:
ThreadSanitizer sees this project's code in the threads of one process; interactions between processes are tested by tests/proof
(race.c, accesses.c).
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("shmload", "src", "tests", "docs", "benchmarks", "setup.py", "pyproject.toml", "README.md", "ARCHITECTURE.md")
BUILDS = {"address": "address,undefined", "thread": "thread"}
TESTS = {
    "address": [
        "tests/core",
        "tests/engine",
        "tests/shm",
        "tests/formats/shared_index",
        "tests/schedule",
        "tests/proof/test_ring_machine.py",
        "tests/formats/arrays",
        "tests/formats/tar",
        "tests/formats/tfrecord",
        "tests/formats/tokens",
        "tests/formats/images",
        "tests/batch",
        "tests/loader",
        "tests/sharing",
        "tests/top/test_stats_reader.py",
        "-mnot slow",
    ],
    "thread": [
        "tests/core",
        "tests/engine/test_aliases.py",
        "tests/engine/test_copy_out.py",
        "tests/loader/test_reading_threads.py",
        "tests/formats/arrays/test_arrays.py",
        "tests/formats/tfrecord/test_loading.py",
        "tests/formats/images/test_decoder.py",
        "tests/proof/test_ring_machine.py",
        "tests/proof/test_race.py",
        "-mnot slow",
    ],
}
# Python uses malloc directly, so that AddressSanitizer sees each object; leaks of torch and the interpreter are ignored. Without the
# GIL, Python has only mimalloc.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:halt_on_error=1:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "die_after_fork=0:ignore_noninstrumented_modules=1:halt_on_error=0:exitcode=0",
    "PYTHONMALLOC": "default" if sysconfig.get_config_var("Py_GIL_DISABLED") else "malloc",
}
# Excluded: promises in microseconds, which instrumented code does not keep, and those about the normal allocator.
FIGURES = [
    "tests/engine/test_worker_process.py::test_worker_reuses_the_memory_of_freed_arrays",
    "tests/loader/test_promises.py::test_state_costs_at_most_50_us_wherever_it_is_taken",
]
REPORT = re.compile(r"^(?:.*ERROR: AddressSanitizer|WARNING: ThreadSanitizer|.*runtime error).*$", re.MULTILINE)


def copy_tree(folder: Path) -> None:
    """Copies sources and tests without build outputs; files that have not changed are left alone."""

    def copy(source: str, to: str) -> None:
        if not os.path.exists(to) or not filecmp.cmp(source, to, shallow=False):
            shutil.copy2(source, to)

    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__", ".hypothesis")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored, copy_function=copy, dirs_exist_ok=True)
        else:
            copy(str(ROOT / name), str(folder / name))


def runtime(sanitizer: str) -> str:
    """Returns the libraries to load before Python: the sanitizer's runtime, and libstdc++ for its C++ exceptions."""
    names = {"address": ("libasan.so", "libubsan.so", "libstdc++.so"), "thread": ("libtsan.so", "libstdc++.so")}[sanitizer]
    return " ".join(
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in names
    )


def reports_in(folder: Path) -> Counter[str]:
    """Returns the headlines of all reports, counted; a place that many processes report is one headline."""
    found: Counter[str] = Counter()
    for path in folder.glob("report.*"):
        for line in REPORT.findall(path.read_text(errors="replace")):
            found[re.sub(r"==\d+==|\(pid=\d+\)|0x[0-9a-f]+", "", line).strip()] += 1
    return found


def run(sanitizer: str, folder: Path, arguments: list[str]) -> int:
    """Builds and tests in a folder; returns the exit status."""
    copy_tree(folder)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, check=True, env={**os.environ, "SHMLOAD_SANITIZE": BUILDS[sanitizer]})
    for path in folder.glob("report.*"):
        path.unlink()
    options = {name: f"{value}:log_path={folder}/report" if name.endswith("_OPTIONS") else value for name, value in OPTIONS.items()}
    done = subprocess.run(
        [
            *("setarch", "-R"),  # ThreadSanitizer needs a fixed address layout
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=600"),
            *("-o", "faulthandler_timeout=300"),
            *(f"--deselect={test}" for test in FIGURES),
            *(arguments or TESTS[sanitizer]),
        ],
        cwd=folder,
        env={**os.environ, **options, "LD_PRELOAD": runtime(sanitizer)},
        check=False,
    )
    found = reports_in(folder)
    for line, count in found.most_common():
        print(f"{count:6d}  {line}")
    print(f"{sanitizer}: {sum(found.values())} reports, pytest's exit status is {done.returncode}")
    return int(bool(found) or done.returncode != 0)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__.split("\n\n")[0])
    parser.add_argument("sanitizer", choices=sorted(BUILDS))
    parser.add_argument("--keep", type=Path, help="build in this folder and leave it there")
    options, arguments = parser.parse_known_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        return run(options.sanitizer, options.keep.resolve(), arguments)
    with tempfile.TemporaryDirectory() as folder:
        return run(options.sanitizer, Path(folder), arguments)


if __name__ == "__main__":
    sys.exit(main())
