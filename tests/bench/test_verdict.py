"""The verdict as a function of figures: each bottleneck, contradictory figures, and datasets with a known bottleneck."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload.tools.bench.verdict import Figures, demands, judged

NOTHING = Figures(
    num_workers=2,
    num_cpus=4,
    read_cpu_s=0.0,
    read_blocked_s=0.0,
    copy_s=0.0,
    worker_cpu_s=0.0,
    trainer_cpu_s=0.0,
    trainer_s=0.0,
    wall_s=0.010,
    wait_share=0.9,
)
seconds = st.floats(0, 10)


def figures(**known):
    return replace(NOTHING, **known)


def test_sleeping_workers_are_source_bound_and_their_sleep_overlaps():
    verdict = judged(figures(read_blocked_s=0.020, read_cpu_s=0.001, worker_cpu_s=0.001, trainer_cpu_s=0.0001))
    assert verdict.bottleneck == "source"
    assert verdict.source_ms == pytest.approx(10)
    assert verdict.headroom_ratio == pytest.approx((10 + 0.5) / 0.5)


def test_computing_workers_are_decode_bound_and_share_the_cores():
    verdict = judged(figures(num_workers=8, num_cpus=4, read_cpu_s=0.040, worker_cpu_s=0.042, trainer_cpu_s=0.001))
    assert verdict.bottleneck == "decode"
    assert verdict.decode_ms == pytest.approx(10)
    assert "without that it could be 10x as fast" in verdict.sentence()


def test_moving_bytes_is_hand_off_bound_and_not_decode_bound():
    verdict = judged(figures(read_cpu_s=0.011, copy_s=0.010, worker_cpu_s=0.015, trainer_cpu_s=0.002))
    assert verdict.bottleneck == "hand-off"
    assert verdict.decode_ms == pytest.approx(0.5)
    assert verdict.sentence().endswith("Remedy: use larger batches or a larger `prefetch_factor`, or a `schema` with `read_into`")
    for known in ({"decodes_in_place": True}, {"has_collate_fn": True}):
        assert verdict.sentence(**known).endswith("Remedy: use larger batches or a larger `prefetch_factor`")


def test_trainer_that_hardly_waits_is_the_bottleneck():
    verdict = judged(figures(wait_share=0.02, trainer_s=0.010, read_cpu_s=0.004, worker_cpu_s=0.005))
    assert verdict.bottleneck == "trainer"
    assert "the loader alone could deliver 4.0x as fast" in verdict.sentence()


def test_without_workers_all_time_is_the_trainers_and_adds_up():
    alone = figures(num_workers=0, read_cpu_s=0.006, trainer_cpu_s=0.008, trainer_s=0.002)
    assert demands(alone).pace_s() == pytest.approx(0.010)
    assert judged(alone).bottleneck == "decode"
    assert judged(alone).explained_share == pytest.approx(1.0)


def test_threads_decode_in_the_trainers_process():
    threads = figures(are_threads=True, read_cpu_s=0.020, trainer_cpu_s=0.021)
    assert judged(threads).bottleneck == "decode"
    assert judged(threads).hand_off_ms == pytest.approx(1)
    assert judged(threads).decode_ms == pytest.approx(10)


def test_reading_is_limited_to_the_loaders_total_time():
    verdict = judged(figures(read_cpu_s=0.020, copy_s=0.003, worker_cpu_s=0.004, wall_s=0.004))
    assert verdict.bottleneck == "hand-off"
    assert verdict.decode_ms == pytest.approx(0.5)


def test_verdict_without_measurements_is_no_error():
    verdict = judged(figures(wall_s=0.0))
    assert verdict.bottleneck == "unknown"
    assert verdict.headroom_ratio == 1.0


@given(st.integers(0, 64), st.integers(1, 64), st.lists(seconds, min_size=6, max_size=6), st.floats(1e-6, 10), st.floats(0, 1))
def test_bounds_and_demands_are_never_negative(workers, cpus, parts, wall_s, wait_share):
    read, blocked, copy, worker, trainer, consumer = parts
    verdict = judged(
        Figures(
            num_workers=workers,
            num_cpus=cpus,
            read_cpu_s=read,
            read_blocked_s=blocked,
            copy_s=copy,
            worker_cpu_s=worker,
            trainer_cpu_s=trainer,
            trainer_s=consumer,
            wall_s=wall_s,
            wait_share=wait_share,
        )
    )
    assert verdict.headroom_ratio >= 1.0
    assert min(verdict.source_ms, verdict.decode_ms, verdict.hand_off_ms, verdict.trainer_ms) >= 0
    assert verdict.bottleneck != "trainer" or wait_share < 0.5


@pytest.mark.slow(reason="measures in forked processes")
@pytest.mark.parametrize(
    ("dataset", "arguments", "bound"),
    [
        ("planted:Sleeping", (), "source"),
        ("planted:Computing", (), "decode"),
        ("planted:Good", ("--step-ms", "20"), "trainer"),
        ("shmload.tools.bench.generated_data:Plain", (), "hand-off"),
    ],
)
def test_dataset_with_a_known_bottleneck_gets_its_verdict(bench, dataset, arguments, bound):
    done = bench(
        *("--quick", "--dataset", dataset, "--loader", "shmload", "--batch-size", "10", "--workers", "1"), *("--json", *arguments)
    )
    assert done.returncode == 0, done.stderr
    (section,) = json.loads(done.stdout)["workloads"]
    assert bound == section["verdict"]["bottleneck"], section["verdict"]
    assert section["verdict"]["headroom_ratio"] >= 1
