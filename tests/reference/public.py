"""Public names, the types in their signatures, and which of them are not described."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import shmload.integrations
from tests.reference.docstrings import parse

MODULES = (
    "shmload",
    "shmload.formats",
    *(f"shmload.integrations.{module.name}" for module in pkgutil.iter_modules(shmload.integrations.__path__)),
    "shmload.cluster",
    "shmload.debug",
    "shmload.growing",
    "shmload.metrics",
    "shmload.pipeline",
    *(f"shmload.storage.{module}" for module in ("cache", "budgeted_folder", "file_lease", "reservation")),
    "shmload.remote",
)
BASES = (  # base classes of custom orders and crops, and of sources and pipelines
    "shmload.schedule.KeyedOrder",
    "shmload.schedule.KeyedBatches",
    "shmload.formats.images.crops.Crop",
    "shmload.pipeline.methods.Fluent",
)
BASE_NAMES = {"ShmLoader", *(place.rsplit(".", 1)[1] for place in BASES)}  # they describe members of other public classes
INTERNAL = {  # public only within the package
    "Mix.keyed_order",
    "Schedule.end_of",
    *(
        f"AnySchedule.{name}"
        for name in ("stride", "stream", "grows", "next_step", "number", "begins", "ended", "children", "go_on_from")
    ),
    "PreparedLoader.begin",
    "PreparedLoader.end",
    *(f"{batches}.schedule" for batches in ("KeyedBatches", "LengthBuckets", "TokenBudget")),
    "Join.as_source",
    *(f"ItemSequence.{name}" for name in ("keys_at", "item", "name", "at", "key", "counters_at", "go_on_at")),
    *(f"{stage}.over" for stage in ("Take", "Skip", "Repeat", "Enumerate", "Window", "Shuffle", "Cache")),
    "Expanding.run",
    "EpochCallback",
    "EpochMetrics",  # docs/top.md describes keys and units
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a signature: its source text and its name; None for a bare * or /."""

    name: str | None
    text: str


def is_protocol(value: Any) -> bool:
    """Returns whether a class only declares an interface and is never instantiated."""
    return bool(getattr(value, "_is_protocol", False))


def names() -> dict[str, Any]:
    """Returns every public object by the place it is imported from."""
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        listed = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module_name
        ]
        for name in listed:
            if name not in INTERNAL:
                found[f"{module_name}.{name}"] = getattr(module, name)
    for place in BASES:
        module_name, name = place.rsplit(".", 1)
        found[place] = getattr(importlib.import_module(module_name), name)
    return found


def members(cls: type) -> dict[str, Any]:
    """Returns a class's public methods and properties, including those of its bases in the package, as found in the class."""
    found: dict[str, Any] = {}
    internal = {name.split(".")[1] for base in cls.__mro__ for name in INTERNAL if name.startswith(f"{base.__name__}.")}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("shmload"):
            continue
        for name, value in vars(base).items():
            is_member = inspect.isroutine(value) or isinstance(value, property | functools.cached_property | classmethod)
            if is_member and not name.startswith("_") and name not in internal:
                found[name] = value
    return {} if issubclass(cls, BaseException) else found


def documentation(holder: type | None, name: str, value: Any) -> str | None:
    """Returns a docstring; for a member without one, that of the base class."""
    if holder is None:
        return inspect.getdoc(value) if not isinstance(value, type) else value.__doc__
    for base in holder.__mro__:
        found: Any = vars(base).get(name)
        text: str | None = None if found is None else found.__doc__  # None itself has a docstring since Python 3.13
        if text and base.__module__.startswith("shmload"):
            return re.sub(r"\A[\w.]+\(.*\)( -> .*)?\n\n", "", text)  # removes the signature that Cython adds
    return None


def function_of(value: Any) -> Callable[..., Any] | None:
    """Returns the function that is called; None for properties."""
    if isinstance(value, property | functools.cached_property):
        return None
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def parameters(value: Any) -> list[Parameter]:
    """Returns a signature as written in the source: constants by value, types by their text."""
    if isinstance(value, type) and (issubclass(value, BaseException) or inspect.isabstract(value) or is_protocol(value)):
        return []
    given = [p for p in inspect.signature(value).parameters.values() if p.name not in ("self", "cls")]
    written, defaults = _source(value)
    found, previous = [], None
    for p in given:
        if p.kind is p.KEYWORD_ONLY and previous not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
            found.append(Parameter(None, "*"))
        if previous is p.POSITIONAL_ONLY and p.kind is not p.POSITIONAL_ONLY:
            found.append(Parameter(None, "/"))
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        text = stars + p.name + (f": {written[p.name]}" if p.name in written else "")
        if p.default is not p.empty:
            shown = p.default.__name__ if inspect.isfunction(p.default) else repr(p.default)
            text += f" = {defaults.get(p.name, shown)}" if p.name in written else f"={p.default!r}"
        found.append(Parameter(p.name, text))
        previous = p.kind
    if previous is inspect.Parameter.POSITIONAL_ONLY:
        found.append(Parameter(None, "/"))
    return found


def returned(value: Any) -> str:
    """Returns the type that a function returns, as written in the source."""
    node, source = _node(value)
    return _text(source, node.returns) if isinstance(node, ast.FunctionDef) and node.returns is not None else ""


def missing() -> Iterator[str]:
    """Yields public names that are not described, and described names that do not exist."""
    for place, value in names().items():
        yield from _missing_of(place, value, documentation(None, "", value))
        if isinstance(value, type):
            for name, member in members(value).items():
                yield from _missing_of(f"{place}.{name}", function_of(member), documentation(value, name, member))


def _missing_of(place: str, value: Any, raw: str | None) -> Iterator[str]:
    if not raw:
        yield f"{place}: has no docstring"
        return
    found = parse(raw)
    if not found.summary.endswith((".", ":", "?")):
        yield f"{place}: its first line is not a sentence: {found.summary!r}"
    if value is None:
        return
    known = {parameter.name for parameter in parameters(value) if parameter.name is not None}
    told = found.names("Args", "Attributes")
    for name in sorted(known - told):
        if not re.search(rf"`[^`]*\b{name}\b[^`]*`", raw):
            yield f"{place}: argument {name} is not described"
    if extra := sorted(found.names("Args") - known):
        yield f"{place}: describes arguments that do not exist: {', '.join(extra)}"
    for error in sorted(_raised(value) - found.names("Raises")):
        yield f"{place}: raises {error}, which its docstring does not mention"


def _raised(value: Any) -> set[str]:
    """Returns the exceptions that a function, or a class's constructor, raises by name."""
    tree, _ = _node(value)
    makers = [tree]
    if isinstance(tree, ast.ClassDef):
        makers = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in ("__init__", "__post_init__")]
    return {
        node.exc.func.id
        for maker in makers
        for node in ast.walk(maker)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id.lstrip("_")[0].isupper()  # a function that makes the error documents it
    }


@functools.cache
def _node(value: Any) -> tuple[Any, str]:
    """Returns the definition and its source; an empty module for compiled code."""
    if not isinstance(value, type | types.FunctionType) or value.__module__.startswith("shmload._core"):
        return ast.parse(""), ""
    source = textwrap.dedent(inspect.getsource(value))
    return ast.parse(source).body[0], source


def _source(value: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Returns types and defaults of parameters as written; constants are replaced by their values, which readers understand."""
    written: dict[str, str] = {}
    defaults: dict[str, str] = {}
    if not isinstance(value, type):
        node, source = _node(value)
        if isinstance(node, ast.FunctionDef):
            _arguments(node, source, written, defaults)
        return written, defaults
    for base in reversed(value.__mro__):
        if not base.__module__.startswith("shmload"):
            continue
        node, source = _node(base)
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                written[item.target.id] = _text(source, item.annotation)
                if item.value is not None and not isinstance(item.value, ast.Name):
                    defaults[item.target.id] = _text(source, item.value)
            elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
                _arguments(item, source, written, defaults)
    return written, defaults


def _arguments(node: Any, source: str, written: dict[str, str], defaults: dict[str, str]) -> None:
    arguments = node.args
    listed = [*arguments.posonlyargs, *arguments.args]
    given = zip(listed[len(listed) - len(arguments.defaults) :], arguments.defaults, strict=True)
    for argument in [*listed, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None and argument.annotation is not None:
            written[argument.arg] = _text(source, argument.annotation)
    for argument, default in [*given, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]:
        if default is not None and not isinstance(default, ast.Name):
            defaults[argument.arg] = _text(source, default)


def _text(source: str, node: ast.AST) -> str:
    return " ".join((ast.get_source_segment(source, node) or "").split())
