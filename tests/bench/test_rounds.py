"""Missing workloads are reported while the rest runs, and processes are watched from outside."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from shmload.tools.bench import rounds, tree_usage
from shmload.tools.bench.bench_job import BenchJob, run_jobs
from shmload.tools.bench.bench_options import BenchOptions
from shmload.tools.bench.builtin_workloads import WORKLOADS
from shmload.tools.bench.report import Report, machine
from shmload.tools.bench.task import prepare
from shmload.tools.object_reference import UsageError


class Silent:
    """Progress output that is recorded."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def start(self, num_jobs: int) -> None: ...

    def doing(self, text: str) -> None:
        self.messages.append(text)

    def advance(self) -> None: ...


@pytest.fixture
def no_codecs(monkeypatch):
    bare = replace(WORKLOADS["photos"], missing=lambda: "needs simplejpeg: pip install 'shmload[images]'")
    monkeypatch.setitem(WORKLOADS, "photos", bare)


def test_workload_without_its_extra_is_skipped_and_the_rest_prepared(no_codecs, tmp_path):
    notes: list[str] = []
    tasks = prepare(BenchOptions(workloads=("photos", "rows"), quick=True), tmp_path, notes)
    assert [task.workload.name for task in tasks] == ["rows"]
    assert notes == ["photos left out: needs simplejpeg: pip install 'shmload[images]'"]


def test_error_if_nothing_can_run_names_the_command_to_install(no_codecs):
    with pytest.raises(UsageError, match=r"nothing can run: photos left out: needs simplejpeg: pip install"):
        rounds.benchmark(BenchOptions(workloads=("photos",)), Silent())


def test_error_for_a_full_temporary_folder_is_one_line(monkeypatch, tmp_path):
    def full(folder, small):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(WORKLOADS, "records", replace(WORKLOADS["records"], prepare=full))
    with pytest.raises(UsageError, match=r"records: cannot write its data .*No space left on device; set TMPDIR"):
        prepare(BenchOptions(workloads=("records",)), tmp_path, [])


def test_report_is_json_serializable_without_machine_paths():
    import json

    text = json.dumps(Report("shmload", "torch", 2, False, "fork", machine()).as_dict())
    assert os.path.expanduser("~") not in text


def test_cpu_and_memory_of_children_are_included():
    burn = "import sys, time\nwhile time.process_time() < 0.1: pass\nprint('burnt', flush=True)\nsys.stdin.read()"
    alone = tree_usage.tree_pss_bytes(os.getpid())
    before_s = tree_usage.tree_cpu_s()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"burnt\n"
        assert child.pid in tree_usage.descendants(os.getpid())
        assert tree_usage.tree_cpu_s() - before_s >= 0.1
        assert tree_usage.tree_pss_bytes(os.getpid()) > alone / 2
        assert tree_usage.tree_pss_bytes(child.pid) > 1 << 20
        child.communicate()
    assert tree_usage.tree_cpu_s() - before_s >= 0.08  # including ended children, in ticks


@pytest.mark.slow(reason="measures a workload in new processes, which import torch")
def test_source_tree_in_the_working_directory_is_not_measured(monkeypatch, tmp_path):
    """Simulates a clone next to an installed package, before anything is built in the clone."""
    (tmp_path / "shmload").mkdir()
    (tmp_path / "shmload" / "__init__.py").write_text("raise ImportError('this is the unbuilt tree')")
    monkeypatch.chdir(tmp_path)
    report = rounds.benchmark(BenchOptions(workloads=("rows",), loaders=("shmload",), rounds=1, quick=True), Silent())
    assert report.workloads[0].loaders["shmload"].error is None


def test_truncated_result_is_ignored(monkeypatch):
    answer = {"error": "", "values": {"batches_per_s": 3.0}}
    lines = json.dumps(answer) + '\n{"err'
    code = f"import os, sys; file = open(sys.argv[-1], 'w'); file.write({lines!r}); file.close(); os.kill(os.getpid(), 9)"
    monkeypatch.setattr("shmload.tools.bench.bench_job.BOOT", code)
    job = BenchJob(workload="rows", dataset="m:n", loader="", batch_size=1, num_workers=2)
    first, second = run_jobs([job, job])
    assert (first.error, first.values) == ("", {"batches_per_s": 3.0})
    assert second.error == "its process ended with signal SIGKILL before it answered"
