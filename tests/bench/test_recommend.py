"""The recommended setting, from a sweep or from the model."""

from dataclasses import replace

from shmload.tools.bench.recommendation import MeasuredSetting, from_model, from_sweep
from shmload.tools.bench.verdict import Figures

FIGURES = Figures(
    num_workers=2,
    num_cpus=8,
    read_cpu_s=0.0,
    read_blocked_s=0.0,
    copy_s=0.0,
    worker_cpu_s=0.0,
    trainer_cpu_s=0.0,
    trainer_s=0.010,
    wall_s=0.010,
    wait_share=0.5,
)


def tried(workers, rate, wait_ms=0.0, prefetch=None, batch_size=64):
    return MeasuredSetting(workers, prefetch, batch_size, rate, wait_ms)


def by_model(step_ms=10.0, **known):
    return from_model(replace(FIGURES, **known), step_ms=step_ms)


def test_sweep_with_a_step_recommends_the_smallest_setting_that_keeps_up():
    found = from_sweep([tried(4, 990, 0.1), tried(1, 500, 9.0), tried(2, 980, 0.4)], 10.0)
    assert (found.num_workers, found.prefetch_factor, found.origin) == (2, 2, "sweep")
    assert "at most 5% of a step" in found.sentence()


def test_smaller_prefetch_factor_is_recommended_among_equals():
    found = from_sweep([tried(2, 980, 0.1, prefetch=4), tried(2, 980, 0.1, prefetch=1)], 10.0)
    assert found.prefetch_factor == 1


def test_fastest_setting_is_recommended_if_none_keeps_up():
    found = from_sweep([tried(1, 500, 9.0), tried(2, 700, 5.0)], 10.0)
    assert found.num_workers == 2
    assert found.reason == "none that was tried kept the wait within 5% of a step: the fastest of them"


def test_sweep_without_a_step_recommends_the_smallest_setting_near_the_best_rate():
    found = from_sweep([tried(8, 1000), tried(4, 960), tried(2, 900)], 0.0)
    assert found.num_workers == 4


def test_batch_size_is_recommended_only_if_several_were_measured():
    assert from_sweep([tried(2, 1.0, batch_size=16)], 0.0).batch_size is None
    found = from_sweep([tried(1, 10.0, batch_size=16), tried(2, 50.0, batch_size=256)], 0.0)
    assert (found.num_workers, found.batch_size) == (2, 256)
    assert "batch_size=256" in found.sentence()


def test_model_divides_the_work_of_a_batch_by_the_step_with_a_margin():
    assert by_model(read_cpu_s=0.032, worker_cpu_s=0.032).num_workers == 4  # 1.25 * 32 / 10
    assert by_model(read_cpu_s=0.001, worker_cpu_s=0.001).num_workers == 1


def test_model_limits_computing_to_the_cores_and_notes_it():
    found = by_model(read_cpu_s=0.500, worker_cpu_s=0.500)
    assert found.num_workers == 8
    assert "more would help, but the cores are at their end" in found.reason


def test_model_recommends_no_more_workers_than_an_epoch_has_batches():
    found = from_model(replace(FIGURES, read_blocked_s=1.0), step_ms=0.0, epoch_batches=4)
    assert found.num_workers == 4
    assert "an epoch has no more batches" in found.reason


def test_model_does_not_limit_sleeping_to_the_cores():
    assert by_model(read_blocked_s=0.160, num_cpus=4).num_workers == 20


def test_recommendation_without_a_step_suggests_measuring_one():
    assert "--step-ms shows how few workers yours needs" in by_model(step_ms=0.0, trainer_s=0.001).sentence()
