"""The examples of docs/ run, page by page, and print what the page shows; links have targets.

The output of an example is a comment after its print, or the text block after it; in the first hour, it is below its command,
with `...` for what differs from run to run. Each section of the gallery is a separate program, as are those of the libraries in
frameworks.md, which run in tests/integrations. A page about another loader has its program, too, in a `py` block with a title;
both run where that loader is installed.
"""

from __future__ import annotations

import ast
import doctest
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from pathlib import Path
from urllib.parse import unquote

import pytest

WITHOUT_OUTPUT = ("frameworks.md",)  # fragments of larger programs
TESTED_ELSEWHERE = ("cluster.md",)  # tested in tests/ray
AT_A_TERMINAL = ("first_hour.md",)  # programs in files, and commands
GALLERY = "gallery.md"
PEERS = {  # page -> the package of another loader, in a folder that SHMLOAD_OTHER_LOADERS names: they ask for an older numpy
    "from_grain.md": "grain",
    "from_litdata.md": "litdata",
    "from_spdl.md": "spdl",
    "from_streaming.md": "streaming",
}
# MosaicML's package imports torchvision, which is not installed, for its image datasets.
WITHOUT_TORCHVISION = """
import sys

sys.path.append({folder!r})
from write_foreign import Stub

sys.meta_path.append(Stub())
"""
OPTIONAL_PACKAGES = {  # optional packages of the gallery's programs
    "ray": "shmload[ray]",
    "torch_geometric": "shmload[libraries]",
    "torchcodec": "shmload[libraries]",
}
ROOT = next(p for p in Path(__file__).parents if (p / "docs").exists())
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(path for path in sorted(ROOT.glob("*.md")))]
WITH_EXAMPLES = [
    path.name
    for path in sorted(DOCS.glob("*.md"))
    if path.name not in (*WITHOUT_OUTPUT, *TESTED_ELSEWHERE, *AT_A_TERMINAL, GALLERY) and "```python\n" in path.read_text()
]
FIRST_HOUR = (DOCS / AT_A_TERMINAL[0]).read_text()
SECTIONS = [text for text in FIRST_HOUR.split("\n## ") if "```console\n" in text]
_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"#+ +(.+)")
PROGRAMS = {  # title -> section
    section.partition("\n")[0]: section for section in (DOCS / GALLERY).read_text().split("\n## ") if "```python\n" in section
}


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives Ray a folder with a short path, because of the length of its socket names, and disables its token."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow(reason="whole programs, some of which train over Ray or under Lightning")
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("short_folder")
@pytest.mark.parametrize("title", PROGRAMS)
def test_gallery_program_prints_what_the_page_shows(title: str, output_of: Callable[..., str]) -> None:
    code, expected = re.findall(r"```(?:python|text)\n(.*?)```", PROGRAMS[title], re.DOTALL)
    for module in imported(code) & OPTIONAL_PACKAGES.keys():
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: pip install '{OPTIONAL_PACKAGES[module]}'")
        if module == "torchcodec" and find_library("avcodec") is None:
            pytest.skip("needs FFmpeg's libraries: apt install ffmpeg")
    assert expected == output_of(code, strict=False, deadline_s=540, warm=True)


def imported(code: str) -> set[str]:
    """Returns the packages that a program imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.slow(reason="a page's examples run as a separate program")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_examples_of_a_page_print_the_shown_output(page: str, output_of: Callable[..., str]) -> None:
    text = (DOCS / page).read_text()
    code, expected = "", list[str]()
    for kind, block in re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL):
        if kind == "python":
            code += block
        expected += block.splitlines() if kind == "text" else re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
    assert len(expected) >= code.count("print(")
    assert expected == output_of(code, deadline_s=150, warm=True).splitlines()


@pytest.mark.slow(reason="a page's examples and another loader's run as a separate program")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", PEERS)
def test_both_programs_of_a_peer_page_read_the_same_samples(page: str, tmp_path: Path) -> None:
    folder = os.environ.get("SHMLOAD_OTHER_LOADERS", "")
    if not Path(folder, PEERS[page]).is_dir():
        pytest.skip(f"needs {PEERS[page]} in a folder that SHMLOAD_OTHER_LOADERS names")
    code, expected = WITHOUT_TORCHVISION.format(folder=str(ROOT / "tests" / "remote")), list[str]()
    for fence, kind, block in re.findall(
        r'```((python|text|py)(?: title="(?!benchmarks/)[^"]*")?)\n(.*?)```', (DOCS / page).read_text(), re.DOTALL
    ):
        assert kind != "py" or "title=" in fence
        code += block if kind != "text" else ""
        expected += block.splitlines() if kind == "text" else re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
    assert "True" in expected  # both programs' samples are compared
    (tmp_path / "example.py").write_text(code)
    path = os.pathsep.join([*filter(None, sys.path), folder])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    output = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
    assert output.returncode == 0, output.stderr
    printed = iter(output.stdout.splitlines())  # the other loader prints, too
    assert all(line in printed for line in expected), output.stdout


@pytest.mark.slow(reason="each section runs its commands, one of them a bench")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_commands_of_the_first_hour_print_the_shown_output(section: str, tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", FIRST_HOUR, re.DOTALL)
    assert len(programs) == FIRST_HOUR.count("```python")
    for program, name in programs:
        (tmp_path / name).write_text(program)
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env = {**os.environ, **paths, "TMPDIR": str(tmp_path), "COLUMNS": "130", "PYTHONWARNINGS": "error"}
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ |```).*\n)*)", section, re.MULTILINE):
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, timeout=500, **output)
        assert not (found := differences(shown, done.stdout)), f"{command}\n{found}"


def test_output_may_differ_where_the_page_has_an_ellipsis() -> None:
    assert differences("took ... s\nequal: True\n...\n", "took 0.1 s\nequal:   True\nand more\n") == ""
    assert "equal: False" in differences("took ... s\nequal: True\n", "took 0.1 s\nequal: False\n")


def differences(shown: str, printed: str) -> str:
    """Returns "" or doctest's description of how an output differs from the one shown."""
    example, checker, flags = doctest.Example("", shown), doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return "" if checker.check_output(shown, printed, flags) else checker.output_difference(example, printed, flags)


@pytest.mark.parametrize("page", WITHOUT_OUTPUT)
def test_fragments_are_valid_python(page: str) -> None:
    for code in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        compile(code, page, "exec")


@pytest.mark.parametrize("page", [str(path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md"))])
def test_lines_of_programs_have_at_most_88_columns(page: str) -> None:
    blocks = re.findall(
        r"^```(?:python|pycon|py|sh|bash|cython|toml)\b.*?\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )
    assert [line for block in blocks for line in block.splitlines() if len(line) > 88] == []


@pytest.mark.skipif("SHMLOAD_INSTALLED" in os.environ, reason="they also lead to sources, but an installed package is being tested")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", ["README.md", "docs/first_hour.md", "docs/switch.md", "docs/own_format.md"])
def test_first_pages_name_the_function_that_reads_one_sample(page: str) -> None:
    assert "`shmload.debug.read" in (ROOT / page).read_text()


def test_every_page_is_linked_from_the_index() -> None:
    reached, new = set(), {DOCS / "index.md"}
    while new:
        reached |= new
        found = {(page.parent / target).resolve() for page in new for target, _ in links(page) if target}
        new = {page for page in found if page.suffix == ".md" and DOCS in page.parents and page.exists()} - reached
    assert {path for path in PAGES if DOCS in path.parents} - reached == set()


def test_broken_link_is_detected(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `name` of_it, & more\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-name-of_it--more) [c](other.md#twice-1) [d](https://nobody.invalid/x) `[e](code)`\n"
        "[f](none.md) [g](other.md#nothing) [h](#here)\n# Here\n[i](#there)\n```\n[j](fenced.md)\n```\n"
    )
    assert list(broken_links(page)) == ["none.md", "other.md#nothing", "#there"]


def broken_links(page: Path) -> Iterator[str]:
    """Yields a page's links to missing files and headings."""
    for target, anchor in links(page):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield f"{target}#{anchor}" if anchor else target


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yields (file, anchor) of each link within the repository."""
    for link in _LINK.findall(without_code(page.read_text())):
        if not re.match(r"[a-z]+:", link):
            target, _, anchor = unquote(link).partition("#")
            yield target, anchor


def anchors(page: Path) -> set[str]:
    """Returns the anchors of headings as GitHub names them, with a number appended to repeated ones."""
    found: set[str] = set()
    for line in without_code(page.read_text(), inline=False).splitlines():
        if match := _HEADING.fullmatch(line):
            name = re.sub(r"[^\w\- ]", "", match[1].strip().lower()).replace(" ", "-")
            again = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in found)
            found.add(f"{name}-{again}" if again else name)
    return found


def without_code(text: str, *, inline: bool = True) -> str:
    """Returns a page without its fenced code and, with `inline`, without code spans that are not the text of a link."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!\[)`[^`\n]*`(?!\])", "", text) if inline else text
