"""Sessions that need environments of their own: tests with every supported pair of Python, torch and numpy, and mutation testing.

    nox -s tests                      every pair whose Python is installed here; the others are reported as missing
    nox -s "tests(torch-2.15.0-py3.13)"
    nox -s tests -- tests/behaviour   arguments after -- go to pytest; without any, the quick tests run
    nox -s table                      writes docs/versions.md from the results of the runs
    nox -s mutation -- shmload/schedule/mix.py tests/schedule/test_mix.py

The results of the tests are kept in .nox/results.json until the table is written. If torch's wheel is a CUDA build and the CUDA
packages are not installed, tests/matrix/stubs.py creates empty libraries in their place: 0.6 GB for a pair instead of 5.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import nox

# Python, torch, numpy: for each Python the oldest torch that supports it and the newest; releases between with the oldest Python.
PAIRS = [
    ("3.11", "2.6.0", "1.26.4"),
    ("3.11", "2.8.0", "2.0.2"),
    ("3.11", "2.10.0", "2.4.6"),
    ("3.11", "2.13.0", "2.4.6"),
    ("3.11", "2.15.0", "2.4.6"),
    ("3.12", "2.6.0", "1.26.4"),
    ("3.12", "2.15.0", "2.4.6"),
    ("3.13", "2.9.0", "2.4.6"),
    ("3.13", "2.15.0", "2.4.6"),
    ("3.14", "2.10.0", "2.4.6"),
    ("3.14", "2.15.0", "2.4.6"),
    ("3.14t", "2.13.0", "2.4.6"),
]
# What runs on a Python without the GIL, for which many libraries of the extra `dev` have no wheels; slow tests are included.
FREE_THREADED = (
    "tests/batch",
    "tests/core",
    "tests/worker",
    "tests/engine",
    "tests/loader/test_reading_threads.py",
    "tests/behaviour/test_threads.py",
)
RESULTS = Path(".nox/results.json")
# Writes the packages that torch requires for GPUs as overrides that are never installed.
LIST_GPU_PACKAGES = """
import importlib.metadata, re, sys
needs = importlib.metadata.requires("torch") or []
names = [name for need in needs if re.match("nvidia|triton|cuda", name := re.match(r"[\\w.-]+", need)[0])]
open(sys.argv[1], "w").writelines(f"{name}; python_version < '3'\\n" for name in names)
"""
PAGE = Path("docs/versions.md")
BEGIN, END = "<!-- nox -s table writes from here -->\n", "<!-- to here -->\n"

nox.options.default_venv_backend = "uv"  # shares unpacked wheels between environments
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False


@nox.session
@nox.parametrize("python,torch,numpy", [nox.param(*pair, id=f"torch-{pair[1]}-py{pair[0]}") for pair in PAIRS])
def tests(session: nox.Session, torch: str, numpy: str) -> None:
    """Runs the quick tests with one pair. Compiled modules of every Python are in this tree, side by side."""
    folder = Path(session.create_tmp()).resolve()
    constraints, overrides, stubs = (folder / name for name in ("constraints.txt", "overrides.txt", "stubs"))
    older = "pyarrow<26\n" if numpy < "2" else ""  # pyarrow 26 needs numpy 2, which only its import reports
    constraints.write_text(f"torch=={torch}\nnumpy=={numpy}\n{older}")
    session.install("--no-deps", f"torch=={torch}")
    session.run_install("python", "-c", LIST_GPU_PACKAGES, str(overrides))
    has_gil = not str(session.python).endswith("t")
    session.install("-c", str(constraints), "--overrides", str(overrides), "-e", ".[dev]" if has_gil else ".[tests]")
    site = session.run_install("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
    if site is not None:  # None with -R, where everything is installed
        session.run_install("python", "-m", "tests.matrix.stubs", site.strip(), str(stubs), silent=True)
    report = folder / "pytest.txt"
    named = session.posargs or (() if has_gil else FREE_THREADED)
    words = ("python", "-m", "pytest", "-q", *named)
    with report.open("w") as log:
        if session.run(*words, env={"LD_LIBRARY_PATH": str(stubs)}, stdout=log, success_codes=[0, 1]) is None:
            return  # --install-only
    last = report.read_text().rstrip().splitlines()[-1].strip("= ")
    print(report.read_text()[-3000:])
    exact = session.run("python", "-c", "import platform; print(platform.python_version())", silent=True).strip()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result = " of ".join([re.sub(r" in .*", "", last), *([", ".join(named)] if named else [])])
    exact += "" if has_gil else "t"
    found[f"{session.python} {torch} {numpy}"] = [exact, torch, numpy, result, datetime.date.today().isoformat()]
    RESULTS.write_text(json.dumps(found, indent=1))
    if re.search(r"\b(failed|error)", last):
        session.error(last)


@nox.session(python=False)
def table(session: nox.Session) -> None:
    """Writes the results of the tests into docs/versions.md."""
    found = json.loads(RESULTS.read_text())
    rows = ["| Python | torch | numpy | the quick tests | on |\n", "|---|---|---|---|---|\n"]
    for key in (f"{python} {torch} {numpy}" for python, torch, numpy in PAIRS):
        python, torch, numpy, last, day = found.get(key, [*key.split(), "not run", ""])
        rows.append(f"| {python} | {torch} | {numpy} | {last} | {day} |\n")
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + "".join(rows) + END + rest.partition(END)[2])


@nox.session
def mutation(session: nox.Session) -> None:
    """Changes one operation of a module at a time, in a copy, and reports the changes that no test notices.

    Arguments: the module, then the tests to run with this folder's .venv. Some changes that survive have no effect that anybody
    could see, so read each.
    """
    module, *tests = session.posargs
    session.install("cosmic-ray==8.7.0")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(".", tree, ignore=shutil.ignore_patterns(".git", ".nox", ".venv", "build", "dist"), symlinks=True)
        python = Path(".venv/bin/python").absolute()
        command = shlex.join([str(python), "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not slow", *tests])
        config, results = Path(folder, "config.toml"), Path(folder, "results.sqlite")
        config.write_text(
            "[cosmic-ray]\n"
            f'module-path = "{module}"\ntimeout = 120.0\nexcluded-modules = []\ntest-command = "{command}"\n'
            '[cosmic-ray.distributor]\nname = "local"\n'
        )
        with session.chdir(tree):
            env = {"PYTHONPATH": os.fspath(tree)}
            session.run("cosmic-ray", "baseline", str(config), env=env)  # the tests pass without a change
            session.run("cosmic-ray", "init", str(config), str(results), env=env)
            session.run("cosmic-ray", "exec", str(config), str(results), env=env)
            session.run("cr-report", str(results), "--surviving-only", "--show-diff", env=env)
