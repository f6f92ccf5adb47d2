"""The bench command end to end, in other processes: new ones once, otherwise forks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shmload.tools.bench.workload_table import FACTS

slow = pytest.mark.slow(reason="measures in forked processes")
ROOT = Path(__file__).resolve().parents[2]
SUBJECT = "shmload"
PNG = b"\x89PNG\r\n\x1a\n"

METRICS = (
    "samples_per_s",
    "mb_per_s",
    "cpu_us_per_sample",
    "first_batch_ms",
    "wait_p50_ms",
    "wait_p99_ms",
    "trainer_us_per_batch",
    "trainer_s_per_gib",
    "peak_pss_mb",
)


@pytest.mark.slow(reason="measures in new processes, which import torch")
def test_quick_runs_every_workload_and_prints_only_json(new_bench):
    done = new_bench("--quick", "--json", "--loader", f"{SUBJECT},torch")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert {"photos", "records", "rows", "tokens", "python"} == {each["name"] for each in report["workloads"]}
    for workload in report["workloads"]:
        assert workload["limit"]["fill_samples_per_s"] > 0
        assert workload["loaders"][SUBJECT]["same_bytes"] is True
        for loader in workload["loaders"].values():
            assert loader["error"] is None
            assert all(loader["metrics"][metric]["median"] >= 0 for metric in METRICS)
            assert loader["metrics"]["samples_per_s"]["median"] > 0
            assert loader["metrics"]["peak_pss_mb"]["median"] > 10
    assert report["quick"] is True


@slow
def test_table_plot_and_json_file_are_of_one_run(bench, tmp_path):
    pytest.importorskip("matplotlib")
    plot, file = tmp_path / "ratios.png", tmp_path / "figures.json"
    done = bench(
        *("--quick", "--workload", "rows", "--loader", "shmload,torch"),
        *("--plot", str(plot), "--save", str(file), "--workers", "1"),
    )
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())  # where lines break depends on the length of the figures
    assert "x torch" in printed
    assert "rows: shmload delivers" in printed
    assert "with the same bytes" in printed
    assert "One core, without a loader, puts" in printed
    assert FACTS["rows"].title in printed
    assert f"wrote {plot} wrote {file}" in printed
    assert "--quick shows that it works" in printed
    assert json.loads(file.read_text())["format"] == 1
    from PIL import Image

    assert plot.read_bytes()[:8] == PNG
    with Image.open(plot) as image:
        image.load()
        assert image.width > 1000


@slow
def test_figures_are_shown_even_if_the_disk_is_full(bench):
    done = bench("--quick", "--workload", "rows", "--loader", "shmload", "--save", "/dev/full")
    assert (done.returncode, done.stderr) == (1, "shmload bench: /dev/full: No space left on device\n")
    assert "rows: shmload delivers" in " ".join(done.stdout.split())


@slow
def test_one_wrong_byte_fails_the_benchmark(bench):
    wrong = "planted:OneWrongByte"
    done = bench("--quick", "--workload", "rows,python", "--loader", f"{wrong},torch", "--workers", "0", "--json")
    assert done.returncode == 1
    for name in ("rows", "python"):
        assert f"{name}: {wrong} and torch delivered different bytes in batch 1" in done.stderr
    assert sum(len(each["mismatches"]) for each in json.loads(done.stdout)["workloads"]) == 2


@slow
def test_dataset_and_loader_of_the_user_are_measured(bench):
    done = bench("--quick", "--dataset", "planted:Good", "--loader", "planted:torch_like,torch", "--workers", "0", "--json")
    assert done.returncode == 0, done.stderr
    (workload,) = json.loads(done.stdout)["workloads"]
    assert workload["title"] == "planted:Good"
    assert workload["loaders"]["planted:torch_like"]["same_bytes"] is True


@slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterable_dataset_is_measured_and_its_bytes_are_compared(bench, num_workers):
    done = bench("--quick", "--dataset", "planted:Stream", "--workers", str(num_workers), "--batch-size", "8", "--json")
    assert done.returncode == 0, done.stderr
    (workload,) = json.loads(done.stdout)["workloads"]
    assert workload["loaders"][SUBJECT]["same_bytes"] is True
    assert workload["loaders"]["torch"]["metrics"]["samples_per_s"]["median"] > 0


@slow
def test_processes_and_threads_are_compared_on_a_users_dataset_in_one_run(bench):
    loaders = ["shmload", "shmload-threads", "torch"]
    done = bench("--quick", "--dataset", "planted:Good", "--loader", ",".join(loaders), "--json")
    assert done.returncode == 0, done.stderr
    (workload,) = json.loads(done.stdout)["workloads"]
    assert list(workload["loaders"]) == loaders
    for loader in workload["loaders"].values():
        assert loader["metrics"].keys() >= {"samples_per_s", "cpu_us_per_sample", "first_batch_ms", "peak_pss_mb"}
    assert workload["loaders"]["shmload-threads"]["same_bytes"] is True


@slow
@pytest.mark.parametrize("dataset", ["InPlace", "RandomInPlace"])
def test_dataset_that_only_decodes_into_batches_is_measured_beside_torch(bench, dataset):
    done = bench("--quick", "--dataset", f"planted:{dataset}", "--batch-size", "8", "--json")
    assert done.returncode == 0, done.stderr
    (workload,) = json.loads(done.stdout)["workloads"]
    assert workload["loaders"][SUBJECT]["same_bytes"] is True
    assert workload["loaders"]["torch"]["metrics"]["samples_per_s"]["median"] > 0


@slow
def test_error_explains_why_seed_mode_rejects_iterable_datasets(bench):
    done = bench("--quick", "--dataset", "planted:stream", "--loader", "shmload-seed,torch")
    assert done.returncode == 1
    assert "seed mode orders samples by index, which an IterableDataset does not have" in " ".join(done.stdout.split())


@slow
def test_one_wrong_sample_of_an_iterable_dataset_fails_the_benchmark(bench):
    done = bench("--quick", "--dataset", "planted:Stream", "--loader", "planted:OneWrongByte,torch", "--workers", "0", "--json")
    assert done.returncode == 1
    assert "planted:OneWrongByte and torch delivered different bytes in batch 1" in done.stderr


@slow
def test_dataset_with_its_own_random_numbers_is_noted(bench):
    done = bench("--quick", "--dataset", "planted:Unrepeatable", "--loader", "planted:torch_like,torch", "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert "does not repeat itself either" in " ".join(done.stdout.split())


@slow
def test_samples_that_differ_in_shape_fail_with_the_remedy(bench):
    done = bench("--quick", "--dataset", "planted:Uneven")
    assert done.returncode == 1
    assert "torch's collate refuses them: give --collate with a function that pads them" in " ".join(done.stdout.split())


@slow
def test_failing_loaders_are_reported_and_the_others_measured(bench):
    loaders = "planted:raises_at_once,planted:delivers_nothing,torch"
    done = bench("--quick", "--workload", "python", "--loader", loaders, "--json")
    assert done.returncode == 1
    assert "planted:raises_at_once failed: RuntimeError: no batch today" in done.stderr
    assert "delivers_nothing failed: RuntimeError: the loader delivered no batch in a whole epoch" in done.stderr
    (workload,) = json.loads(done.stdout)["workloads"]
    assert workload["loaders"]["torch"]["metrics"]["samples_per_s"]["median"] > 0


@slow
def test_process_that_ends_without_a_result_is_reported_with_its_exit_code(bench):
    done = bench("--quick", "--dataset", "planted:Deadly", "--loader", "torch", "--workers", "0")
    assert done.returncode == 2
    assert "its process ended with code 3 before it answered" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow(reason="reads samples in a forked process")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--workload", "video"], "--workload: needs one of photos, records, rows, tokens, python, given 'video'"),
        (["--dataset", "planted:raises"], "calling it without arguments raised FileNotFoundError: no folder train/"),
        (["--dataset", "planted:Unreadable"], "dataset: reading samples of the dataset raised KeyError: 'image' (sample 0)"),
        (["--save", "."], ".: is a folder; name a file in it"),
        (["--save", "no/such/file.json"], "no/such/file.json: needs an existing folder to write to"),
        (["--dataset", ""], "--dataset: needs package.module:name, given ''"),
        (["--torch-loader", ""], "--torch-loader: needs package.module:name, given ''"),
        (["--dataset", "planted:good", "--collate", ""], "--collate: needs package.module:name, given ''"),
        (["--dataset", "planted:good", "--collate", "planted:no"], "--collate: 'planted' has no 'no'"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(bench, arguments, text):
    done = bench("--quick", "--loader", "torch", "--workers", "0", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("shmload bench: ")


def test_help_imports_neither_torch_nor_numpy():
    code = (
        "import sys; sys.path.append(sys.argv.pop(1))\nfrom shmload.cli import app\n"
        "try: app(['bench', '--help'])\n"
        "finally: print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
    assert "--dataset" in done.stdout
    for name, facts in FACTS.items():
        assert f"{name} {facts.line()}" in " ".join(done.stdout.split())
