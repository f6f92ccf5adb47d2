"""The typed faces of the compiled modules say what the modules have."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import shmload._core

STUBS = sorted(Path(shmload._core.__file__).parent.glob("*.pyi"))


def module_of(stub: Path) -> ModuleType:
    return importlib.import_module(f"shmload._core.{stub.stem}")


def named(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def public(names: object) -> set[str]:
    return {name for name in vars(names) if not name.startswith("_")}


def parameters_of(node: ast.FunctionDef) -> list[str]:
    spec = node.args
    return [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if a.arg not in ("self", "cls")]


def test_every_compiled_module_has_a_stub() -> None:
    built = {path.name.split(".")[0] for path in Path(shmload._core.__file__).parent.glob("*.so")}
    assert built == {stub.stem for stub in STUBS}


@pytest.mark.parametrize("stub", STUBS, ids=lambda p: p.stem)
def test_a_stub_names_what_its_module_makes_public(stub: Path) -> None:
    module = module_of(stub)
    own = {n for n in public(module) if getattr(getattr(module, n), "__module__", module.__name__) == module.__name__}
    own -= {n for n in own if inspect.ismodule(getattr(module, n))}
    declared = {n for n, node in named(ast.parse(stub.read_text()).body).items() if not n.startswith("_")}
    assert {n for n in own if not isinstance(getattr(module, n), type(ast))} - {"T"} == declared - {"T"}


@pytest.mark.parametrize("stub", STUBS, ids=lambda p: p.stem)
def test_a_stub_gives_members_and_parameters_as_they_are(stub: Path) -> None:
    module = module_of(stub)
    for name, node in named(ast.parse(stub.read_text()).body).items():
        real = getattr(module, name)
        if isinstance(node, ast.FunctionDef):
            assert list(inspect.signature(real).parameters) == parameters_of(node), name
        if not isinstance(node, ast.ClassDef):
            continue
        members = named(node.body)
        assert public(real) == {m for m in members if not m.startswith("_")}, name
        for member, declared in members.items():
            if isinstance(declared, ast.FunctionDef) and not declared.decorator_list and not member.startswith("_"):
                shown = inspect.signature(getattr(real, member))
                assert [p for p in shown.parameters if p != "self"] == parameters_of(declared), f"{name}.{member}"
