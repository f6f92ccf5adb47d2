"""Arguments of Ray actors as workers are checked before anything starts. None of these tests needs Ray."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from shmload import Ray, ShmLoader


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"backend": "threads"}, 'backend must be "process", "thread", "auto", "ray" or a shmload.Ray; got \'threads\''),
        ({"backend": "ray"}, 'backend="ray" needs num_workers, the number of its actors (`ray status` shows the CPUs); got 0'),
        (
            {"backend": "ray", "num_workers": "auto"},
            "backend=\"ray\" needs num_workers, the number of its actors (`ray status` shows the CPUs); got 'auto'",
        ),
        (
            {"backend": "ray", "num_workers": 1, "sample_timeout_s": 1.0},
            'sample_timeout_s with backend="ray" needs a seed: in torch mode the random streams of an actor end with it',
        ),
        (
            {"backend": Ray(num_local_workers=1)},
            'backend="ray" needs num_workers, the number of its actors (`ray status` shows the CPUs); got 0',
        ),
    ],
)
def test_incompatible_arguments_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ShmLoader([1, 2, 3], **keywords)
    assert message == str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": None}, 'address must be the address of the cluster\'s head, or "auto"; got None'),
        ({"num_local_workers": "auto"}, "num_local_workers must be an int of at least 0; got 'auto'"),
        ({"num_local_workers": -1}, "num_local_workers must be an int of at least 0; got -1"),
        ({"connect_timeout_s": 0}, "connect_timeout_s must be a positive number of seconds; got 0"),
        ({"connect_timeout_s": None}, "connect_timeout_s must be a positive number of seconds; got None"),
        ({"ship_timeout_s": -1.0}, "ship_timeout_s must be a positive number of seconds; got -1.0"),
        (
            {"actor_options": {"name": "mine"}},
            "actor_options must be a mapping of what Ray's .options takes, without what the loader sets itself (concurrency_groups, "
            "get_if_exists, lifetime, max_concurrency, max_restarts, max_task_retries, name); got {'name': 'mine'}",
        ),
    ],
)
def test_invalid_option_of_ray_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Ray(**options)
    assert str(caught.value) == message


def test_error_without_ray_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError) as caught:
        ShmLoader([1, 2, 3], num_workers=1, backend="ray")
    assert str(caught.value) == 'backend="ray" needs Ray, which is not installed: pip install "shmload[ray]"'


def test_more_actors_than_local_cpus_do_not_warn(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert ShmLoader([1, 2, 3], num_workers=2, backend="ray").num_workers == 2
    assert list(recwarn) == []
    with pytest.warns(UserWarning, match="This DataLoader will create 2 worker processes in total"):
        ShmLoader([1, 2, 3], num_workers=2)
