"""Changes to a program, described by what they change and not by where that stands in a file.

A function is found by its qualified name in any file of the package, and code in it by its syntax: comments, line breaks, quotes
and other lines do not matter. So a defect can still be planted after files were moved and code was reformatted. C, Cython and
scripts within a string have no parser here: there a path takes the place of the function, and the text of the file is quoted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "shmload"


@dataclass(frozen=True)
class Replace:
    """Puts other code in the place of an expression, a keyword argument, a header such as `if x:`, or statements.

    Attributes:
        old: the code, which the function contains exactly once. Where a path takes the place of the function, it is text.
        new: the code in its place; nothing leaves out a keyword argument.
    """

    old: str
    new: str


def is_path(where: str) -> bool:
    """Returns whether a path takes the place of a function."""
    return "/" in where


def omit(old: str) -> Replace:
    """Returns the change that leaves out statements."""
    return Replace(old, "pass")


class PlantingError(ValueError):
    """A function or the code to change is missing, or exists more than once."""


def file_of(where: str) -> str:
    """Returns the path, relative to the project, of the file to change.

    Args:
        where: a path, or `Class.method`, `function` or `module:function` of the package. A module alone, `module:`, means its
            top level.
    Raises:
        PlantingError: the package has no such function, or several.
    """
    if is_path(where):
        return where
    module, _, name = where.rpartition(":")
    paths = [path for path in functions().get(name, ()) if f".{path}".endswith(f".{module}" if module else "")]
    if len(paths) != 1:
        raise PlantingError(f"{where} names {len(paths)} functions of the package instead of one: {', '.join(paths) or 'none'}")
    return paths[0].replace(".", "/") + ".py"


@cache
def functions() -> dict[str, list[str]]:
    """Returns the dotted modules that define each qualified name, such as `Class.method`. The name of a top level is empty."""
    found: dict[str, list[str]] = {"": []}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[""].append(module)
        for name, _ in definitions(ast.parse(path.read_text())):
            found.setdefault(name, []).append(module)
    return found


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields the qualified names of the classes and functions in a node, and their nodes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield prefix + child.name, child
            yield from definitions(child, f"{prefix}{child.name}.")
        else:
            yield from definitions(child, prefix)


def changed(text: str, where: str, change: Replace) -> str:
    """Returns the text of the file with the change made.

    Raises:
        PlantingError: the code to change is missing or not unique.
    """
    if is_path(where):
        starts = [found.start() for found in re.finditer(re.escape(change.old), text)]
        spans = [(start, start + len(change.old), change.new) for start in starts]
    else:
        spans = python_spans(text, where.rpartition(":")[2], change)
    if len(spans) != 1:
        raise PlantingError(f"{where} contains the code to be replaced {len(spans)} times instead of once: {change.old}")
    start, stop, new = spans[0]
    return text[:start] + new + text[stop:]


def python_spans(text: str, name: str, change: Replace) -> list[tuple[int, int, str]]:
    """Returns the start and end of each place where the code of a change stands in a function, and what to write there."""
    tree = parsed_file(text)
    scopes = [node for found, node in definitions(tree) if found == name] if name else [tree]
    lines = text.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def start_of(node: Any) -> int:
        return at(node.lineno, node.col_offset)

    def stop_of(node: Any) -> int:
        return at(node.end_lineno, node.end_col_offset)

    found = []
    for scope in scopes:
        for nodes in places(scope, change.old):
            first, last = nodes[0], nodes[-1]
            start, stop = start_of(first), stop_of(last)
            new = change.new.replace("\n", "\n" + " " * first.col_offset)
            if is_header(change.old):
                body = first.body[0]
                stop = start_of(body)
                new += " " if body.lineno == first.lineno else "\n" + " " * body.col_offset
            elif not new:
                stop += len(text[stop:]) - len(re.sub(r"^\s*,?\s*", "", text[stop:]))
            found.append((start, stop, new))
    return found


@cache
def parsed_file(text: str) -> ast.Module:
    return ast.parse(text)


def is_header(code: str) -> bool:
    """Returns whether code is the header of a compound statement, such as `if x:`."""
    return code.endswith(":")


def parsed(code: str) -> list[Any]:
    """Returns the nodes that code describes: an expression, a keyword argument, a header with an empty body, or statements."""
    if is_header(code):
        if code.startswith("except"):
            (attempt,) = ast.parse(f"try: pass\n{code} pass").body
            assert isinstance(attempt, ast.Try)
            return list(attempt.handlers)
        return list(ast.parse(f"{code} pass").body)
    for as_expression in (f"({code}\n)", f"_({code}\n)"):
        try:
            (statement,) = ast.parse(as_expression).body
        except (SyntaxError, ValueError):
            continue
        assert isinstance(statement, ast.Expr)
        if as_expression[0] == "(":
            return [statement.value]
        if isinstance(statement.value, ast.Call) and len(statement.value.keywords) == 1 and not statement.value.args:
            return list(statement.value.keywords)
    return list(ast.parse(code).body)


IGNORED = ("ctx", "type_comment", "kind")  # whether code is read or assigned to, comments, u"" for ""
BLOCKS = ("body", "orelse", "finalbody", "handlers")


def is_same(one: object, other: object, ignored: tuple[str, ...] = IGNORED) -> bool:
    """Returns whether two nodes, lists of nodes or plain values are the same code."""
    one, other = (value.value if isinstance(value, ast.Expr) else value for value in (one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        assert isinstance(other, list)
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, ast.AST):
        return all(is_same(getattr(one, name, None), getattr(other, name, None)) for name in one._fields if name not in ignored)
    return one == other


def places(scope: ast.AST, code: str) -> Iterator[list[Any]]:
    """Yields the nodes of each place in a scope where code stands. Code inside of an f-string is not found."""
    wanted = parsed(code)
    if len(wanted) == 1:
        ignored = (*IGNORED, *BLOCKS) if is_header(code) else IGNORED
        yield from ([node] for node in walk(scope) if type(node) is type(wanted[0]) and is_same(node, wanted[0], ignored))
        return
    for node in walk(scope):
        for block in (value for _, value in ast.iter_fields(node) if isinstance(value, list)):
            for start in range(len(block) - len(wanted) + 1):
                if is_same(run := block[start : start + len(wanted)], wanted):
                    yield run


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and everything below it, except the parts of f-strings, whose places in the text are not known."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from walk(child)
