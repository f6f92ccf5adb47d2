"""Pages with figures: a full run writes all of them, a partial run renews its sections, and all pages agree."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tar
from benchmarks.common import Row
from benchmarks.pages import BEGIN, END, FRONT, HEADS, PAGE, README, ROOT, Line, between, plain, write_pages
from shmload.tools.bench.spread import Spread

CONDITIONS = {
    "before": "v0.1.0 (0123abc)",
    "now": "4567def",
    "started": "2026-01-02 03:04 UTC",
    "load": 0.1,
    "rounds": 3,
    "seconds": 2.0,
    "num_cpus": 2,
    "cpu_model": "a processor",
    "architecture": "x86_64",
    "kernel": "6.1",
    "python": "3.12.1",
    "torch": "2.13.0",
    "numpy": "2.4.6",
}


def fabricated_run() -> dict[str, list[Line]]:
    """Returns a run with all rows of the front pages, all different."""
    lines: dict[str, list[Line]] = {}
    for number, (_, name, what) in enumerate(README, 1):
        row = Row(what, 1.5 * number, "us", f"torch {number} | threads", "<= 15 us", number <= 5)
        lines.setdefault(name, []).append(Line(row, 2.0, Spread(1.25, 1.0, 1.5), "same", Spread(row.got, row.got / 2, row.got * 2)))
    lines["tar"][0] = Line(lines["tar"][0].row, 1.0, Spread(1.5, 1.25, 2.0), "worse")
    return lines


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Copies the project's pages to a folder."""
    for path in (PAGE, *FRONT):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def table(text: str) -> list[list[str]]:
    """Returns the cells of the text's only table, without the header."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows[1:]]


def disagreements(root: Path) -> list[str]:
    """Returns what a front page says about a run and the page of measurements does not."""
    page = between((root / PAGE).read_text())
    sections = {part.partition("\n")[0]: table(part) for part in page.split("\n## ")[1:]}
    found = []
    for path, rows in FRONT.items():
        text = between((root / path).read_text())
        found += [f"{path}: {text.splitlines()[0]}"] if text.splitlines()[0] not in page else []
        for (_, name, what), (words, *shown) in zip(rows, table(text), strict=True):
            here = next(([cells[1], plain(cells[2])] for cells in sections[name] if cells[0] == what), None)
            found += [f"{path}: {words}"] if here != shown else []
    return found


def test_full_run_writes_all_pages(root: Path) -> None:
    before = {path: (root / path).read_text() for path in (PAGE, *FRONT)}
    write_pages(CONDITIONS, fabricated_run(), {"gpu": "Left out: no GPU"}, root)
    assert disagreements(root) == []
    for path, text in before.items():
        head, _, rest = text.partition(BEGIN)
        written = (root / path).read_text()
        assert written.startswith(head + BEGIN)
        assert written.endswith(END + rest.partition(END)[2])
    page = between((root / PAGE).read_text())
    assert "Measured on 2026-01-02 03:04 UTC at commit 4567def: 2 cores, 2 workers, torch 2.13.0." in page
    assert "3 rounds, timed parts of 2 s. Before is v0.1.0 (0123abc)." in page
    assert f"**Worse** beyond noise than before:\n\n* tar: {fabricated_run()['tar'][0].row.what}\n\n" in page
    assert "**Better** beyond noise than before: nothing." in page
    assert f"**Aims** met: 5 of {len(README)}." in page
    assert f"## tar\n\n{tar.__doc__.splitlines()[0]}" in page
    assert page.endswith("\n\nLeft out: no GPU\n")
    heads = f"| {' | '.join(HEADS)} |".replace("|  |", "| |")
    assert page.count(heads) == len(fabricated_run())


def test_writing_the_same_run_again_changes_nothing(root: Path) -> None:
    write_pages(CONDITIONS, fabricated_run(), {}, root)
    once = [(root / path).read_text() for path in (PAGE, *FRONT)]
    write_pages(CONDITIONS, fabricated_run(), {}, root)
    assert once == [(root / path).read_text() for path in (PAGE, *FRONT)]


def test_partial_run_renews_its_sections_and_is_mentioned(root: Path) -> None:
    whole = fabricated_run()
    write_pages(CONDITIONS, whole, {}, root)
    before = between((root / PAGE).read_text())
    row = Row(whole["tar"][0].row.what, 80.0, "us", "as | it is", "<= 15 us", False)
    later = {**CONDITIONS, "now": "89abcde", "started": "2026-02-03 04:05 UTC", "cpu_model": "another processor"}
    write_pages(
        later, {"tar": [Line(row, 100.0, Spread(0.8, 0.8, 0.8), "better")]}, {"gpu": "Left out: no GPU"}, root, is_whole=False
    )
    assert disagreements(root) == []
    page = between((root / PAGE).read_text())
    parts, old = ({part.partition("\n")[0]: part.strip() for part in text.split("\n## ")[1:]} for text in (page, before))
    assert [name for name, text in parts.items() if old.get(name) != text] == ["tar", "gpu"]
    assert "Measured on 2026-02-03 04:05 UTC at commit 89abcde: 2 cores" in parts["tar"]
    assert "another processor" in parts["tar"]
    assert page.count("another processor") == 2  # including that of gpu
    assert page.startswith("Measured on 2026-01-02 03:04 UTC at commit 4567def")
    assert "**Worse** beyond noise than before: nothing." in page
    assert "**Better** beyond noise than before: rows of tar (1)." in page
    assert f"**Aims** met: 4 of {len(README)}." in page
    words = next(words for words, name, _ in README if name == "tar")
    assert f"| {words} (2026-02-03) | 80 us | as \\| it is |" in (root / "README.md").read_text()
    assert (root / "README.md").read_text().count("2026-02-03") == 1


def test_front_pages_name_the_run_that_most_of_their_rows_are_from(root: Path) -> None:
    write_pages(CONDITIONS, fabricated_run(), {}, root)
    later = {**CONDITIONS, "now": "89abcde", "started": "2026-02-03 04:05 UTC"}
    lines = {name: each for name, each in fabricated_run().items() if name != "tar"}
    write_pages(later, lines, {}, root, is_whole=False)
    assert disagreements(root) == []
    text = between((root / "README.md").read_text())
    assert text.startswith("Measured on 2026-02-03 04:05 UTC at commit 89abcde: 2 cores, 2 workers, torch 2.13.0.\n\n| measured |")
    words = next(words for words, name, _ in README if name == "tar")
    assert f"| {words} (2026-01-02) |" in text
    assert text.count("2026-02-03") == text.count("2026-01-02") == 1


def test_front_pages_call_other_cases_by_words_that_need_no_explanation() -> None:
    assert plain("over torch_inline 1.00x, Threads 2.10x") == "over torch without workers 1.00x, a thread pool 2.10x"
    assert plain("shmload 0.971, torch 32.7, threads 1.33") == "torch 32.7, a thread pool 1.33"
    assert plain("torch 247, stop-watch 1.2; read_threads 3") == "torch 247, the measurement itself 1.2; read_threads 3"


def test_disagreeing_pages_are_detected(root: Path) -> None:
    write_pages(CONDITIONS, fabricated_run(), {}, root)
    path = root / "README.md"
    path.write_text(path.read_text().replace("| 4.5 us (2.25 to 9) |", "| 4.6 us (2.25 to 9) |"))
    assert disagreements(root) == [f"README.md: {README[2][0]}"]


@pytest.mark.parametrize("which", ["a row", "a mark"])
def test_nothing_is_written_if_something_is_missing(root: Path, which: str) -> None:
    lines: dict[str, Any] = fabricated_run()
    page = root / "docs/index.md"
    if which == "a row":
        del lines["tokens"]
    else:
        page.write_text(page.read_text().replace(END, ""))
    before = [(root / path).read_text() for path in (PAGE, *FRONT)]
    expected = {"a row": "README.md: the run has no row tokens: windows", "a mark": "docs/index.md: needs a line"}[which]
    with pytest.raises(SystemExit, match=expected):
        write_pages(CONDITIONS, lines, {}, root)
    assert before == [(root / path).read_text() for path in (PAGE, *FRONT)]


@pytest.mark.parametrize("path", FRONT, ids=str)
def test_front_page_has_the_listed_rows(path: Path) -> None:
    written = [re.sub(r" \(\d{4}-\d\d-\d\d\)$", "", cells[0]) for cells in table(between((ROOT / path).read_text()))]
    assert [words for words, _, _ in FRONT[path]] == written


def texts(name: str) -> list[str]:
    """Returns patterns of the possible strings of a benchmark."""
    found = []
    for node in ast.walk(ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            if len("".join(part or "" for part in parts)) > 8:
                found.append("".join(".+" if part is None else re.escape(part) for part in parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.escape(node.value))
    return found


@pytest.mark.parametrize(("name", "what"), [row[1:] for row in README])
def test_listed_row_exists_in_its_benchmark(name: str, what: str) -> None:
    assert any(re.fullmatch(text, what) for text in texts(name))


@pytest.mark.skipif("\n## " not in between((ROOT / PAGE).read_text()), reason="the page has no measurements yet")
def test_pages_are_of_one_run() -> None:
    assert disagreements(ROOT) == []
