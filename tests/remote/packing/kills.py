"""Kills packings at random moments and compares the results with an undisturbed packing. Run by hand, from the project's root:
    python -m tests.remote.packing.kills --num 1000
Each packing is killed up to five times and then runs to its end. The folder must hold the bytes of an undisturbed packing, and
before the end its only manifest is that of the dataset packed before. test_kills.py runs a few of these.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from pathlib import Path

from shmload.remote.manifest import Manifest
from shmload.storage.local_store import LocalStore
from tests.remote.packing.kill_kit import NUM_SAMPLES, finished, killed_after
from tests.remote.packing.packing_kit import packed


def run(num_kills: int, seed: int, folder: Path) -> tuple[int, int]:
    """Runs packings until `num_kills` were killed, all in one folder; returns the numbers of kills and packings."""
    wanted = finished(folder / "wanted")
    rng = random.Random(seed)
    done = packings = 0
    while done < num_kills:
        out = folder / "out"
        old = packed([(b"old", 1)] * 7, LocalStore(out)) if rng.random() < 0.5 else None
        for _ in range(rng.randrange(1, 6)):
            steps = killed_after(out, rng.randrange(1, 220), workers=rng.choice((0, 1, 2)))
            if steps < 0:
                break
            done += 1
            manifest = out / "manifest.json"
            if manifest.exists():
                found = Manifest.parse(manifest.read_bytes())
                assert found == old or found.dump() == wanted["manifest.json"], "the manifest is of neither packing"
                for shard in found.shards:
                    assert (out / shard.name).stat().st_size == shard.nbytes, f"{shard.name} is not whole"
        assert wanted == finished(out), "the bytes differ from those of an undisturbed packing"
        packings += 1
        shutil.rmtree(out)
    return done, packings


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=50, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shmload-kills-") as root:
        kills, ended = run(given.num, given.seed, Path(root))
    print(f"{kills} kills, {ended} packings of {NUM_SAMPLES} samples ended in the same bytes")
