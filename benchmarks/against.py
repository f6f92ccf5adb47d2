"""Compare this tree with an earlier one: run every benchmark on both, and report the rows that have become slower.

    python -m benchmarks.against                         the newest tag, else the commit that last changed the version
    python -m benchmarks.against v0.1.0 --only tar,photos --rounds 5
    python -m benchmarks.against --json run.json --write      also write docs/measurements.md and the tables of figures
    python -m benchmarks.against --only tar --write           update only the sections of the benchmarks that have run
    python -m benchmarks.against --json run.json --continue   complete a stopped run of the same trees
    python -m benchmarks.against --from run.json --write      write a saved run into the pages, and measure nothing

Method: The earlier tree is a git worktree in a temporary folder, compiled by this interpreter. It gets a copy of this tree's
benchmarks/ and tests/, so that both trees run the same benchmarks. If these cannot be imported there, it runs its own
benchmarks, and rows with the same name are compared. In each round, a benchmark runs on both trees, in a fresh process each
time; which tree is first alternates. Do not change the tree during a run.

How to read: Each row shows this tree's figure over the earlier tree's within a round: the median of these ratios, the lowest
and the highest. A row has changed if the ratios of all rounds are on one side of 1 and their median is more than 5 % away from
it. By chance, three rounds are on one side once in four times. Therefore a benchmark with a row that seems to be worse is
repeated until no row does, or for as many rounds again, and all rounds count; by chance, six rounds are on one side once in 32
times. Rows that seem better are not repeated. Fewer than three rounds are not judged. The aim of a row defines which direction
is better: `<=` and `<` mean less, `>=` and `>` mean more.

The command exits with 1 if a row is worse or a benchmark fails on this tree. It is not a failure if a benchmark does not run on
the earlier tree.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.__main__ import BENCHMARKS
from benchmarks.common import ROUND, Row, Settings
from benchmarks.pages import Line, write_pages
from shmload.cli.terminal import Bar, console, progress_bar
from shmload.tools.bench.report import machine
from shmload.tools.bench.spread import Spread

ROOT = Path(__file__).resolve().parents[1]
TREES = ("now", "before")
GIVEN = ("benchmarks", "tests")  # copied from this tree to the earlier one; some benchmarks start servers with modules of tests/
MIN_ROUNDS, BEYOND = 3, 1.05
INSTALL = "`.venv/bin/pip install -q -c constraints.txt -e '.[dev]'` in the clone"  # as in README.md
DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Run:
    """A benchmark on one tree in one round: its rows, or the reason why it has none."""

    rows: list[Row]
    why: str = ""
    has_failed: bool = False


Runs = Mapping[str, Sequence[Run]]  # the runs of one benchmark: tree (of TREES) -> one run per round


@dataclass
class Comparison:
    """All runs of a comparison, and their conditions."""

    conditions: dict[str, Any]
    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)

    def save(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Comparison":
        found = json.loads(path.read_text())
        runs = {
            name: {tree: [Run(**{**run, "rows": [Row(**row) for row in run["rows"]]}) for run in each] for tree, each in of.items()}
            for name, of in found["runs"].items()
        }
        return cls(found["conditions"], runs)

    def lines(self) -> dict[str, list[Line]]:
        return {name: lines_of(runs) for name, runs in self.runs.items()}

    def notes(self) -> dict[str, str]:
        """Returns a dict: benchmark -> why it has no results on this tree or on the earlier one."""
        found = {}
        for name, runs in self.runs.items():
            if text := failure(runs["now"]):
                found[name] = f"{'Fails' if any(run.has_failed for run in runs['now']) else 'Left out'}: {text}"
            elif text := failure(runs["before"]):
                found[name] = f"Does not run on {self.conditions['before']}: {text}"
        return found

    def complaints(self) -> list[str]:
        """Returns the reasons why the command fails; empty if it succeeds."""
        failed = [
            f"{name} fails: {failure(runs['now'])}" for name, runs in self.runs.items() if any(r.has_failed for r in runs["now"])
        ]
        worse = [f"{name}: {line.row.what}" for name, lines in self.lines().items() for line in lines if line.word == "worse"]
        return failed + [f"worse than {self.conditions['before']}: {text}" for text in worse]


def failure(runs: Sequence[Run]) -> str:
    """Returns why a tree has no rows; empty if it has rows."""
    return next((run.why for run in runs if not run.rows), "")


def lines_of(runs: Runs) -> list[Line]:
    """Returns the rows of this tree together with the earlier tree's rows of the same name."""
    now, before = ([{row.what: row for row in run.rows} for run in runs[tree]] for tree in TREES)
    lines = []
    for what in dict.fromkeys(what for rows in now for what in rows):
        found = sorted((rows[what] for rows in now if what in rows), key=lambda row: row.got)
        old = [rows[what].got for rows in before if what in rows]
        pairs = [(mine[what].got, its[what].got) for mine, its in zip(now, before, strict=False) if what in mine and what in its]
        ratios = [mine / its for mine, its in pairs if mine > 0 and its > 0]  # a difference may be around 0
        row = found[(len(found) - 1) // 2]
        lines.append(
            Line(
                row,
                statistics.median(old) if old else None,
                Spread.of(ratios) if ratios else None,
                word(ratios, row.aim) if len(ratios) == len(pairs) else "",
                Spread.of([row.got for row in found]) if len(found) > 1 else None,
            )
        )
    return lines


def word(ratios: Sequence[float], aim: str) -> str:
    """Returns `better`, `worse` or `same`; empty if there are too few rounds, or neither direction is better."""
    if len(ratios) < MIN_ROUNDS or aim[:1] not in ("<", ">"):
        return ""
    middle = statistics.median(ratios)
    if min(ratios) <= 1 <= max(ratios) or max(middle, 1 / middle) <= BEYOND:
        return "same"
    return "worse" if (middle > 1) == (aim[0] == "<") else "better"


def run_once(name: str, tree: Path, seconds: float, number: int) -> Run:
    """Runs one round of a benchmark on one tree, in a fresh process."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        answer = Path(folder, "rows.json")
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}"]
        command += ["--rounds", "1", "--seconds", str(seconds), "--json", str(answer)]
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment(tree) | {ROUND: str(number)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,  # so that all processes that it starts can be stopped together
        )
        try:
            process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            return Run([], f"not done after {DEADLINE_S:.0f} s", has_failed=True)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        last = next((line.strip() for line in reversed(said.readlines()) if line.strip()), "no output")
        last = last.replace(str(tree), ".")
        if process.returncode or not answer.exists():
            return Run([], last, has_failed=True)
        found = json.loads(answer.read_text())["results"][name]
    rows = [Row(**row) for row in found["rows"]]
    if len({row.what for row in rows}) < len(rows):
        return Run([], "two of its rows have the same name", has_failed=True)
    return Run(rows, "" if rows else found.get("left out", last))


def environment(tree: Path) -> dict[str, str]:
    """Returns an environment in which every process imports the packages of `tree`, even if shmload is installed elsewhere."""
    return {**os.environ, "PYTHONPATH": str(tree)}


def rounds_of(
    name: str, trees: Mapping[str, Path], settings: Settings, bar: Bar, run: Callable[[str, Path, float, int], Run] = run_once
) -> dict[str, list[Run]]:
    """Runs all rounds of a benchmark. If it fails on a tree, it is not run there again."""
    runs: dict[str, list[Run]] = {tree: [] for tree in TREES}
    for number in range(2 * settings.rounds):
        if number >= settings.rounds and not any(line.word == "worse" for line in lines_of(runs)):
            break
        for tree in TREES[:: 1 if number % 2 == 0 else -1]:
            if failure(runs["now"]) or failure(runs[tree]):
                continue
            bar.doing(f"{name}, round {number + 1}, {tree}")
            runs[tree].append(run(name, trees[tree], settings.seconds, number))
    return runs


def git(*words: str, root: Path = ROOT) -> str:
    """Returns the output of a git command.

    Raises:
        SystemExit: the command fails.
    """
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def last_release(root: Path = ROOT) -> str:
    """Returns the newest tag of this history, or else the commit that last changed the version."""
    if git("tag", "--merged", root=root):
        return git("describe", "--tags", "--abbrev=0", root=root)
    return git("log", "-1", "--format=%h", "-G^version = ", "--", "pyproject.toml", root=root)


@contextmanager
def earlier(revision: str, root: Path = ROOT) -> Iterator[Path]:
    """Yields a compiled tree of a revision. It contains this tree's benchmarks, or its own if these cannot be imported there."""
    with tempfile.TemporaryDirectory(prefix="shmload-before-") as folder:
        tree = Path(folder, "tree")
        git("worktree", "add", "--detach", str(tree), revision, root=root)
        try:
            for name in GIVEN:
                shutil.rmtree(tree / name, ignore_errors=True)
                shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            build(tree)
            command = [sys.executable, "-P", "-c", "import benchmarks.common"]
            if subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True).returncode:
                git("checkout", "--", *GIVEN, root=tree)
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree), root=root)


def build(tree: Path) -> None:
    """Compiles a tree in place, and checks that Python imports the package from it.

    Raises:
        SystemExit: the tree cannot be compiled.
    """
    look = "import shmload; shmload.ShmLoader; print(shmload.__file__)"
    for words in (["setup.py", "-q", "build_ext", "--inplace"], ["-P", "-c", look]):
        done = subprocess.run([sys.executable, *words], cwd=tree, env=environment(tree), capture_output=True, text=True)
        if done.returncode:
            missing = re.search(r"No module named '((?!shmload)[^']+)'", done.stderr)
            remedy = "it cannot be built, or is no shmload yet: name another commit to compare with"
            if missing:
                raise SystemExit(f"{missing[1]} is not installed: run {INSTALL}")
            raise SystemExit(f"{done.stderr[-4000:]}\n{tree}: {remedy}")
    if tree not in Path(done.stdout.strip()).parents:
        raise SystemExit(f"{tree}: imported {done.stdout.strip()} in its place")


def table(lines: Sequence[Line]) -> Table:
    made = Table("measured", "now", "before", "now / before", "better is", "", "aim", "")
    colors = {"better": "green", "worse": "red"}
    for line in lines:
        verdict = f"[{colors[line.word]}]{line.word}[/]" if line.word in colors else line.word
        met = "[green]met[/]" if line.row.met else "[red]missed[/]"
        cells = map(escape, (line.row.what, line.figure, line.figure_before, line.change, line.better_is))
        made.add_row(*cells, verdict, escape(line.row.aim), met)
    return made


def show(name: str, comparison: Comparison, to: Console) -> None:
    """Prints the results of one benchmark."""
    to.print(f"[bold]{name}[/]")
    if lines := lines_of(comparison.runs[name]):
        to.print(table(lines))
    if note := comparison.notes().get(name):
        to.print(escape(note))


def compare(
    revision: str, names: Sequence[str], settings: Settings, path: Path | None, kept: Comparison | None = None
) -> Comparison:
    """Builds both trees and runs the benchmarks. After each one, prints its results and saves all results to `path`.

    Args:
        kept: an interrupted run, whose results are not measured again.
    Raises:
        SystemExit: `kept` is a run of other trees or settings.
    """
    commit = git("rev-parse", "--short", revision)
    comparison = Comparison(
        {
            "before": revision if revision == commit else f"{revision} ({commit})",
            "now": git("describe", "--always", "--dirty", "--exclude", "*"),
            "started": time.strftime("%Y-%m-%d %H:%M %Z"),
            "load": round(os.getloadavg()[0], 1),
            **asdict(settings),
            **machine(),
        }
    )
    if kept is not None:
        for name in ("before", "now", "rounds", "seconds"):
            if (its := kept.conditions[name]) != (mine := comparison.conditions[name]):
                raise SystemExit(f"--continue: {path} was measured with {name} {its}, and now it is {mine}. Begin a run of its own")
        comparison = kept
        names = [name for name in names if name not in kept.runs]
    with progress_bar(sys.stderr.isatty()) as bar:
        bar.start(len(names))
        bar.doing(f"building {revision}")
        build(ROOT)
        with earlier(revision) as tree:
            for name in names:
                comparison.runs[name] = rounds_of(name, {"now": ROOT, "before": tree}, settings, bar)
                comparison.save(path)  # so that an interrupted run keeps its results
                show(name, comparison, console())
                bar.advance()
    return comparison


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", nargs="?", metavar="REV", help="the earlier tree: a tag or a commit")
    parser.add_argument("--only", metavar="NAME,...", help="these benchmarks")
    parser.add_argument("--rounds", type=int, default=Settings.rounds, help="of each benchmark on each tree")
    parser.add_argument("--seconds", type=float, default=Settings.seconds, help="of every timed part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument(
        "--continue", action="store_true", dest="goes_on", help="with --json: only what that file does not contain yet"
    )
    parser.add_argument("--from", type=Path, metavar="FILE", dest="kept", help="read what --json wrote, and measure nothing")
    parser.add_argument(
        "--write", action="store_true", help="write or renew docs/measurements.md and the tables of README.md and docs/index.md"
    )
    given = parser.parse_args()
    kept = Comparison.load(given.kept) if given.kept else None
    names = list(kept.runs) if kept else given.only.split(",") if given.only else list(BENCHMARKS)
    if unknown := set(names).difference(BENCHMARKS):
        parser.error(f"--only: needs names of {', '.join(BENCHMARKS)}, given {', '.join(sorted(unknown))}")
    if given.goes_on and not (given.json and given.json.exists()):
        parser.error("--continue: needs --json with the file of the run that was stopped")
    if given.rounds < 1:
        parser.error(f"--rounds: needs at least 1, given {given.rounds}")
    if kept:
        comparison = kept
        for name in names:
            show(name, comparison, console())
    else:
        stopped = Comparison.load(given.json) if given.goes_on else None
        comparison = compare(given.revision or last_release(), names, Settings(given.rounds, given.seconds), given.json, stopped)
    if given.write:
        is_whole = set(comparison.runs) == set(BENCHMARKS)
        write_pages(comparison.conditions, comparison.lines(), comparison.notes(), is_whole=is_whole)
    complaints = comparison.complaints()
    is_judged = comparison.conditions["rounds"] >= MIN_ROUNDS
    calm = (
        f"nothing is worse than {comparison.conditions['before']}" if is_judged else f"not judged: that takes {MIN_ROUNDS} rounds"
    )
    print("\n".join(complaints) or calm)
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
