"""Files are dropped from the page cache, and whether they were is asked of the kernel."""

import os

import pytest

from shmload.tools.bench import measure
from shmload.tools.bench.report import WorkloadReport
from shmload.tools.bench.rounds import BenchOptions, files_below, prepare
from shmload.tools.named import BenchError

NBYTES = 1 << 20


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(NBYTES))
    return str(path)


def test_a_file_just_written_is_resident(file):
    assert measure.resident_share([file]) == 1.0


def test_what_drop_returns_is_what_the_kernel_says_is_left(file):
    left = measure.drop([file])
    assert left == measure.resident_share([file])
    if left == 1.0:
        pytest.skip("the file system of the temporary folder keeps its pages")
    assert left < 0.1
    with open(file, "rb") as opened:
        opened.read()
    assert measure.resident_share([file]) == 1.0


def test_a_file_of_memory_stays_and_is_told(tmp_path):
    descriptor = os.memfd_create("shmload-test")  # the pages of a tmpfs are the file itself
    try:
        os.write(descriptor, bytes(NBYTES))
        assert measure.drop([f"/proc/self/fd/{descriptor}"]) == 1.0
    finally:
        os.close(descriptor)


def test_an_empty_file_and_no_file_are_nothing_resident(tmp_path):
    (tmp_path / "empty").touch()
    assert measure.drop([str(tmp_path / "empty")]) == 0.0
    assert measure.drop([]) == 0.0


def test_folders_stand_for_the_files_below_them(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b", "deep/a"):
        (tmp_path / name).write_bytes(b"x")
    assert [str(tmp_path / "b"), str(tmp_path / "deep" / "a")] == files_below([tmp_path, tmp_path / "b"])


def section(resident):
    report = WorkloadReport("records", "", 16, {"resident_share": resident}, {}, cache="cold")
    report.note_residence(0.05)
    return report


def test_files_that_stayed_are_noted_and_few_pages_are_not():
    assert "40% of its files stayed in the page cache" in section(0.4).notes[0]
    assert section(0.01).notes == []


def test_every_setting_gets_a_cold_pass_of_its_own_and_memory_gets_none(tmp_path):
    notes: list[str] = []
    options = BenchOptions(workloads=("records", "rows"), quick=True, cold=True, num_workers=(1, 2))
    tasks = prepare(options, tmp_path, notes)
    assert [(task.workload.name, task.point.num_workers, bool(task.job.cold_files)) for task in tasks] == [
        ("records", 1, False),
        ("records", 1, True),
        ("records", 2, False),
        ("records", 2, True),
        ("rows", 1, False),
        ("rows", 2, False),
    ]
    assert notes == ["rows: its data lie in memory, so there is no cold pass"]
    assert tasks[1].job.cold_files == (tasks[0].job.arguments["path"],)
    assert tasks[0].job.arguments["num_samples"] == 16  # each record once, warm as cold


def test_the_users_own_files_are_dropped(tmp_path, file):
    options = BenchOptions(dataset="m:n", cold=True, cold_files=(tmp_path,))
    warm, cold = prepare(options, tmp_path, [])
    assert (warm.job.cold_files, cold.job.cold_files) == ((), (file,))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataset": "m:n", "cold": True}, "--cold: needs --cold-files with your own data"),
        ({"cold_files": ("x",)}, "--cold-files: needs --cold, which measures a pass"),
    ],
)
def test_cold_options_that_do_not_fit_say_what_is_needed(options, text):
    with pytest.raises(BenchError, match=text):
        BenchOptions(**options)


def test_files_that_are_not_there_are_named(tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(BenchError, match=r"--cold-files: needs files or folders that exist, given .*absent"):
        files_below([absent])
    absent.mkdir()
    with pytest.raises(BenchError, match=r"--cold-files: needs at least one file, found none in .*absent"):
        files_below([absent])


@pytest.mark.slow
def test_cold_and_warm_passes_stand_apart_in_the_report(bench):
    import json

    done = bench("--quick", "--workload", "records", "--cold", "--loader", "torch", "--workers", "0", "--json", "-")
    assert done.returncode == 0, done.stderr
    warm, cold = json.loads(done.stdout)["workloads"]
    assert (warm["cache"], cold["cache"]) == ("warm", "cold")
    assert "resident_share" not in warm["limit"]
    assert 0 <= cold["loaders"]["torch"]["metrics"]["resident_share"]["median"] <= 1
    assert cold["loaders"]["torch"]["metrics"]["samples_per_s"]["median"] > 0
