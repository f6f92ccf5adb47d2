"""The output of --help: every command on its own line, options on one screen, no value for flags."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import shmload
from shmload.cli import COMMANDS, app, main
from shmload.cli.size import parse_size

SCREEN = 40  # lines


def help_of(*words: str) -> list[str]:
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0
    return done.output.splitlines()


@pytest.mark.parametrize("name", [command.__name__ for command in COMMANDS])
def test_help_of_a_command_fits_on_one_screen(name: str) -> None:
    assert len(help_of(name)) <= SCREEN


def test_version_option_prints_the_version_alone() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"{shmload.__version__}\n")


@pytest.mark.parametrize("words", [[], ["bench"], ["launch"]])
def test_short_option_shows_the_same_help(words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words, "-h"])
    assert (done.exit_code, done.output.splitlines()) == (0, help_of(*words))


def test_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "shmload", "--version"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{shmload.__version__}\n", "")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("100MB", 10**8), ("64MiB", 1 << 26), ("2e8", 2 * 10**8), ("1.5 kib", 1536), ("10240", 10240), ("2e+3kB", 2_000_000)],
)
def test_size_has_a_unit_or_is_in_bytes(text: str, nbytes: int) -> None:
    assert parse_size(text, "--maxsize") == nbytes


@pytest.mark.parametrize("text", ["", "MB", "-1", "1e999", "1.2.3MB", "10 pounds", "1_000", "nan"])
def test_other_sizes_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="--maxsize: needs a size such as 100MB, 64MiB or 2e8"):
        parse_size(text, "--maxsize")


def test_flag_is_shown_without_a_value() -> None:
    assert [line.split()[1] for line in help_of("bench") if line.strip().startswith("--quick")] == ["Run"]


def test_list_of_commands_truncates_no_sentence() -> None:
    listed = " ".join(" ".join(help_of()[1:]).split())
    assert "..." not in listed
    assert "with torch.distributed's environment" in listed


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", None])
def test_missing_characters_and_closed_stdout_are_no_error(
    encoding: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = io.BytesIO()
    path = os.fsdecode(os.fsencode(tmp_path / "\u00fc") + b"\xff.npy")
    np.save(path, np.zeros((2, 2)))
    monkeypatch.setattr(sys, "argv", ["shmload", "inspect", path])
    monkeypatch.setattr(sys, "stdout", None if encoding is None else io.TextIOWrapper(written, encoding, write_through=True))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    if encoding is None:
        sys.stdout.close()
    else:
        shown = {"ascii": rb"\xfc\udcff.npy: npy", "utf-8": "\u00fc\\udcff.npy: npy".encode()}[encoding]
        assert shown in written.getvalue()


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("words", ["--help", "top --help", "inspect {}", "inspect --json {}", "clean"])
def test_error_for_a_full_disk_is_one_line(
    words: str, is_buffered: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "a.npy", np.zeros(2))
    monkeypatch.setattr(sys, "argv", ["shmload", *words.format(tmp_path / "a.npy").split()])
    with open("/dev/full", "wb", buffering=io.DEFAULT_BUFFER_SIZE if is_buffered else 0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=not is_buffered))
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.flush()  # as when the interpreter ends: nothing is left that could fail again
    assert ended.value.code == os.EX_IOERR
    assert capsys.readouterr().err == "shmload: cannot write its output: No space left on device\n"


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize(("name", "code"), [("a.npy", 0), ("b.npy", 2)])
def test_command_works_without_stderr(
    name: str, code: int, is_closed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.zeros(2))
    monkeypatch.setattr(sys, "argv", ["shmload", "inspect", str(tmp_path / name)])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", None if is_closed else io.TextIOWrapper(full, write_through=True))
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stderr.close()
    assert ended.value.code == code
