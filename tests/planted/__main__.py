"""Plants each defect of the list in a copy of the tree and runs the tests that must fail on it.

    python -m tests.planted              all of them, about six minutes on two quiet cores
    python -m tests.planted R7 E4        those of some requirements
    python -m tests.planted --crossing 10 [--seed 1] [--of WORDS]
                                         those that random crossings must find, too: for ten minutes each at most

Prints a line for each; the exit status is the number of defects that a test has missed. The built modules of this tree are used as
they are, so build them first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from time import monotonic

from tests.planted.defect_list import DEFECTS
from tests.planted.planting import can_unshare, copy_tree, crossed_by, missed_by


def crossed(minutes: float, seed: int, words: str) -> int:
    """Looks for each defect, or those that say these words, with random crossings; gives the number of those not found."""
    chosen = [defect for defect in DEFECTS if defect.is_crossing and words in defect.what]
    num_missed = 0
    with tempfile.TemporaryDirectory(prefix="shmload-planted-") as name:
        folder = Path(name)
        copy_tree(folder)
        for defect in chosen:
            began = monotonic()
            found = crossed_by(defect, folder, minutes, seed)
            num_missed += not found
            print(f"{monotonic() - began:6.1f} s  {defect.what}\n          {found or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen)} defects planted, {num_missed} of them not found by crossings of seed {seed}")
    return num_missed


def main(wanted: list[str]) -> int:
    """The command."""
    if "--crossing" in wanted:
        seed = int(wanted[wanted.index("--seed") + 1]) if "--seed" in wanted else 1
        words = wanted[wanted.index("--of") + 1] if "--of" in wanted else ""
        return crossed(float(wanted[wanted.index("--crossing") + 1]), seed, words)
    chosen = [defect for defect in DEFECTS if not wanted or defect.requirement in wanted]
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
    print(f"{num_planted} defects planted, {num_planted - num_missed} caught, {num_missed} missed, {num_left_out} left out")
    return num_missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
