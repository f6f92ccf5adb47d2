"""Race tests of src/events.h: one thread writes while another reads."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
TORN = 3  # exit code of event_ring.c

pytestmark = pytest.mark.slow(reason="compiles a race in C, with sanitizers, too, and runs it")

Race = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Race:
    """Returns a function that compiles and runs event_ring.c."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    if not (SOURCE / "events.h").exists():
        pytest.skip("src/ is not here: an installed package is being tested")
    folder = tmp_path_factory.mktemp("event-ring")

    def run(num_events: int, capacity: int, plant: int = 0, flags: tuple[str, ...] = ("-O2",)) -> subprocess.CompletedProcess[str]:
        binary = folder / f"event_ring-{plant}{''.join(flags)}"
        if not binary.exists():
            command = ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", f"-DPLANT={plant}", f"-I{SOURCE}"]
            done = subprocess.run([*command, *flags, str(HERE / "event_ring.c"), "-o", str(binary)], capture_output=True, text=True)
            if done.returncode and any("-fsanitize" in flag for flag in flags):
                pytest.skip(f"gcc cannot build with {flags}: {done.stderr[-200:]}")
            assert done.returncode == 0, done.stderr
        return subprocess.run([str(binary), str(num_events), str(capacity)], capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize("capacity", [2, 16, 512])
def test_reader_gets_complete_events_in_order_and_counts_missed_ones(race: Race, capacity: int) -> None:
    done = race(1_000_000, capacity)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("plant", [1, 2])
def test_race_detects_an_unsafe_reader(race: Race, plant: int) -> None:
    # on a busy machine, the two threads seldom run at the same time, and many runs show nothing
    assert any(race(1_000_000, 16, plant).returncode == TORN for _ in range(100))


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_no_sanitizer_finds_anything(race: Race, sanitizers: str) -> None:
    done = race(100_000, 16, flags=("-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-Wno-tsan"))
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the sanitizer does not start here")
    assert done.returncode == 0, done.stdout + done.stderr
