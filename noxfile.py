"""Every pair of Python, torch and numpy that shmload supports, in one file.

    nox -s tests                      all pairs whose Python is on this machine; others are said to be missing
    nox -s "tests(torch-2.15.0-py3.13)"
    nox -s tests -- tests/behaviour   what stands behind is pytest's; without, the quick tests
    nox -s table                      writes docs/versions.md from the runs before it

What a run found is kept in .nox/results.json until the table is written. Where torch's wheel is a CUDA build and its packages are
not there, tests/matrix/stubs.py puts empty libraries in their place: 0.6 GB a pair instead of 5.
"""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import nox

# Python, torch, numpy: the oldest torch at home on a Python and the newest, and releases between with the oldest Python.
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
]
RESULTS = Path(".nox/results.json")
# Writes as overrides, none of which is ever installed, what torch's metadata asks for GPUs.
LIST_GPU_PACKAGES = """
import importlib.metadata, re, sys
needs = importlib.metadata.requires("torch") or []
names = [name for need in needs if re.match("nvidia|triton|cuda", name := re.match(r"[\\w.-]+", need)[0])]
open(sys.argv[1], "w").writelines(f"{name}; python_version < '3'\\n" for name in names)
"""
PAGE = Path("docs/versions.md")
BEGIN, END = "<!-- nox -s table writes from here -->\n", "<!-- to here -->\n"

nox.options.default_venv_backend = "uv"  # it shares what it has unpacked between environments
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False


@nox.session
@nox.parametrize("python,torch,numpy", [nox.param(*pair, id=f"torch-{pair[1]}-py{pair[0]}") for pair in PAIRS])
def tests(session: nox.Session, torch: str, numpy: str) -> None:
    """The quick tests with one pair; what is compiled lies in this tree, for each Python beside the others'."""
    folder = Path(session.create_tmp()).resolve()
    constraints, overrides, stubs = (folder / name for name in ("constraints.txt", "overrides.txt", "stubs"))
    older = "pyarrow<26\n" if numpy < "2" else ""  # pyarrow 26 says nowhere but at its import that it needs numpy 2
    constraints.write_text(f"torch=={torch}\nnumpy=={numpy}\n{older}")
    session.install("--no-deps", f"torch=={torch}")
    session.run_install("python", "-c", LIST_GPU_PACKAGES, str(overrides))
    session.install("-c", str(constraints), "--overrides", str(overrides), "-e", ".[dev]")
    site = session.run_install("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
    if site is not None:  # -R: all of that is there
        session.run_install("python", "-m", "tests.matrix.stubs", site.strip(), str(stubs), silent=True)
    report = folder / "pytest.txt"
    words = ("python", "-m", "pytest", "-q", *session.posargs)
    with report.open("w") as log:
        if session.run(*words, env={"LD_LIBRARY_PATH": str(stubs)}, stdout=log, success_codes=[0, 1]) is None:
            return  # --install-only
    last = report.read_text().rstrip().splitlines()[-1].strip("= ")
    print(report.read_text()[-3000:])
    exact = session.run("python", "-c", "import platform; print(platform.python_version())", silent=True).strip()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found[f"{session.python} {torch} {numpy}"] = [exact, torch, numpy, last, datetime.date.today().isoformat()]
    RESULTS.write_text(json.dumps(found, indent=1))
    if re.search(r"\b(failed|error)", last):
        session.error(last)


@nox.session(python=False)
def table(session: nox.Session) -> None:
    """Writes what the runs found into the page of versions."""
    found = json.loads(RESULTS.read_text())
    rows = ["| Python | torch | numpy | the quick tests | on |\n", "|---|---|---|---|---|\n"]
    for key in (f"{python} {torch} {numpy}" for python, torch, numpy in PAIRS):
        python, torch, numpy, last, day = found.get(key, [*key.split(), "not run", ""])
        rows.append(f"| {python} | {torch} | {numpy} | {re.sub(r' in .*', '', last)} | {day} |\n")
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + "".join(rows) + END + rest.partition(END)[2])
