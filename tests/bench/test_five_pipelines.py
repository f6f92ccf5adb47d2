"""The five pipelines: pages show the measured programs, the programs are short, and they deliver the right items."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import five_pipelines
from benchmarks.common import Settings
from benchmarks.five_pipelines import NEEDS, PEERS, PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
FIVE = ROOT / "benchmarks" / "five"
PAGE = (ROOT / "docs" / "pipelines.md").read_text().partition("\n## Five common pipelines\n")[2]
PEER_PAGES = {"grain": "from_grain.md", "nodes": "from_torchdata.md"}  # module -> the page that shows some of its programs


class Part(NamedTuple):
    """A top-level part of a program: a function, a class, a constant or an import."""

    name: str
    text: str


def parts(code: str) -> list[Part]:
    """Returns all parts except those that only this program needs, for reading and printing."""
    found = []
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if not module.startswith("benchmarks"):
                found += [Part("", f"{module} {ast.unparse(name)}") for name in node.names]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found.append(Part(node.name, "\n".join(code.splitlines()[first - 1 : node.end_lineno])))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).isupper():
            found.append(Part(ast.unparse(node.targets[0]), ast.get_source_segment(code, node) or ""))
    return found


MODULES = {path.stem: parts(path.read_text()) for path in sorted(FIVE.glob("*.py")) if path.stem in ("work", *NEEDS)}


def without_line_breaks(found: Iterable[Part]) -> set[Part]:
    """Returns named parts as `ast` writes them: pages have shorter lines."""
    return {Part(part.name, ast.unparse(ast.parse(part.text))) for part in found if part.name}


def shown(page: str, fence: str) -> set[Part]:
    """Returns the parts in a page's code blocks that begin with `fence`."""
    blocks = re.findall(rf"^```{re.escape(fence)}\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    return without_line_breaks(part for code in blocks for part in parts(code))


def test_every_library_has_a_file() -> None:
    assert MODULES.keys() == NEEDS.keys() | {"work"}


def test_page_shows_the_measured_programs_of_shmload() -> None:
    programs = shown(PAGE, "python")
    assert programs - without_line_breaks(MODULES["work"] + MODULES["shmload"]) == set()
    assert {part.name for part in programs} >= {*PROGRAMS, "tokenize", "augment", "mix", "pair", "fit"}


@pytest.mark.parametrize("module", PEER_PAGES)
def test_peer_page_shows_measured_programs_of_the_peer(module: str) -> None:
    page = (ROOT / "docs" / PEER_PAGES[module]).read_text()
    programs = shown(page, f'py title="benchmarks/five/{module}.py"')
    assert programs
    assert programs - without_line_breaks(MODULES[module]) == set()


@pytest.mark.parametrize("library", NEEDS)
def test_program_has_fewer_than_20_lines(library: str) -> None:
    lengths = {name: lines(library, name) for name in PROGRAMS}
    assert {name: length for name, length in lengths.items() if length >= 20} == {}


def test_page_has_the_right_numbers_of_lines() -> None:
    rows = [f"| {PEERS.get(library, library)} | {' | '.join(counted(library, name) for name in PROGRAMS)} |" for library in NEEDS]
    assert "\n".join(rows) in PAGE


def lines(library: str, name: str) -> int:
    """Returns the number of lines of a program and its classes."""
    return sum(len(text.splitlines()) - text.count("\n\n") for text in needed(library, name).values())


def counted(library: str, name: str) -> str:
    """Returns the same, plus the lines of handwritten stages."""
    work = {part.name: part.text for part in MODULES["work"]}
    text = "\n".join(needed(library, name).values())
    by_hand = [each for each in ("windows_of", "buckets_of", "padded") if re.search(rf"\b{each}\b", text)]
    more = sum(len(work[each].splitlines()) for each in by_hand)
    return f"{lines(library, name)} + {more}" if more else str(lines(library, name))


def needed(library: str, name: str) -> dict[str, str]:
    """Returns the text of a program and its classes, by name."""
    found = {part.name: part.text for part in MODULES[library] if part.name}
    classes = {other for other, text in found.items() if text.startswith("class") and re.search(rf"\b{other}\b", found[name])}
    return {each: found[each] for each in (*classes, name)}


@pytest.mark.slow(reason="each program starts workers and reads 3,000 items")
@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize("library", [*NEEDS, "loop"])
def test_program_delivers_the_right_items(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not importlib.util.find_spec(package := NEEDS.get(library, "torch")):
        pytest.skip(f"needs {package}")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # libraries warn about each other
    five_pipelines.check(library)


@pytest.mark.slow(reason="runs each case in another process")
@pytest.mark.usefixtures("forked_jobs")
def test_program_is_compared_with_its_bare_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(five_pipelines, "PROGRAMS", {"pairs": PROGRAMS["pairs"]})
    monkeypatch.setattr(five_pipelines, "NEEDS", {"shmload": "shmload", "torch": "torch", "nodes": "no_such_package"})
    result = five_pipelines.measure(Settings(1, 0.05))
    assert [row.unit for row in result.rows] == ["x", "x", "x", "x", "us", "us"]
    assert all(row.got > 0 for row in result.rows[:4])
    assert "torchdata.nodes is not installed" in result.rows[0].beside
