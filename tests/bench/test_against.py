"""The comparison with an earlier tree: what counts as a change, what is run, and that each tree uses its own package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from benchmarks import against
from benchmarks.against import Comparison, Run, last_release, lines_of, rounds_of, word
from benchmarks.common import Row, Settings

TREES = {"now": Path("now"), "before": Path("before")}
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


class NoBar:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def start(self, num_jobs: int) -> None: ...

    def doing(self, text: str) -> None:
        self.texts.append(text)

    def advance(self) -> None: ...


def row(got: float, aim: str = "<= 10 us", what: str = "a batch") -> Row:
    return Row(what, got, "us", f"torch {3 * got:g}", aim, got <= 10)


def runs(*figures: float, aim: str = "<= 10 us") -> list[Run]:
    return [Run([row(got, aim)]) for got in figures]


@pytest.mark.parametrize(
    ("ratios", "aim", "expected"),
    [
        ((1.2, 1.1, 1.06), "<= 1 us", "worse"),
        ((1.2, 1.1, 1.06), ">= 8x", "better"),
        ((0.8, 0.9, 0.7), "< 1x", "better"),
        ((0.8, 0.9, 0.7), "> 1x", "worse"),
        ((1.2, 1.1, 0.99), "<= 1 us", "same"),  # not all on one side
        ((1.2, 1.1, 1.0), "<= 1 us", "same"),
        ((1.2, 1.04, 1.01), "<= 1 us", "same"),  # within 5%
        ((0.96, 0.96, 0.96), "<= 1 us", "same"),
        ((1.2, 1.1), "<= 1 us", ""),  # too few rounds
        ((1.2, 1.1, 1.06), "-", ""),  # no earlier value to compare with
        ((), "<= 1 us", ""),
    ],
)
def test_row_has_changed_if_all_rounds_differ_by_more_than_noise(ratios: tuple[float, ...], aim: str, expected: str) -> None:
    assert expected == word(ratios, aim)


def test_ratios_are_computed_per_round_and_the_row_is_that_of_the_median_round() -> None:
    (line,) = lines_of({"now": runs(20, 8, 9), "before": runs(10, 4, 6)})
    assert (row(9), 6, (2.0, 1.5, 2.0)) == (line.row, line.before, (line.ratio.median, line.ratio.low, line.ratio.high))
    assert line.word == "worse"
    assert line.cells() == ("a batch", "9 us (8 to 20)", "torch 27", "<= 10 us", "met", "6 us", "2 (1.5 to 2)", "less", "worse")


def test_row_of_only_one_tree_is_not_compared() -> None:
    (line,) = lines_of({"now": runs(1, 2, 3), "before": [Run([], "ImportError: no", has_failed=True)]})
    assert (line.before, line.ratio, line.word) == (None, None, "")
    assert line.cells()[5:7] == ("-", "-")


def test_differences_around_zero_are_not_compared() -> None:
    (line,) = lines_of({"now": runs(-1, 2, 3), "before": runs(1, 1, 1)})
    assert line.word == ""
    (line,) = lines_of({"now": runs(0, 0, 0), "before": runs(0, 0, 0)})
    assert (line.ratio, line.word) == (None, "")


def measured(answers: dict[str, list[Run]], rounds: int) -> tuple[list[str], dict[str, list[Run]]]:
    """Returns the order in which the trees were run, and their runs."""
    order: list[str] = []

    def run(name: str, tree: Path, seconds: float, number: int) -> Run:
        order.append(tree.name)
        found = answers[tree.name]
        return found[min(order.count(tree.name), len(found)) - 1]

    return order, rounds_of("tar", TREES, Settings(rounds, 0.1), NoBar(), run)


def test_trees_alternate() -> None:
    order, found = measured({"now": runs(1, 1, 1), "before": runs(1, 1, 1)}, 3)
    assert order == ["now", "before", "before", "now", "now", "before"]
    assert {tree: len(each) for tree, each in found.items()} == {"now": 3, "before": 3}


def test_benchmark_with_changes_is_run_again_and_all_rounds_count() -> None:
    _, found = measured({"now": runs(2, 2, 2, 2, 1, 2), "before": runs(1)}, 3)
    assert [len(found[tree]) for tree in TREES] == [5, 5]
    assert [line.word for line in lines_of(found)] == ["same"]
    _, found = measured({"now": runs(2), "before": runs(1)}, 3)
    assert [len(found[tree]) for tree in TREES] == [6, 6]
    assert [line.word for line in lines_of(found)] == ["worse"]


def test_benchmark_that_fails_on_a_tree_is_run_there_once() -> None:
    order, found = measured({"now": runs(1), "before": [Run([], "ImportError: no such name", has_failed=True)]}, 3)
    assert order == ["now", "before", "now", "now"]
    comparison = Comparison({"before": "v0.1.0"}, {"tar": found})
    assert comparison.notes() == {"tar": "Does not run on v0.1.0: ImportError: no such name"}
    assert comparison.complaints() == []


def test_skipped_benchmark_is_not_a_failure_and_a_failing_one_is() -> None:
    order, found = measured({"now": [Run([], "no GPU")], "before": runs(1)}, 3)
    assert order == ["now"]
    comparison = Comparison(
        {"before": "v0.1.0"}, {"gpu": found, "tar": {"now": [Run([], "ValueError: x", has_failed=True)], "before": []}}
    )
    assert comparison.notes() == {"gpu": "Left out: no GPU", "tar": "Fails: ValueError: x"}
    assert comparison.complaints() == ["tar fails: ValueError: x"]


def test_worse_row_is_reported_and_a_comparison_can_be_saved(tmp_path: Path) -> None:
    comparison = Comparison({"before": "v0.1.0"}, {"tar": {"now": runs(2, 2, 2), "before": runs(1, 1, 1)}})
    assert comparison.complaints() == ["worse than v0.1.0: tar: a batch"]
    comparison.save(tmp_path / "run.json")
    assert Comparison.load(tmp_path / "run.json") == comparison


PROGRAM = """
import json, sys
import shmload
row = {"what": "a batch", "got": shmload.COST, "unit": "us", "beside": "", "aim": "<= 9 us", "met": True}
name = sys.argv[0].rpartition("/")[2].removesuffix(".py")
open(sys.argv[-1], "w").write(json.dumps({"results": {name: {"rows": [row, row] if name == "twice" else [row]}}}))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Creates a repository with a package that gets slower and a benchmark that is added later."""
    files = {
        "pyproject.toml": '[project]\nname = "shmload"\nversion = "0.1.0"\n',
        "setup.py": "from setuptools import setup\n\nsetup(packages=[])\n",
        "shmload/__init__.py": "COST = 2\nShmLoader = object\n",
        "benchmarks/__init__.py": "",
        "benchmarks/common.py": "",
        "tests/__init__.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root = tmp_path / "tree"
    commit(root, "init", "-q")
    return root


def commit(root: Path, *first: str) -> None:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    for words in (*([first] if first else []), ("add", "-A"), (*who, "commit", "-qm", "x", "--no-gpg-sign")):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)


@needs_git
def test_earlier_tree_is_the_newest_tag_or_where_the_version_changed(tree: Path) -> None:
    first = against.git("rev-parse", "--short", "HEAD", root=tree)
    (tree / "shmload" / "__init__.py").write_text("COST = 3\n")
    commit(tree)
    assert last_release(tree) == first
    against.git("tag", "v0.1.0", root=tree)
    assert last_release(tree) == "v0.1.0"


@needs_git
def test_error_names_the_unknown_revision(tree: Path) -> None:
    with pytest.raises(SystemExit, match="v9"), against.earlier("v9", tree):
        pass


@needs_git
@pytest.mark.slow(reason="builds a package with setuptools and runs a benchmark in other processes")
def test_each_tree_is_measured_with_its_package_and_the_same_benchmarks(tree: Path) -> None:
    (tree / "shmload" / "__init__.py").write_text("COST = 6\nShmLoader = object\n")
    for name in ("tiny", "twice"):  # missing in the earlier tree
        (tree / "benchmarks" / f"{name}.py").write_text(PROGRAM)
    with against.earlier("HEAD", tree) as before:
        found = rounds_of("tiny", {"now": tree, "before": before}, Settings(3, 0.1), NoBar())
        absent, twice = (against.run_once(name, before, 0.1, 0) for name in ("absent", "twice"))
    assert [(line.row.got, line.before, line.word) for line in lines_of(found)] == [(6.0, 2.0, "worse")]
    assert absent.has_failed
    assert "benchmarks.absent" in absent.why
    assert twice == Run([], "two of its rows have the same name", has_failed=True)
    assert not before.exists()
    assert against.git("worktree", "list", root=tree).count("\n") == 0


@needs_git
@pytest.mark.slow(reason="builds a package with setuptools")
def test_earlier_tree_keeps_its_benchmarks_if_it_cannot_import_the_new_ones(tree: Path) -> None:
    (tree / "shmload" / "__init__.py").write_text("COST = 6\nShmLoader = object\n")
    (tree / "benchmarks" / "common.py").write_text("from shmload import New\n")
    with against.earlier("HEAD", tree) as before:
        assert (before / "benchmarks" / "common.py").read_text() == ""


def test_error_for_a_missing_module_names_it_and_the_command_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("raise ModuleNotFoundError(\"No module named 'Cython'\")")
    with pytest.raises(SystemExit, match=r"^Cython is not installed: run `.* -e '.\[dev\]'` in the clone$"):
        against.build(tmp_path)
    command = against.INSTALL.split("`")[1]
    assert command in (against.ROOT / "README.md").read_text()


@needs_git
@pytest.mark.slow(reason="builds a package with setuptools")
def test_tree_whose_package_is_not_imported_is_an_error(tree: Path) -> None:
    shutil.rmtree(tree / "shmload")
    with pytest.raises(SystemExit, match=r"in its place|No module named"):  # whether shmload is installed or not
        against.build(tree)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--only", "tar,none"), "given none"),
        (("--rounds", "0"), "needs at least 1, given 0"),
        (("--continue",), "needs --json"),
        (("--continue", "--json", "no such file"), "needs --json with the file"),
    ],
)
def test_invalid_arguments_are_errors(
    words: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["against", *words])
    with pytest.raises(SystemExit) as ended:
        against.main()
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("now", "code", "last"),
    [
        ((2, 2, 2), 1, "worse than v0.1.0: tar: a batch"),
        ((1, 1, 1), 0, "nothing is worse than v0.1.0"),
        ((2, 2), 0, "not judged: that takes 3 rounds"),
    ],
)
def test_saved_run_is_shown_with_what_is_worse(
    now: tuple[float, ...],
    code: int,
    last: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.json"
    before = runs(*[1] * len(now))
    Comparison({"before": "v0.1.0", "rounds": len(now)}, {"tar": {"now": runs(*now), "before": before}}).save(path)
    monkeypatch.setattr(sys, "argv", ["against", "--from", str(path)])
    with pytest.raises(SystemExit) as ended:
        against.main()
    shown = capsys.readouterr().out
    assert ended.value.code == code
    assert shown.splitlines()[-1] == last
    assert f"{now[0]} ({now[0]} to {now[0]})" in shown


@needs_git
@pytest.mark.parametrize(("seconds", "message"), [(0.5, ""), (0.7, "was measured with seconds 0.5, and now it is 0.7")])
def test_interrupted_run_continues_where_it_stopped(
    seconds: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def rounds_by_name(name: str, *_: object) -> dict[str, list[Run]]:
        measured.append(name)
        return {"now": runs(1), "before": runs(2)}

    @contextmanager
    def nothing_built(revision: str) -> Iterator[Path]:
        yield tmp_path

    monkeypatch.setattr(against, "rounds_of", rounds_by_name)
    monkeypatch.setattr(against, "build", lambda tree: None)
    monkeypatch.setattr(against, "earlier", nothing_built)
    monkeypatch.setattr(against, "git", lambda *words, **options: words[-1])
    path = tmp_path / "run.json"
    against.compare("HEAD", ["tar"], Settings(3, 0.5), path)
    with pytest.raises(SystemExit, match=message) if message else nullcontext():
        against.compare("HEAD", ["tar", "mix"], Settings(3, seconds), path, Comparison.load(path))
    assert measured == (["tar"] if message else ["tar", "mix"])
    assert list(Comparison.load(path).runs) == measured
