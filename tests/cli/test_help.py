"""What --help shows: every command in a line of its own, options on one screen, no value beside what takes none."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from shmload.cli import COMMANDS, app

SCREEN = 40  # lines


def help_of(*words: str) -> list[str]:
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0
    return done.output.splitlines()


@pytest.mark.parametrize("name", [command.__name__ for command in COMMANDS])
def test_a_command_explains_itself_on_one_screen(name: str) -> None:
    assert len(help_of(name)) <= SCREEN


def test_a_flag_is_shown_without_a_value() -> None:
    assert [line.split()[1] for line in help_of("bench") if line.strip().startswith("--quick")] == ["A"]


def test_the_list_of_commands_breaks_no_sentence_off() -> None:
    listed = " ".join(" ".join(help_of()[1:]).split())
    assert "..." not in listed
    assert "with torch.distributed's environment" in listed
