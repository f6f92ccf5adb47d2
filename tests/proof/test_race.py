"""Races of the slot protocol in C: under ThreadSanitizer, under AddressSanitizer, and with processes killed at random moments.

race.c runs the functions of src/protocol.h and src/lease.h, share_race.c those of src/share.h; the first comment of each lists
the planted bugs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
SANITIZERS = {
    "thread": ["-fsanitize=thread", "-O1", "-g"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"],
    "none": ["-O2", "-DROW_WORDS=64"],
}
REPORT, WRONG, STALL = 66, 3, 4  # exit codes of both programs

pytestmark = pytest.mark.slow(reason="compiles a race in C, also with sanitizers, and runs it many times")

Build = Callable[..., Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Returns a function that compiles a race. It skips the test if the sanitizer does not link or start here; an error in the
    race fails.
    """
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    if not (SOURCE / "protocol.h").exists():
        pytest.skip("src/ is missing: an installed package is being tested")
    folder = tmp_path_factory.mktemp("race")
    trivial = folder / "trivial.c"
    trivial.write_text("int main(void) { return 0; }\n")

    def compiled(source: Path, sanitizer: str, plant: int) -> tuple[Path, subprocess.CompletedProcess[str]]:
        binary = folder / f"{source.stem}-{sanitizer}-{plant}"
        flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-tsan", "-pthread", f"-DPLANT={plant}", f"-I{SOURCE}"]
        command = ["gcc", *flags, *SANITIZERS[sanitizer], str(source), "-o", str(binary)]
        return binary, subprocess.run(command, capture_output=True, text=True, timeout=120)

    def build(sanitizer: str, plant: int = 0, name: str = "race.c") -> Path:
        probe, done = compiled(trivial, sanitizer, 0)
        if done.returncode or subprocess.run([str(probe)], capture_output=True, timeout=120).returncode:
            pytest.skip(f"gcc cannot build or start a program with the sanitizer {sanitizer}: {done.stderr[-200:]}")
        binary, done = compiled(HERE / name, sanitizer, plant)
        assert done.returncode == 0, done.stderr
        return binary

    return build


def race(binary: Path, mode: str, seconds: float, *, is_static: bool, seed: int = 1) -> tuple[int, dict[str, int], str]:
    """Runs race.c and returns the same as `run`."""
    return run(binary, mode, str(seconds), str(seed), str(int(is_static)))


def run(*command: str | Path) -> tuple[int, dict[str, int], str]:
    """Returns the exit code, the printed counts, and the whole output."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "TSAN_OPTIONS": f"exitcode={REPORT}:halt_on_error=1",
            "ASAN_OPTIONS": f"exitcode={REPORT}",
            "UBSAN_OPTIONS": f"exitcode={REPORT}",
        },
    )
    counts = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", done.stdout)}
    return done.returncode, counts, done.stdout + done.stderr


def is_detected(binary: Path, mode: str, seconds: float, codes: set[int]) -> bool:
    """Returns whether a bug shows in some races: it needs two CPUs at the same word, which is rare on a loaded machine."""
    return any(race(binary, mode, seconds, is_static=False, seed=seed)[0] in codes for seed in range(1, 7))


@pytest.mark.parametrize("is_static", [False, True], ids=["free", "static"])
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_sanitizers_report_nothing(build: Build, sanitizer: str, is_static: bool) -> None:
    code, counts, output = race(build(sanitizer), "threads", 1.5, is_static=is_static)
    assert code == 0, output
    assert "WARNING" not in output
    events = ["batches", "kills", "hits", "bumps", "errors", "repacks", "poisoned", "grown"]
    assert all(counts[event] > 0 for event in events), output


@pytest.mark.parametrize(
    ("plant", "codes"),
    [
        pytest.param(1, {REPORT, WRONG}, id="slot freed at the bump although claimed"),
        pytest.param(2, {REPORT}, id="words published before the order"),
        pytest.param(3, {REPORT, WRONG}, id="live worker recovered"),
        pytest.param(4, {REPORT, WRONG}, id="row written after finish"),
        pytest.param(5, {REPORT}, id="words published relaxed"),
        pytest.param(7, {REPORT}, id="delivered without acquire"),
    ],
)
def test_planted_bug_between_threads_is_reported(build: Build, plant: int, codes: set[int]) -> None:
    assert is_detected(build("thread", plant), "threads", 5, codes)


@pytest.mark.parametrize("is_static", [False, True], ids=["free", "static"])
def test_no_byte_differs_when_workers_are_killed_at_random(build: Build, is_static: bool) -> None:
    code, counts, output = race(build("none"), "processes", 2, is_static=is_static)
    assert code == 0, output
    assert counts["differences"] == counts["lost"] == counts["unordered"] == 0
    assert counts["hits"] > 0
    assert counts["draining_hits"] > 0
    assert counts["bumps"] > 0


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        pytest.param(1, WRONG, id="slot freed at the bump although claimed"),
        pytest.param(4, WRONG, id="row written after finish"),
        pytest.param(6, STALL, id="recovery skips draining slots"),
    ],
)
def test_planted_bug_between_processes_is_detected(build: Build, plant: int, expected: int) -> None:
    assert is_detected(build("none", plant), "processes", 15, {expected})


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_sanitizers_report_nothing_for_ranks_that_share_a_ring(build: Build, sanitizer: str) -> None:
    code, counts, output = run(build(sanitizer, name="share_race.c"), "3", "1")
    assert code == 0, output
    assert "WARNING" not in output
    events = ["taken", "failed", "rounds", "repacks", "poisoned", "grown", "twice", "kills", "sleeps"]
    assert all(counts[event] > 0 for event in events), output


@pytest.mark.parametrize(
    ("plant", "codes"),
    [
        pytest.param(1, {REPORT, WRONG}, id="batch passed before it is held"),
        pytest.param(2, {REPORT, WRONG}, id="ticket stored before the order"),
        pytest.param(3, {REPORT, WRONG}, id="held slot reused"),
        pytest.param(4, {REPORT}, id="words read without acquire"),
        pytest.param(5, {REPORT, WRONG}, id="hold released before the lease ends"),
        pytest.param(6, {WRONG}, id="position written after its round"),
        pytest.param(7, {WRONG}, id="position written into the previous one's words"),
        pytest.param(8, {STALL}, id="ticket for a batch ordered again"),
    ],
)
def test_planted_bug_between_ranks_is_reported(build: Build, plant: int, codes: set[int]) -> None:
    binary = build("thread", plant, "share_race.c")
    assert any(run(binary, "8", str(seed))[0] in codes for seed in range(1, 41))  # a race does not show in every run
