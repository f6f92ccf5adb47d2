"""Plants each defect of the list in a copy of the tree and runs the tests that must fail because of it.

    python -m tests.planted              all defects, about six minutes on two idle cores
    python -m tests.planted R7 E4        the defects of some requirements
    python -m tests.planted --crossing 10 [--seed 1] [--of WORDS]
                                         the defects that random crossings must find as well, for at most ten minutes each

Prints a line for each defect; the exit status is the number of defects that a test has missed. The compiled modules of this tree
are used unchanged, so build them first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from time import monotonic

from tests.planted.defect_list import DEFECTS
from tests.planted.planting import can_unshare, copy_tree, finding_of_crossings, missed_by


def search_by_crossing(minutes: float, seed: int, words: str) -> int:
    """Searches for each crossing defect whose description contains `words` with random crossings. Returns the number not found."""
    chosen = [defect for defect in DEFECTS if defect.is_crossing and words in defect.what]
    num_missed = 0
    with tempfile.TemporaryDirectory(prefix="shmload-planted-") as name:
        folder = Path(name)
        copy_tree(folder)
        for defect in chosen:
            began = monotonic()
            found = finding_of_crossings(defect, folder, minutes, seed)
            num_missed += not found
            print(f"{monotonic() - began:6.1f} s  {defect.what}\n          {found or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen)} defects planted, {num_missed} not found by crossings of seed {seed}")
    return num_missed


def main(arguments: list[str]) -> int:
    """Runs the command and returns the number of missed defects."""
    if "--crossing" in arguments:
        seed = int(arguments[arguments.index("--seed") + 1]) if "--seed" in arguments else 1
        words = arguments[arguments.index("--of") + 1] if "--of" in arguments else ""
        return search_by_crossing(float(arguments[arguments.index("--crossing") + 1]), seed, words)
    chosen = [defect for defect in DEFECTS if not arguments or defect.requirement in arguments]
    num_missed = num_left_out = 0
    with tempfile.TemporaryDirectory(prefix="shmload-planted-") as name:
        folder = Path(name)
        copy_tree(folder)
        for defect in chosen:
            if defect.reaches_out and not can_unshare():
                print(f"{defect.requirement:4s} not planted: mount namespaces are not permitted here  {defect.what}")
                num_left_out += 1
                continue
            began = monotonic()
            missed = missed_by(defect, folder)
            num_missed += bool(missed)
            verdict = f"MISSED by {', '.join(missed)}" if missed else f"caught by {len(defect.tests)}"
            print(f"{defect.requirement:4s} {verdict:12s} {monotonic() - began:6.1f} s  {defect.what}", flush=True)
    num_planted = len(chosen) - num_left_out
    print(f"{num_planted} defects planted, {num_planted - num_missed} caught, {num_missed} missed, {num_left_out} skipped")
    return num_missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
