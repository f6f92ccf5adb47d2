"""Feed mutated files to the parsers of one format for a given time: python fuzz.py FORMAT [seconds] [seed] [options]

FORMAT is a folder here. Its fuzz.py has `mutations(seed, folder, *options)` and `read(*mutation)`, which returns whether a file was
valid. Run it against a build with SHMLOAD_SANITIZE=address,undefined and with the runtimes preloaded. images/fuzz.py is a separate
program for windows of images.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path
from time import monotonic


def main(name: str, seconds: str = "10", seed: str = "0", *options: str) -> None:
    """Reads mutated files until the time is up."""
    parsers = runpy.run_path(str(Path(__file__).parent / name / "fuzz.py"))
    end = monotonic() + float(seconds)
    num_inputs = num_sound = 0
    with tempfile.TemporaryDirectory() as folder:
        for mutation in parsers["mutations"](int(seed), Path(folder), *options):
            num_sound += parsers["read"](*mutation)
            num_inputs += 1
            if monotonic() > end:
                break
    print(f"{num_inputs} inputs, {num_sound} of them sound")


if __name__ == "__main__":
    main(*sys.argv[1:])
