"""Build the extension modules. All other settings are in pyproject.toml.

src/x.pyx becomes shmload._core.x. Each extension depends on all files that it includes, directly or not, so that a changed header
rebuilds only the modules that use it, and so that the sdist contains the headers. Environment variables:

* SHMLOAD_DEBUG=1: bounds checks, assertions, -O0 -g
* SHMLOAD_SANITIZE: value of -fsanitize, "address,undefined" or "thread" (see tests/sanitize.py)
* SHMLOAD_ONLY=name: build one module

The code runs on any x86-64 or ARMv8 CPU. Functions that need more than the baseline have a target attribute and are chosen at run
time; tests/packaging checks that.
"""

import os
import re
import sys
from glob import glob
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

debug = os.environ.get("SHMLOAD_DEBUG") == "1"
sanitizer = os.environ.get("SHMLOAD_SANITIZE")
flags = [
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-unused-function",
    "-Wno-missing-field-initializers",
    "-fvisibility=hidden",  # a module exports only its PyInit, so that its functions cannot conflict with another library's
]
if debug:
    flags += ["-O0", "-g", "-UNDEBUG"]
else:
    # -g0, because Python's own flags contain -g, which makes files 4 times as large
    flags += ["-O1", "-DNDEBUG"] if sanitizer else ["-O3", "-DNDEBUG", "-g0"]
link = []
if sanitizer:
    flags += [f"-fsanitize={sanitizer}", "-g", "-fno-omit-frame-pointer"]
    flags += ["-Wno-tsan"] if sanitizer == "thread" else []  # about a fence at a ring's creation, when no other thread has the ring
    link += [f"-fsanitize={sanitizer}"]


def included(source: Path) -> set[str]:
    """Return the files that a file includes or cimports, directly or not."""
    text = source.read_text()
    files = {source.with_name(name) for name in re.findall(r'(?:include|from) "([\w.]+)"', text)}
    files |= {Path("shmload/_core", f"{name}.pxd") for name in re.findall(r"from shmload\._core\.(\w+) cimport", text)}
    files |= {Path("shmload/_core", f"{source.stem}.pxd")} if source.suffix == ".pyx" else set()
    files = {file for file in files if file.exists()}
    return {str(file) for file in files}.union(*(included(file) for file in files))


sources = sorted(glob(f"src/{os.environ.get('SHMLOAD_ONLY', '*')}.pyx"))
extensions = [
    Extension(
        f"shmload._core.{Path(source).stem}",
        [source],
        include_dirs=["src"],
        depends=[source, *sorted(included(Path(source)))],
        extra_compile_args=flags,
        extra_link_args=[*link, "-pthread"],
    )
    for source in sources
]

num_jobs = os.cpu_count() or 1
builds = not {"egg_info", "dist_info", "sdist"} & set(sys.argv)  # these commands only list files
if __name__ == "__main__":  # because cythonize's processes import this file if they are not forked
    setup(
        options={"build_ext": {"parallel": num_jobs}},
        ext_modules=extensions
        if not builds
        else cythonize(
            extensions,
            nthreads=num_jobs,
            build_dir="build/cython",
            compiler_directives={
                "language_level": 3,
                "boundscheck": debug,
                "wraparound": False,
                "initializedcheck": debug,
                "cdivision": True,
                "embedsignature": True,
                "freethreading_compatible": True,
            },
        ),
    )
