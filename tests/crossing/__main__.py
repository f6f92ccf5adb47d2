"""Runs random cases against the oracle for minutes or hours.

    python -m tests.crossing --minutes 180 [--seed N] [--only kind=tfrecord --only mode=seed] [--shm usual 64m]
    python -m tests.crossing --case '{"kind": "tfrecord", ...}' [--times 20]

Case k of a seed is the same in every run, so the seed and the number of a failing case are enough to repeat it. A failing case is
reduced and printed as a program; then the run continues. It ends with a table of what was covered. Exit status 1: something
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

from tests.crossing.cases import NAMES, PLAINEST, Case, draw
from tests.crossing.process import SHM_BYTES, Outcome, can_have_own_shm, prepare, run_case
from tests.crossing.shrink import program, reduce_case

REPORT_EVERY_S = 30.0
STACK_LINES_MAX = 80
SHRINK_S = 45.0
SHOWN = (
    "kind",
    "mode",
    "habit",
    "workers",
    "ranks",
    "order",
    "ragged",
    "uneven",
    "harm",
    "hold",
    "start",
    "shm",
    "threads",
    "wrap",
    "on_error",
    "backend",
)


class Run:
    """A run of random cases, with its findings."""

    def __init__(
        self,
        seed: int,
        only: dict[str, Any],
        shm_kinds: tuple[str, ...],
        *,
        ray_share: float = 0.0,
        shrink: bool = True,
        log: Any = None,
    ) -> None:
        self.ray_share = ray_share
        self.seed, self.only, self.shm_kinds = seed, only, shm_kinds
        self.num_cases = self.num_batches = 0
        self.covered: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.found: dict[str, tuple[Case, Outcome, int]] = {}  # by signature: first case, outcome, count
        self.longest_s, self.slowest = 0.0, 0  # of a next(), and the number of its case
        self._shrinks = shrink
        self._began = monotonic()
        self._log = log

    def case(self, number: int) -> Case:
        """Returns case `number` of this run's seed."""
        return draw(random.Random(f"{self.seed} {number}"), self.only, shm_kinds=self.shm_kinds, ray_share=self.ray_share)

    def run_case_number(self, number: int) -> Outcome:
        """Runs case `number` and records its outcome."""
        case = self.case(number)
        outcome = run_case(case)
        self.num_cases += 1
        self.num_batches += outcome.num_batches
        if outcome.longest_s > self.longest_s:
            self.longest_s, self.slowest = outcome.longest_s, number
        for name in SHOWN:
            self.covered[name, str(getattr(case, name))] += 1
            if outcome.verdict == "refused":
                self.refused[name, str(getattr(case, name))] += 1
        for letter in case.fields:
            self.covered["fields", letter] += 1
        if outcome.verdict == "refused":
            self.refusals[outcome.message[:110]] += 1
        if outcome.is_failure:
            self._note(case, outcome, number)
        return outcome

    def _note(self, case: Case, outcome: Outcome, number: int) -> None:
        signature = outcome.signature(case)
        if signature in self.found:
            first, was, count = self.found[signature]
            self.found[signature] = (first, was, count + 1)
            return
        message = [
            f"\n=== {outcome.verdict}, case {number} of seed {self.seed} after {monotonic() - self._began:.0f} s: {outcome.message}",
            f"    python -m tests.crossing --case '{case.dumps()}'",
        ]
        self._print("\n".join(message))
        reduced, again = case, outcome
        if self._shrinks:
            reduced = reduce_case(case, lambda c: _is_alike(run_case(c, 30.0), outcome), limit_s=SHRINK_S, tries=2)
            again = run_case(reduced)
        self.found[signature] = (reduced, outcome, 1)
        last = again if again.is_failure else outcome
        self._print(f"{program(reduced)}\n# {last.message}\n{_indented(last)}")

    def _print(self, text: str) -> None:
        print(text, flush=True)
        if self._log:
            with Path(self._log).open("a") as file:
                file.write(text + "\n")

    def summary(self) -> str:
        """Returns a one-line summary of the run so far."""
        seconds = monotonic() - self._began
        failing = sum(count for _, _, count in self.found.values())
        return (
            f"{seconds / 60:6.1f} min: {self.num_cases} cases, {self.num_cases / max(seconds, 1e-9):.1f} a second, {self.num_batches} batches, "
            f"{sum(self.refusals.values())} refused, {failing} failing in {len(self.found)} ways, longest next() {self.longest_s:.2f} s "
            f"(case {self.slowest})"
        )

    def table(self) -> str:
        """Returns a table of the values covered in each dimension."""
        lines = []
        for name in (*SHOWN, "fields"):
            values = sorted((value, count) for (of, value), count in self.covered.items() if of == name)
            shown = [
                f"{value or '-'} {count}" + (f" ({self.refused[name, value]} refused)" if self.refused[name, value] else "")
                for value, count in values
            ]
            lines.append(f"{name:>10}: {', '.join(shown)}")
        lines += [f"{'refused':>10}: {count} x {message}" for message, count in self.refusals.most_common(12)]
        return "\n".join(lines)


def _is_alike(outcome: Outcome, other: Outcome) -> bool:
    return (
        outcome.is_failure
        and outcome.verdict == other.verdict
        and (outcome.verdict != "error" or outcome.message[:12] == other.message[:12])
    )


def _indented(outcome: Outcome) -> str:
    """Returns the end of a traceback. For a hang or a crash, returns the threads' stacks, in which the newest calls come first."""
    lines = outcome.detail.splitlines()
    shown = lines[:STACK_LINES_MAX] if outcome.verdict in ("hang", "crash") else lines[-12:]
    return "\n".join(f"#   {line}" for line in shown)


def only_of(words: list[str]) -> dict[str, Any]:
    """Parses `name=value` words into dimensions; a value is JSON or a plain word."""
    only: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in NAMES:
            raise SystemExit(f"--only {word}: no dimension of that name; choose from {', '.join(NAMES)}")
        try:
            only[name] = json.loads(value)
        except ValueError:
            only[name] = value
        if isinstance(getattr(PLAINEST, name), str):
            only[name] = value
    return only


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.crossing", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seed", type=int, default=None, help="of all cases; by default a random one, which is printed")
    parser.add_argument("--only", action="append", default=[], metavar="NAME=VALUE", help="set a dimension instead of drawing it")
    parser.add_argument("--case", default=None, help="one case, as JSON")
    parser.add_argument("--times", type=int, default=1, help="how often to run that case")
    parser.add_argument(
        "--shm",
        nargs="+",
        default=["usual", "64m", "512k"],
        choices=list(SHM_BYTES),
        help="sizes of /dev/shm to draw from; needs root",
    )
    parser.add_argument(
        "--ray", type=float, default=0.0, metavar="SHARE", help="share of cases whose workers are actors of a Ray cluster"
    )
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--no-shrink", action="store_true", help="do not reduce failing cases")
    parser.add_argument("--log", default=None, help="a file to append findings to")
    given = parser.parse_args(arguments)
    with _ray() if given.ray or '"ray"' in (given.case or "") else nullcontext():  # before orphans are reparented to this process
        prepare()
        return _run_one_case(given) if given.case else _run_random_cases(given)


@contextmanager
def _ray() -> Iterator[None]:
    """Starts a Ray cluster for the cases that need one."""
    from tests.ray.cluster_kit import SHARED_MEMORY, started

    with started(memory=SHARED_MEMORY) as cluster:
        os.environ["CROSSING_RAY"] = cluster.address
        yield


def _run_one_case(given: argparse.Namespace) -> int:
    """Runs one case `--times` times."""
    outcomes = [run_case(Case.loads(given.case)) for _ in range(given.times)]
    for outcome in outcomes:
        if outcome.is_failure or given.times == 1:
            print(f"{outcome.verdict}: {outcome.message}\n{outcome.detail}", flush=True)
    print(dict(Counter(outcome.verdict for outcome in outcomes)))
    return any(outcome.is_failure for outcome in outcomes)


def _run_random_cases(given: argparse.Namespace) -> int:
    """Runs random cases until the time is over."""
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    shm_kinds = tuple(given.shm) if can_have_own_shm() else ("usual",)
    run = Run(seed, only_of(given.only), shm_kinds, ray_share=given.ray, shrink=not given.no_shrink, log=given.log)
    until, summary, number = monotonic() + 60 * given.minutes, monotonic(), 0
    while monotonic() < until:
        run.run_case_number(number)
        number += 1
        if given.first and run.found:
            break
        if monotonic() - summary > REPORT_EVERY_S:
            summary = monotonic()
            print(run.summary(), flush=True)
    print(run.table())
    print(run.summary())
    for signature, (case, _, count) in run.found.items():
        print(f"FOUND {count} x {signature.strip()}\n      --case '{case.dumps()}'")
    return bool(run.found)


if __name__ == "__main__":
    sys.exit(main())
