"""The output of `shmload inspect` and `shmload top` for a growing cache."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from shmload.cli import app
from shmload.growing import SampleCache
from tests.growing.growing_kit import endless, flip, put, put_foreign, wait_until


def inspected(cache: SampleCache) -> list[str]:
    result = CliRunner().invoke(app, ["inspect", "--json", str(cache.path)])
    assert result.exit_code == 0, result.output
    (summary,) = json.loads(result.output)
    assert summary["format"] == "growing cache"
    return [f"{summary['num_samples']} samples", *summary["notes"]]


def test_inspect_reports_use_generation_and_excluded_files(make_cache: Callable[..., SampleCache]) -> None:
    cache = make_cache(4096)
    for number in range(6):
        put(cache, range(20 * number, 20 * number + 20))
    bad = put_foreign(cache.path / "bad.tfrecord", range(4))
    flip(bad, 20)
    lines = inspected(cache)
    assert lines[:3] == [
        "80 samples",
        "98% of its budget of 4,096 bytes: 4 files, 0 being written, 0 read by epochs under way",
        "generation 6, the number of files published; 2 of them are gone",
    ]
    assert lines[3].endswith("samples/s were published")
    assert lines[4].startswith(f"left out: bad.tfrecord: {bad}: record 0")


@pytest.mark.slow(reason="a sampler in a process of its own starts and writes files")
def test_samplers_and_writers_are_shown_with_their_activity(make_cache: Callable[..., SampleCache]) -> None:
    cache = make_cache(4096)
    samplers = cache.start(endless, 1)
    wait_until(lambda: cache.stats().generation >= 2, "files")
    lines = inspected(cache)
    assert any("sampler 0 of process" in line and "running, 0 restarts" in line for line in lines)
    assert any("(sampler 0 of 1) " in line for line in lines)
    samplers.stop()
    assert not any("sampler" in line for line in inspected(cache))
