"""A loader works whatever a program does with SIGCHLD, its children and its descriptors."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest

from shmload.processes import private_fds
from shmload.processes.exit_codes import UNKNOWN_EXIT, describe_exit, wait_exit_code

pytestmark = pytest.mark.slow(reason="starts programs that import torch")

TWO_EPOCHS = 2 * "[0, 1] [2, 3] [4, 5] [6, 7] "


def output_of(*arguments: Any) -> str:
    """Returns what the program prints. Its stderr may contain only messages about replaced workers."""
    command = [sys.executable, "-m", "tests.behaviour.habit_program", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stderr.splitlines() if "it is replaced" not in line] == []
    return ran.stdout


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("habit", ["ignored", "handler", "waitpid", "closes"])
def test_loaders_of_both_modes_work_in_a_program_with_habit(habit: str, method: str) -> None:
    assert output_of(habit, method, "None 1", "") == 2 * TWO_EPOCHS


@pytest.mark.parametrize("habit", ["ignored", "handler"])
def test_killed_worker_is_replaced_even_if_its_exit_code_is_lost(habit: str) -> None:
    assert output_of(habit, "fork", 1, "kills") == f"{TWO_EPOCHS}killed"


def test_exit_code_of_a_process_reaped_by_the_program_is_unknown() -> None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
    process.start()
    os.waitpid(process.pid or 0, 0)
    assert wait_exit_code(process) == UNKNOWN_EXIT
    process.close()
    assert "the code is unknown" in describe_exit(UNKNOWN_EXIT)


def test_descriptor_reused_by_the_program_is_not_closed() -> None:
    reader, writer = os.pipe()
    kept = private_fds.keep(reader)
    os.close(reader)
    null = os.open(os.devnull, os.O_RDONLY)
    assert null == reader
    assert not private_fds.is_kept(kept)
    kept_again = private_fds.keep(null)
    private_fds.close(kept)
    assert private_fds.is_kept(kept_again)
    private_fds.close(kept_again)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(null)
    os.close(writer)
