"""Extensions only; everything else stands in pyproject.toml.

src/x.pyx becomes shmload._core.x. Every extension depends on what it includes, however deep, so that a changed header rebuilds just
what must be, and the sdist carries the headers. Switches: SHMLOAD_DEBUG=1 (bounds checks, assertions, -O0 -g), SHMLOAD_SANITIZE
(what -fsanitize takes: "address,undefined" or "thread"; tests/sanitize.py builds and tests so), SHMLOAD_ONLY=name (one module).

What is compiled is for any x86-64 or ARMv8: functions that use more than the baseline carry a target attribute of their own and
are chosen at run time. tests/packaging holds the wheel to that.
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
    "-fvisibility=hidden",  # a module exports its PyInit alone, so that no other library's functions meet ours
]
if debug:
    flags += ["-O0", "-g", "-UNDEBUG"]
else:
    flags += ["-O1", "-DNDEBUG"] if sanitizer else ["-O3", "-DNDEBUG", "-g0"]  # Python's own flags ask for -g: 4 times the size
link = []
if sanitizer:
    flags += [f"-fsanitize={sanitizer}", "-g", "-fno-omit-frame-pointer"]
    flags += ["-Wno-tsan"] if sanitizer == "thread" else []  # a fence at a ring's creation, which nobody else sees yet
    link += [f"-fsanitize={sanitizer}"]


def included(source: Path) -> set[str]:
    """The files that a file includes or cimports, and those that they do."""
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
builds = not {"egg_info", "dist_info", "sdist"} & set(sys.argv)  # those only list what there is
if __name__ == "__main__":  # where processes are not forked, cythonize's import this file
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
