"""Stubs of the compiled modules agree with the modules in names, kinds, parameters, defaults and bases.

Where Cython provides a signature it is read. `__cinit__` has none, so it is called with values that cannot be converted, which
shows
what arguments it accepts. `tests/packaging/test_types.py` runs mypy's stubtest for the rest.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import shmload._core

STUBS = sorted(Path(shmload._core.__file__).parent.glob("*.pyi"))
WRONG_ARGUMENTS = re.compile(r"unexpected keyword|positional argument|needs keyword-only|required (positional|keyword)")


class Parameter(NamedTuple):
    """A parameter; its default is `...` if the stub leaves it open."""

    name: str
    is_keyword_only: bool
    has_default: bool
    default: object


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


def declared_parameters(node: ast.FunctionDef) -> list[Parameter]:
    """Returns the parameters in a stub, without self or cls."""
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)
    pairs = [(arg, default, False) for arg, default in zip(positional, defaults, strict=True)]
    pairs += [(arg, default, True) for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    return [
        Parameter(arg.arg, is_keyword, default is not None, ast.literal_eval(default) if default else None)
        for arg, default, is_keyword in pairs
        if arg.arg not in ("self", "cls")
    ]


def real_parameters(real: Any, declared: list[Parameter]) -> list[Parameter]:
    """Returns the parameters in the module; defaults that the stub leaves open are replaced by `...`."""
    opened = {parameter.name for parameter in declared if parameter.default is ...}
    return [
        Parameter(
            p.name,
            p.kind is p.KEYWORD_ONLY,
            p.default is not p.empty,
            ... if p.name in opened else None if p.default is p.empty else p.default,
        )
        for p in inspect.signature(real).parameters.values()
        if p.name != "self"
    ]


def accepts(real: Any, positional: list[Parameter], keywords: list[Parameter]) -> bool:
    """Returns whether a class accepts these arguments, whatever it then does with the values."""
    try:
        real(*(object() for _ in positional), **{parameter.name: object() for parameter in keywords})
    except (TypeError, ValueError, AttributeError) as error:
        return not WRONG_ARGUMENTS.search(str(error))
    return True


def test_every_compiled_module_has_a_stub() -> None:
    built = {path.name.split(".")[0] for path in Path(shmload._core.__file__).parent.glob("*.so")}
    assert built == {stub.stem for stub in STUBS}


@pytest.mark.parametrize("stub", STUBS, ids=lambda p: p.stem)
def test_stub_has_the_public_names_of_its_module(stub: Path) -> None:
    module = module_of(stub)
    own = {n for n in public(module) if getattr(getattr(module, n), "__module__", module.__name__) == module.__name__}
    own -= {n for n in own if inspect.ismodule(getattr(module, n))}
    declared = {n for n, node in named(ast.parse(stub.read_text()).body).items() if not n.startswith("_")}
    assert {n for n in own if not isinstance(getattr(module, n), type(ast))} == declared


@pytest.mark.parametrize("stub", STUBS, ids=lambda p: p.stem)
def test_stub_has_functions_with_their_parameters_and_defaults(stub: Path) -> None:
    for name, node in named(ast.parse(stub.read_text()).body).items():
        if isinstance(node, ast.FunctionDef):
            declared = declared_parameters(node)
            assert real_parameters(getattr(module_of(stub), name), declared) == declared, name


@pytest.mark.parametrize("stub", STUBS, ids=lambda p: p.stem)
def test_stub_has_classes_with_their_bases_members_and_parameters(stub: Path) -> None:
    for name, node in named(ast.parse(stub.read_text()).body).items():
        if not isinstance(node, ast.ClassDef):
            continue
        real = getattr(module_of(stub), name)
        assert [base.__name__ for base in real.__bases__ if base is not object] == list(map(ast.unparse, node.bases))
        members = named(node.body)
        assert public(real) == {m for m in members if not m.startswith("_")}, name
        for member, declaration in members.items():
            is_attribute = isinstance(declaration, ast.AnnAssign) or bool(
                isinstance(declaration, ast.FunctionDef)
                and [d for d in declaration.decorator_list if ast.unparse(d) in ("property", f"{member}.setter")]
            )
            if member.startswith("_") or is_attribute:
                assert is_attribute == inspect.isdatadescriptor(getattr(real, member, None)), f"{name}.{member}"
                continue
            assert isinstance(declaration, ast.FunctionDef)
            if any(ast.unparse(decorator) == "overload" for decorator in declaration.decorator_list):
                names = [p.name for p in real_parameters(getattr(real, member), [])]
                assert names == [p.name for p in declared_parameters(declaration)], f"{name}.{member}"
                continue
            declared = declared_parameters(declaration)
            assert real_parameters(getattr(real, member), declared) == declared, f"{name}.{member}"


@pytest.mark.parametrize("stub", STUBS, ids=lambda p: p.stem)
def test_stub_has_constructors_with_the_arguments_they_accept(stub: Path) -> None:
    classes = named(ast.parse(stub.read_text()).body)
    for name, node in classes.items():
        members = named(node.body) if isinstance(node, ast.ClassDef) else {}
        maker = members.get("__new__", members.get("__init__"))
        if not isinstance(maker, ast.FunctionDef) or maker.args.vararg:
            continue
        real, declared = getattr(module_of(stub), name), declared_parameters(maker)
        positional = [p for p in declared if not p.is_keyword_only]
        keywords = [p for p in declared if p.is_keyword_only]
        assert accepts(real, positional, keywords), name
        if real.__base__ is not object or real.__subclasses__():
            continue  # the __cinit__ of a base also gets the positional arguments of subclasses
        assert accepts(real, [], declared), f"{name}: parameters have other names"
        assert not accepts(real, [*positional, Parameter("more", False, False, None)], keywords), name
        for left_out in declared:
            others = [p for p in declared if p != left_out]
            assert accepts(real, [], others) == left_out.has_default, f"{name}: {left_out.name}"
