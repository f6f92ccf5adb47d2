"""Reduces a failing case and writes it as a short program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic

from tests.crossing.cases import BY_BATCH, MAKE_OF, NAMES, PLAINEST, Case, made_legal
from tests.crossing.options import loader_options

SMALLER = {
    "n": (2, 3, 5, 9, 17, 40),
    "size": (1, 3),
    "text": (0, 100),
    "batch_size": (1, 2, 3),
    "workers": (1, 2),
    "ranks": (1, 2),
    "bad": (1,),
}


def simpler(case: Case) -> Iterator[Case]:
    """Yields cases that are simpler in one dimension."""
    for name in NAMES:
        if name in ("seed", "loaders"):  # races show in many loaders
            continue
        value, default = getattr(case, name), getattr(PLAINEST, name)
        is_less = name in SMALLER and isinstance(value, int) and value < default  # less than the default is simpler, too
        if value != default and not is_less:
            yield replace(case, **{name: default})
        for smaller in SMALLER.get(name, ()):
            if isinstance(value, int) and smaller < value and smaller != default:
                yield replace(case, **{name: smaller})
    for letter in case.fields:
        if len(case.fields) > 1:
            yield replace(case, fields=case.fields.replace(letter, ""))


def reduce_case(case: Case, fails: Callable[[Case], bool], *, limit_s: float = 60.0, tries: int = 1) -> Case:
    """Returns the simplest case found that still fails, by simplifying one dimension after the other until none can be
    simplified.

    Args:
        fails: returns whether a case fails in the same way.
        limit_s: the time limit, after which the best case so far is returned.
        tries: how often to run a simpler case before it counts as correct, because races show only sometimes.
    """
    deadline = monotonic() + limit_s
    tried = {case}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for plainer in simpler(case):
            if monotonic() > deadline:
                return case
            candidate = replace(made_legal(plainer), loaders=case.loaders)
            if candidate in tried:
                continue
            tried.add(candidate)
            if any(fails(candidate) for _ in range(tries)):
                case, is_smaller = candidate, True
                break
    return case


def program(case: Case) -> str:
    """Returns a program of a few lines that runs the case again."""
    given = ", ".join(f"{name}={value!r}" for name, value in case.changed().items())
    lines = [
        "from tests.crossing.cases import Case",
        "from tests.crossing.process import prepare, run_case",
        "",
        "prepare()",
        f"case = Case({given})",
        f"print(run_case(case))  # dataset: {MAKE_OF.get(case.kind, case.kind)}; {_habit(case)}",
    ]
    if case.kind != "pipeline":
        options = ", ".join(f"{name}={_literal(case, name, value)}" for name, value in loader_options(case).items())
        lines.insert(5, f"# ShmLoader(dataset, {options})")
    return "\n".join(lines)


def _literal(case: Case, name: str, value: object) -> str:
    if name in ("sampler", "batch_sampler") and case.order not in ("sampler", *BY_BATCH[2:]):
        return repr(value)
    return value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)[:120]


def _habit(case: Case) -> str:
    return {
        "pass": "two passes",
        "break": f"two passes interrupted at {case.at:g}, then a whole one",
        "second": "a second iterator while the first runs",
        "resume": f"state through JSON at {case.at:g}, loaded on {case.then_ranks} ranks, {case.then_workers} workers",
        "reload": f"state at {case.at:g}, loaded while a pass runs",
        "transfer": f"state at {case.at:g}, loaded into another loader at the same position",
        "end": "state of the end of an epoch, loaded in the middle of the next",
        "threads": "four threads call next() on one iterator",
        "corrupt": "one bit of the state flipped",
        "rebuild": "the loader rebuilt from its public attributes",
    }[case.habit]
