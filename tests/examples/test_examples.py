"""The examples do what their docstrings say: losses fall, a resume is identical, the audit proves the run.

A run of the notebook gives its stored outputs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

slow = pytest.mark.slow(reason="trains a model in processes that import torch")
EXAMPLES = next(p / "examples" for p in Path(__file__).parents if (p / "examples" / "ddp.py").exists())
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCH = [sys.executable, "-m", "shmload", "launch", "--nproc-per-node", "2"]
Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns a function that runs an example with --quick and returns its output lines. It may leave no temporary files."""

    def run_with(name: str, launcher: list[str] | None = None) -> list[str]:
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env |= {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*(launcher or [sys.executable, "-W", "error"]), str(EXAMPLES / name), "--quick"],
            capture_output=True,
            text=True,
            timeout=220,
            env=env | {"CUDA_VISIBLE_DEVICES": ""},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert launcher or done.stderr == ""
        assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torch")] == []
        return done.stdout.splitlines()

    return run_with


# Runs the notebook at a given path and prints the outputs of its cells.
NOTEBOOK_PROGRAM = """
import json, sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=180).execute()
print(json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"]))
"""


def losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"loss (\d+\.\d+)", line))]


def test_docstring_of_an_example_has_purpose_command_and_output() -> None:
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert text.count("\n") < 150, path.name
        assert f"examples/{path.name} [--quick]" in text, path.name
        assert "\nShows: " in text, path.name
        assert "\nprints" in text, path.name


@slow
def test_photographs_are_classified_and_resumed_losses_are_identical(run: Run) -> None:
    lines = run("photographs.py")
    assert len(losses(lines)) == 3
    assert losses(lines)[-1] < losses(lines)[0]
    accuracies = [float(found[1]) for line in lines if (found := re.search(r"new crops (\d+\.\d)%", line))]
    assert accuracies[-1] > 3 * 12.5  # chance is one in eight
    assert re.fullmatch(r"waited \d+% of \d+\.\d s: 1536 samples, 2 workers, busy \d+% of it", lines[-2])
    assert lines[-1] == "resumed in the middle of epoch 1 with 1 worker: 11 losses, bit-identical"


@slow
def test_language_model_learns_from_packed_windows_and_resumes_identically(run: Run) -> None:
    lines = run("language_model.py")
    density, tokens = re.fullmatch(r"\d+ windows, density (\d\.\d+); segments of the last: \[(.*)\]", lines[0]).groups()  # type: ignore[union-attr]  # fails unless it matches
    assert float(density) > 0.98
    assert sum(map(int, tokens.split(","))) == 129
    assert len(losses(lines)) == 6
    assert losses(lines)[-1] < losses(lines)[0] - 1.0
    assert re.fullmatch(r"waited \d+\.\d% of \d+\.\d s: \d+ windows", lines[-2])
    assert lines[-1] == "resumed at step 12 with 2 workers: 12 losses, bit-identical"


@slow
def test_growing_epochs_lower_the_loss_and_drop_old_samples(run: Run) -> None:
    lines = run("growing.py")
    counts = [int(found[1]) for line in lines if (found := re.search(r"epoch \d+: +(\d+) samples", line))]
    assert len(counts) == len(losses(lines)) == 6
    assert counts[0] < counts[-1] <= 6000
    assert losses(lines)[-1] < losses(lines)[0]
    assert re.fullmatch(r"collected [\d,]+ samples, \d+ files evicted, by 2 samplers; resumed in the middle of epoch 6", lines[-1])


@slow
@pytest.mark.parametrize("launcher", [None, TORCHRUN], ids=["spawn", "torchrun"])
def test_two_ranks_and_then_one_get_every_sample_once(run: Run, launcher: list[str] | None) -> None:
    lines = [line.removeprefix("[rank 0] ") for line in run("ddp.py", launcher)]
    assert [line.split(":")[0] for line in lines if "rank" in line and "loss" in line] == [
        "2 ranks, epoch 0",
        "2 ranks, epoch 1",
        "2 ranks, epoch 2",
        "1 rank, epoch 2",
        "1 rank, epoch 3",
    ]
    assert losses(lines) == sorted(losses(lines), reverse=True)
    assert [line.endswith("of 8 steps") for line in lines if "epoch 2: loss" in line] == [True, True]
    assert any(re.fullmatch(r"rank 0 waited \d+\.\d% of \d+\.\d s: 5120 samples", line) for line in lines)
    assert lines[-1] == "proven: every sample exactly once"


@slow
@pytest.mark.parametrize("launcher", [TORCHRUN, LAUNCH], ids=["torchrun", "shmload"])
def test_nanogpt_windows_equal_get_batch_and_two_ranks_equal_one(run: Run, launcher: list[str]) -> None:
    lines = [line.removeprefix("[rank 0] ") for line in run("nanogpt.py", launcher)]
    assert [re.sub(r"loss \d\.\d{3}", "loss", line) for line in lines] == [
        "2 ranks, get_batch: loss",
        "2 ranks, its windows from a worker: loss; batches identical",
        "2 ranks, each window once: loss; one rank's batches identical",
        "one rank continues after step 24: batches identical",
    ]
    assert losses(lines)[0] == losses(lines)[1], "losses of the same batches"
    assert max(losses(lines)) < 4.5, "an untrained model has 5.5"


@pytest.mark.slow(reason="starts a kernel and runs every cell")
def test_notebook_outputs_equal_the_stored_ones(tmp_path: Path) -> None:
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason=f"needs {module}: pip install 'shmload[libraries]'")
    path = EXAMPLES / "notebook.ipynb"
    stored = [cell["outputs"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert sum(map(len, stored)) == 4
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    env |= {"IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", NOTEBOOK_PROGRAM, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == stored
