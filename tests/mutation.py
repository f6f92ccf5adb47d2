"""Mutants: changes one operator, constant, condition or statement of a copy at a time, and asks whether a quick test notices.

    python -m tests.mutation                                     30 mutants of each package: about an hour on one busy core
    python -m tests.mutation --module shmload/modes/seed_mode.py --sample 200 --seed 1
    python -m tests.mutation --out FILE                          keeps each verdict as a line of JSON; a second run goes on from there
    python -m tests.mutation --again FILE                        those of such a file that no test noticed

First the quick tests run once in a copy that notes which test comes to which block of statements, in whatever process. Then a mutant
meets the tests of its block, fastest first, until one fails. A mutant's tests run in a process that is forked from one that has
imported torch, in a session and with a /dev/shm of their own; all that they started is killed after them.

Verdicts: "killed"; "hung" (a test took far more time than ever: counts as caught); "survived"; "unreached" (no quick test comes
there). Survivors are read by a human: some change nothing that anybody could see. Texts are left alone: docstrings, messages, logs,
annotations, __repr__. The built modules of this tree are used as they are, so build them first. It takes root.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import gc
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.planted.planting import ROOT, copy_tree
from tests.side_by_side import own_shared_memory

_DELIVERY = "behaviour device engine faults loader parity resume sharing top trace"
AREAS = {  # a package, and where its tests are
    "shmload/schedule": "schedule resume loader pipeline",
    "shmload/storage": "storage remote",
    "shmload/formats": "formats",
    "shmload/modes": _DELIVERY,
    "shmload/engine": _DELIVERY,
}
CASES = 2  # of a parametrized test, at most: its first and its last
FIXED = (
    "-q",
    "-n0",
    "-p",
    "no:cacheprovider",
    "--tb=short",
    "--hypothesis-seed=1",
    "-mnot slow",
    "--capture=sys",
    "--continue-on-collection-errors",
)
BUDGET_S = 12.0  # of tests for one mutant, as they took before
FIRST = 25  # so many tests come first, by themselves: most mutants need no more
TEST_TIMEOUT_S, CPU_LIMIT_S, RUN_LIMIT_S = 30, 60, 240  # starting a store takes its time
_SUBREAPER = 36

COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: the text from `begin` to `end` of a file, as offsets in its bytes, becomes `new`."""

    path: str
    line: int
    what: str
    source: str  # the line, as it is
    begin: int
    end: int
    new: str
    block: int  # of statements, as `blocks_of` counts; -1: outside functions

    @property
    def key(self) -> str:
        return f"{self.path} {self.source} {self.what}"


def bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements right below a node."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(part := getattr(node, name, None), list) and part and isinstance(part[0], ast.stmt):
            yield part
    for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield part.body


def blocks_of(tree: ast.Module) -> list[list[ast.stmt]]:
    """Each list of statements that stands in a function, in an order that only depends on the text."""
    return [body for body, _ in numbered_blocks(tree)]


def numbered_blocks(tree: ast.Module) -> list[tuple[list[ast.stmt], int]]:
    """The same, each with the line of the outermost function that it stands in."""
    found: list[tuple[list[ast.stmt], int]] = []

    def walk(node: ast.AST, function: int) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = function or node.lineno
        for body in bodies(node):
            if function:
                found.append((body, function))
            for statement in body:
                walk(statement, function)

    walk(tree, 0)
    return found


def noted(text: str, first: int, path: Path, size: int) -> str:
    """The source with a note of each block's number, in a file that all processes map."""
    tree = ast.parse(text)
    for number, body in enumerate(blocks_of(tree), first):
        body.insert(int(ast.get_docstring(ast.Module(body, [])) is not None), ast.parse(f"_HITS[{number}] = 1").body[0])
    header = (
        "import mmap as _mmap, os as _os\n"
        f"_fd = _os.open({str(path)!r}, _os.O_RDWR)\n_HITS = _mmap.mmap(_fd, {size})\n_os.close(_fd)\ndel _fd, _mmap, _os\n"
    )
    place = int(ast.get_docstring(tree) is not None)
    while place < len(tree.body) and isinstance(tree.body[place], ast.ImportFrom) and tree.body[place].module == "__future__":
        place += 1
    tree.body[place:place] = ast.parse(header).body
    return ast.unparse(ast.fix_missing_locations(tree))


class Mutator(ast.NodeVisitor):
    """Collects a file's mutants."""

    def __init__(self, path: str, text: str) -> None:
        self.found: list[Mutant] = []
        self._path, self._lines = path, text.splitlines()
        starts = [0]
        for line in text.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts, self._block = starts, -1
        tree = ast.parse(text)
        self._numbers = {id(body): number for number, body in enumerate(blocks_of(tree))}
        self.visit(tree)

    def _add(self, node: Any, what: str, new: str) -> None:
        begin, end = self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset
        source = self._lines[node.lineno - 1].strip()
        self.found.append(Mutant(self._path, node.lineno, what, source, begin, end, new, self._block))

    def _swap(self, node: Any, what: str, **parts: Any) -> None:
        """The node with some of its parts changed."""
        changed = type(node)(**{**dict(ast.iter_fields(node)), **parts})
        self._add(node, what, f"({ast.unparse(ast.fix_missing_locations(ast.copy_location(changed, node)))})")

    def generic_visit(self, node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                outer, self._block = self._block, self._numbers.get(id(value), self._block)
                for each in value:
                    self.visit(each)
                self._block = outer
            else:
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.AST):
                        self.visit(each)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name == "__repr__":
            return
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        outer, self._block = self._block, self._numbers[id(node.body)]
        for statement in node.body:
            self.visit(statement)
        self._block = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            for statement in node.body:
                self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigned(node, [node.target])
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not (isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"):
            self._assigned(node, node.targets)
            self.visit(node.value)

    def _assigned(self, node: ast.stmt, targets: list[ast.expr]) -> None:
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            self._add(node, "assignment deleted", "pass")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assigned(node, [node.target])
        if type(node.op) in COMPUTED:
            new = ast.AugAssign(node.target, COMPUTED[type(node.op)](), node.value)
            self._add(node, "arithmetic", ast.unparse(new))
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call):
            if is_log(node.value):
                return
            self._add(node, "call deleted", "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "raise deleted", "pass")  # its message is left alone

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                self._add(node, "returns None", "return None")
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, op in enumerate(node.ops):
            ops = [*node.ops]
            ops[place] = COMPARED[type(op)]()
            self._swap(node, "comparison" + f" {place}" * (len(ops) > 1), ops=ops)
        for part in [node.left, *node.comparators]:
            if not (isinstance(part, ast.Constant) and part.value is None):
                self.visit(part)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
                      for side in (node.left, node.right))  # fmt: skip
        if type(node.op) in COMPUTED and not is_text:
            self._swap(node, "arithmetic", op=COMPUTED[type(node.op)]())
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._swap(node, "and/or", op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(node, "not removed" if isinstance(node.op, ast.Not) else "minus removed", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if value is None or isinstance(value, bool):
            self._add(node, "constant", "0" if value is None else str(not value))
        elif isinstance(value, int | float):
            self._add(node, "constant", f"({value + 1!r})")

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if not (is_log(node) or name.endswith(("Error", "Warning", "TypeVar")) or name == "cast"):
            self.generic_visit(node)

    def _tested(self, node: Any, values: tuple[str, ...] = ("True", "False")) -> None:
        for value in values:
            self._add(node, f"condition {value}", value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self._tested(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._tested(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._tested(node.test, ("False",))
        if not isinstance(node.test, ast.Constant):
            self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._tested(test)
        self.generic_visit(node)


def is_log(node: ast.Call) -> bool:
    """Whether a call only says something."""
    words = ast.unparse(node.func).lower()
    return words == "warnings.warn" or ("log" in words.split(".")[0] and "." in words and words.rsplit(".")[-1] in
                                        ("info", "warning", "error", "exception", "debug", "log"))  # fmt: skip


class Notes:
    """A plugin of pytest: which blocks each test comes to, and how long it takes."""

    def __init__(self, path: Path, size: int) -> None:
        import mmap

        with path.open("r+b") as file:
            self._hits = mmap.mmap(file.fileno(), size)
        self._size = size
        self.tests: dict[str, dict[str, Any]] = {}
        self.set_up: defaultdict[str, set[int]] = defaultdict(set)  # by a file's fixtures: they count for all its tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            cases[item.nodeid.partition("[")[0]].append(item)
        kept = {id(found[place * (len(found) - 1) // (CASES - 1)]) for found in cases.values() for place in range(CASES)}
        items[:] = [item for item in items if id(item) in kept]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hits = {place for place, byte in enumerate(self._hits[:]) if byte}
        self._hits[:] = bytes(self._size)
        test = self.tests.setdefault(report.nodeid, {"took_s": 0.0, "passes": True, "hits": []})
        test["took_s"] += report.duration
        test["passes"] &= report.passed
        test["hits"] = sorted({*test["hits"], *hits})
        if report.when == "setup":
            self.set_up[report.nodeid.split("::")[0]] |= hits


class Trial:
    """A plugin of pytest: once all is collected, each mutant meets its tests in a process forked from here.

    There the code of the function that was changed is put into the living function: nothing is imported or collected anew. Where
    that does not do (what runs at an import, a closure that lost a name), a fresh pytest runs the tests, which costs seconds.
    """

    def __init__(
        self, copy: Copy, mutants: list[Mutant], notes: dict[str, Any], tell: Callable[[Mutant, str, str, float], None]
    ) -> None:
        self._copy, self._mutants, self._notes, self._tell = copy, mutants, notes, tell
        self._said = ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()  # so that functions are among what is found
        self._functions: defaultdict[tuple[str, str, int], list[types.FunctionType]] = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is types.FunctionType and each.__code__.co_filename.startswith(str(self._copy.folder)):
                self._functions[place_of(each.__code__)].append(each)
        gc.collect()
        gc.freeze()
        self._items = {item.nodeid: item for item in session.items}
        for mutant in self._mutants:
            began = time.monotonic()
            names = [name for name in tests_of(mutant, self._copy, self._notes, self._items) if name in self._items]
            verdict, said = self._verdict(mutant, names) if names else ("unreached", "")
            self._tell(mutant, verdict, said, time.monotonic() - began)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._said:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._said = f"{report.nodeid} {report.when}: {crash.message if crash else report.longrepr}"[:400]

    def _verdict(self, mutant: Mutant, names: list[str]) -> tuple[str, str]:
        path, text = self._copy.folder / mutant.path, self._copy.sources[mutant.path].encode()
        mutated = text[: mutant.begin] + mutant.new.encode() + text[mutant.end :]
        path.write_bytes(mutated)  # for processes that import it
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            cached.unlink()
        load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        try:
            said, is_late = self._copy.forked(
                lambda: self._run(mutant, compile(mutated, path, "exec"), names, load), RUN_LIMIT_S * load
            )
        finally:
            path.write_bytes(text)
        if is_late:
            return "hung", "killed for its time"
        if said is None:
            return "killed", "the process died"
        if said:
            return ("hung" if "Timeout (>" in said else "killed"), said  # as pytest-timeout says it
        return "survived", f"{len(names)} tests"

    def _run(self, mutant: Mutant, code: types.CodeType, names: list[str], load: float) -> str:
        """What the first test says that fails; in a process of its own."""
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
        if not self._is_swapped(mutant, code):
            command = [sys.executable, "-m", "pytest", *FIXED, "-x", f"--timeout={TEST_TIMEOUT_S * load:.0f}", *names]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = [line for line in done.stdout.splitlines() if "Timeout (>" in line or line.startswith(("FAILED", "ERROR"))]
            return "" if done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else (said or [done.stdout[-300:]])[0]
        items = [self._items[name] for name in names]
        for item, following in zip(items, [*items[1:], None], strict=True):
            took_s = self._notes[item.nodeid]["took_s"] if item.nodeid in self._notes else 1.0
            signal.setitimer(signal.ITIMER_PROF, 5 + 10 * took_s)  # of CPU time: a loaded machine does no harm
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._said:
                break
        return self._said

    def _is_swapped(self, mutant: Mutant, code: types.CodeType) -> bool:
        """Puts the changed code into the functions that are there already, if it can be; nothing is to be done before an import."""
        name = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if name not in sys.modules:
            return True
        if mutant.block < 0:
            return False
        found = False
        for made in functions_in(code):
            if made.co_firstlineno <= mutant.line:
                for function in self._functions.get(place_of(made), ()):
                    try:
                        function.__code__ = made
                    except ValueError:
                        return False
                    found |= any(start <= mutant.line for *_, start in made.co_lines() if start) and mutant.line <= last_line(made)
        return found


def place_of(code: types.CodeType) -> tuple[str, str, int]:
    """Which function it is the code of."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def functions_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """All code in a module's."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from functions_in(each)


def last_line(code: types.CodeType) -> int:
    """The last line of a function and of those in it."""
    return max(
        [line for *_, line in code.co_lines() if line]
        + [last_line(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    )


class Copy:
    """A copy of the tree in which mutants live."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_tree(folder)
        for name in ("docs", "examples", "benchmarks"):  # tests read them
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.sources = {
            str(path.relative_to(folder)): path.read_text()
            for package in AREAS
            for path in sorted((folder / package).rglob("*.py"))
        }
        tests = [path.read_text() for path in sorted((folder / "tests").rglob("*.py"))]
        self.digest = hashlib.sha256(json.dumps([self.sources, tests]).encode()).hexdigest()  # what notes are of
        self.first: dict[str, int] = {}  # number of a file's first block
        self.functions: dict[str, list[int]] = {}  # of each of its blocks
        self.num_blocks = 0
        for path, text in self.sources.items():
            self.first[path] = self.num_blocks
            self.functions[path] = [function for _, function in numbered_blocks(ast.parse(text))]
            self.num_blocks += len(self.functions[path])

    def forked(self, task: Callable[[], Any], limit_s: float) -> tuple[Any, bool]:
        """What a task gives, as JSON can say it, in a forked process; None: it died. And whether it did for want of time."""
        temporary = Path(tempfile.mkdtemp(prefix="shmload-mutant-", dir=self.folder.parent))
        answer = temporary / "answer"
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                own_shared_memory()
                tempfile.tempdir = os.environ["TMPDIR"] = os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(temporary)
                answer.write_text(json.dumps(task()))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        deadline, pause, is_late = time.monotonic() + limit_s, threading.Event(), False
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and not is_late:
            is_late = time.monotonic() > deadline
            pause.wait(0.02)
        is_late |= os.WIFSIGNALED(ended[1]) and os.WTERMSIG(ended[1]) == signal.SIGPROF
        kill_all()
        said = json.loads(answer.read_text()) if answer.exists() else None
        shutil.rmtree(temporary, ignore_errors=True)
        return said, is_late

    def tested(self, area: str, plugin: Any, *words: str) -> bool:
        """Collects an area's tests, runs them as a plugin says, and whether that came to its end. The copy is the tree from here on."""
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        with (self.folder / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "shmload")]:
            del sys.modules[name]
        sys.path[:] = [str(self.folder), *(place for place in sys.path if place not in ("", str(ROOT)))]
        os.chdir(self.folder)
        importlib.invalidate_caches()
        status = pytest.main([*FIXED, *words, *(f"tests/{name}" for name in area.split())], plugins=[plugin])
        return status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)

    def notes(self, area: str) -> dict[str, Any]:
        """Which of an area's tests come to which blocks."""
        hits = self.folder / "hits"
        hits.write_bytes(bytes(self.num_blocks + 1))
        for path, text in self.sources.items():
            (self.folder / path).write_text(noted(text, self.first[path], hits, self.num_blocks + 1))

        def task() -> Any:
            plugin = Notes(hits, self.num_blocks + 1)
            self.tested(area, plugin, f"--timeout={TEST_TIMEOUT_S * 3}")
            for name, test in plugin.tests.items():
                test["hits"] = sorted({*test["hits"], *plugin.set_up[name.split("::")[0]]})
            return plugin.tests

        found = self.forked(task, 3600)[0] or {}
        for path, text in self.sources.items():
            (self.folder / path).write_text(text)
        found = {name: test for name, test in found.items() if test["passes"]}
        if not found:
            raise RuntimeError(f"no test has passed in the copy:\n{(self.folder / 'log').read_text()[-2000:]}")
        return found


def kill_all() -> None:
    """Ends all that descends from this process; it takes orphans in."""
    import psutil

    while alive := psutil.Process().children(recursive=True):
        for process in alive:
            try:
                process.kill()
            except psutil.Error:
                pass
        try:
            while os.waitpid(-1, 0)[0]:
                pass
        except ChildProcessError:
            pass


def tests_of(mutant: Mutant, copy: Copy, notes: dict[str, Any], names: Collection[str]) -> list[str]:
    """The tests that come to a mutant's block, as long as there is time: the fastest first, the others file by file.

    Then the other cases of tests that come to its function: notes were taken of some cases only.
    """
    first, functions = copy.first[mutant.path], copy.functions[mutant.path]
    wider = {first + place for place, function in enumerate(functions) if mutant.block < 0 or function == functions[mutant.block]}
    wanted = wider if mutant.block < 0 else {first + mutant.block}  # what is made at the import counts wherever the file does
    chosen = within_budget({name: test["took_s"] for name, test in notes.items() if not wanted.isdisjoint(test["hits"])})
    bases = {name.partition("[")[0]: test["took_s"] for name, test in notes.items() if not wider.isdisjoint(test["hits"])}
    others = {name: bases[base] for name in names if name not in notes and (base := name.partition("[")[0]) in bases}
    parts = chosen[:FIRST], chosen[FIRST:], within_budget(others)
    return [name for part in parts for name in sorted(part, key=lambda name: name.partition("::")[0])]


def within_budget(tests: dict[str, float]) -> list[str]:
    """The fastest, as many as there is time for."""
    names = sorted(tests, key=lambda name: tests[name])
    return [name for name, so_far in zip(names, accumulate(tests[name] for name in names), strict=True) if so_far <= BUDGET_S]


def sampled(mutants: dict[str, list[Mutant]], size: int, draw: random.Random) -> list[Mutant]:
    """So many of a package's, from each file in proportion to what it has, at least one."""
    total = sum(len(found) for found in mutants.values())
    chosen: list[Mutant] = []
    for _, found in sorted(mutants.items()):
        if found:
            chosen += draw.sample(found, min(len(found), max(1, round(size * len(found) / total))))
    draw.shuffle(chosen)  # a run that is cut short is a sample, too
    return chosen


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--module", nargs="+", help="files or folders; all five packages by default")
    parser.add_argument("--sample", type=int, default=30, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out",
        type=lambda name: Path(name).resolve(),
        help="a line of JSON for each verdict; what is in it is not judged again; FILE.tests: tests of each place",
    )
    parser.add_argument("--again", type=Path, help="only what survived in such a file")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    for name in ("torch.utils.data", "numpy.random", "boto3"):  # what all tests need, once
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="shmload-mutation-") as folder:
        copy = Copy(Path(folder) / "tree")
        kept = Path(f"{options.out}.tests") if options.out else None
        notes = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
        notes = notes if notes.get("digest") == copy.digest else {"digest": copy.digest}
        mutants = drawn(copy, options)
        for area in dict.fromkeys(AREAS[package] for package in mutants):
            if area not in notes:
                notes[area] = copy.notes(area)
                print(f"{len(notes[area])} tests of {area}", flush=True)
                if kept is not None:
                    kept.write_text(json.dumps(notes))
            judge(
                copy, [each for package in mutants if AREAS[package] == area for each in mutants[package]], notes[area], options.out
            )
    return 0


def judge(copy: Copy, mutants: list[Mutant], notes: dict[str, Any], path: Path | None) -> None:
    """Lets mutants of one area meet its tests, and says what became of them."""
    out = os.fdopen(os.dup(1), "w")  # the tests' own words go to a file
    counts: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))

    def tell(mutant: Mutant, verdict: str, said: str, took_s: float) -> None:
        package = "/".join(mutant.path.split("/")[:2])
        counts[package][verdict] += 1
        line = f"{verdict:9s} {took_s:5.1f} s  {mutant.path}:{mutant.line} {mutant.what}: {mutant.new[:80]}"
        print(line, file=out, flush=True)
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps({**asdict(mutant), "verdict": verdict, "said": said}) + "\n")

    def task() -> bool:
        load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        area = AREAS["/".join(mutants[0].path.split("/")[:2])]
        is_done = copy.tested(area, Trial(copy, mutants, notes, tell), f"--timeout={TEST_TIMEOUT_S * load:.0f}")
        for package, each in counts.items():
            print(f"{package}: {dict(each)}", file=out, flush=True)
        return is_done

    if not copy.forked(task, 24 * 3600)[0]:
        raise RuntimeError(f"the tests did not come to their end:\n{(copy.folder / 'log').read_text()[-2000:]}")


def drawn(copy: Copy, options: argparse.Namespace) -> dict[str, list[Mutant]]:
    """The mutants to be made, by packages."""
    mutants = {path: Mutator(path, text).found for path, text in copy.sources.items()}
    lines = [json.loads(line) for line in options.again.read_text().splitlines()] if options.again else []
    left = {
        (line["path"], line["source"], line["what"], line["new"]) for line in lines if line["verdict"] in ("survived", "unreached")
    }
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out and options.out.exists() else []
    judged = {(line["path"], line["begin"], line["new"]) for line in done}
    chosen = {}
    for package in AREAS:
        found = {path: mutants[path] for path in mutants if path.startswith(package)}
        if options.again:
            chosen[package] = [
                each for those in found.values() for each in those if (each.path, each.source, each.what, each.new) in left
            ]
        else:
            named = {path: those for path, those in found.items() if path.startswith(tuple(options.module or AREAS))}
            chosen[package] = sampled(named, options.sample, random.Random(options.seed))
        chosen[package] = [each for each in chosen[package] if (each.path, each.begin, each.new) not in judged]
    return {package: those for package, those in chosen.items() if those}


if __name__ == "__main__":
    sys.exit(main())
