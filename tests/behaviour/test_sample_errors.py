"""Exceptions of a map-style dataset, its collate_fn and worker_init_fn: their type and text, and which batch follows."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import WORKERS, ErrorSummary, Failing, Numbers, error_text, outcomes, raised, same_as_torch


class NeedsTwo(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)


class NeedsKeyword(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class WithMessage(Exception):
    """An exception whose text torch passes as `message`."""

    message = "set on the class"

    def __init__(self, message: str, code: int = 3) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class WithMessageUnnamed(Exception):
    """An exception with a `message` attribute but no such argument."""

    message = "set on the class"


class OfKeyError(KeyError):
    pass


class Silent(Exception):
    def __str__(self) -> str:
        return ""


ERRORS = [
    ValueError("wrong"),
    ValueError(),
    ValueError("two\nlines"),
    KeyError("key"),
    OfKeyError("key"),
    IndexError("far"),
    OSError(2, "gone", "file"),
    FileNotFoundError("gone"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
    NotImplementedError(),
    MemoryError("full"),
    AssertionError("not so"),
    RecursionError("deep"),
    NeedsTwo(1, 2),
    NeedsKeyword(code=4),
    WithMessage("wrong"),
    Silent("nothing"),
    UserWarning("as an error"),
    StopIteration("early"),
    StopAsyncIteration("early"),
    ConnectionResetError("cut"),
    TimeoutError("late"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}({error.args!r})"[:40])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_exception_of_a_sample_has_torchs_type_and_text(error: Exception, num_workers: int) -> None:
    found = same_as_torch(lambda kind: outcomes(iter(kind(Failing(error), batch_size=2, num_workers=num_workers))))
    if not isinstance(error, StopIteration):
        assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]]
    if num_workers and not isinstance(error, (StopIteration, Silent)):
        assert f"Caught {type(error).__name__} in DataLoader worker process 1." in found[1].first


@WORKERS
def test_stop_iteration_of_a_sample_ends_a_for_loop_and_next_continues(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        stream = iter(kind(Failing(StopIteration("early")), batch_size=2, num_workers=num_workers))
        first = [batch.tolist() for batch in stream]
        return first, [batch.tolist() for batch in stream], [batch.tolist() for batch in stream]

    assert same_as_torch(program) == ([[0, 1]], [[4, 5], [6, 7]], [])


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="torch's own reraise fails; shmload raises RuntimeError with the sample's text"
)
@pytest.mark.parametrize("error", [WithMessageUnnamed("x"), ExceptionGroup("several", [ValueError("a")])], ids=type)
def test_exception_that_cannot_be_rebuilt_is_a_runtime_error(error: Exception) -> None:
    found = same_as_torch(lambda kind: outcomes(iter(kind(Failing(error), num_workers=1))))
    assert found[3].kind is TypeError


def test_key_error_keeps_its_lines() -> None:
    def program(kind: Any) -> Any:
        stream = iter(kind(Failing(KeyError("key")), batch_size=4, num_workers=1))
        try:
            next(stream)
        except KeyError as error:
            error.__traceback__ = None
            return str(error).count("\n") > 3, repr(error.args[0]) == str(error), str(error).splitlines()[1]
        return None

    assert same_as_torch(program) == (True, True, "Original Traceback (most recent call last):")


def test_traceback_in_the_text_names_the_line_of_the_dataset() -> None:
    for kind in (DataLoader, ShmLoader):
        text = error_text(lambda kind=kind: next(iter(kind(Failing(ValueError("x")), batch_size=4, num_workers=1))))
        assert "\nOriginal Traceback (most recent call last):\n" in text
        assert "in __getitem__\n    raise self.error\nValueError: x" in text


def test_chained_exception_has_its_cause_in_the_text() -> None:
    class Chained(Numbers):
        def __getitem__(self, index: int) -> int:
            try:
                return {}[index]
            except KeyError as error:
                raise ValueError("no such sample") from error

    for kind in (DataLoader, ShmLoader):
        text = error_text(lambda kind=kind: next(iter(kind(Chained(), num_workers=1))))
        parts = ["Caught ValueError", "KeyError: 0", "direct cause of", "ValueError: no such sample"]
        assert sorted(map(text.index, parts)) == [*map(text.index, parts)]


def test_exception_that_cannot_be_pickled_is_reported() -> None:
    class Local(Exception):  # torch's own worker cannot send this type, and its trainer blocks forever
        pass

    found = outcomes(iter(ShmLoader(Failing(Local("here")), batch_size=4, num_workers=1)))
    assert [ErrorSummary(RuntimeError, *found[0][1:]), [4, 5, 6, 7]] == found
    assert found[0].first == "Caught RuntimeError in DataLoader worker process 0."
    assert found[0].last.endswith("Local: here")


def test_exception_with_unpicklable_contents_keeps_its_type() -> None:
    error = ValueError("held", threading.Lock())
    assert same_as_torch(lambda kind: outcomes(iter(kind(Failing(error), batch_size=4, num_workers=1))))[0].kind is ValueError


def broken_collate(samples: list[Any]) -> Any:
    if 3 in samples:
        raise ZeroDivisionError("collate")
    return samples


@WORKERS
def test_exception_of_collate_fn_loses_only_that_batch(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        return outcomes(iter(kind(Numbers(8), batch_size=2, num_workers=num_workers, collate_fn=broken_collate)))

    found = same_as_torch(program)
    assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]]
    assert found[1].kind is ZeroDivisionError


@WORKERS
def test_error_for_samples_that_cannot_be_stacked_is_torchs(num_workers: int) -> None:
    for samples in ([[1], [1, 2]], [{"a": 1}, {"b": 1}], [None, None], [1, "x"], [object(), 1]):
        same_as_torch(lambda kind, samples=samples: outcomes(iter(kind(samples, batch_size=2, num_workers=num_workers))))


def init_fails(worker_id: int) -> None:
    if worker_id == 1:
        raise OSError(f"init of {worker_id}")


def test_exception_of_worker_init_fn_is_raised_with_that_workers_first_batch() -> None:
    def program(kind: Any) -> Any:
        stream = iter(kind(Numbers(8), batch_size=2, num_workers=2, worker_init_fn=init_fails))
        return outcomes(stream)[:3]

    found = same_as_torch(program)
    assert [found[0], found[2]] == [[0, 1], [4, 5]]
    assert found[1].first == "Caught OSError in DataLoader worker process 1."


def test_batches_after_a_failed_worker_init_fn_fail() -> None:
    for kind in (DataLoader, ShmLoader):
        found = outcomes(iter(kind(Numbers(8), batch_size=2, num_workers=2, worker_init_fn=init_fails)))
        assert len(found) == 4
        assert isinstance(found[3], ErrorSummary)


class FailingSampler:
    """A sampler that raises at its third index or batch."""

    def __init__(self, whole_batches: bool) -> None:
        self.whole_batches = whole_batches

    def __iter__(self) -> Any:
        yield from ([[0, 1], [2, 3]] if self.whole_batches else [0, 1])
        raise LookupError("sampler")


@WORKERS
@pytest.mark.parametrize("option", ["sampler", "batch_sampler"])
@pytest.mark.parametrize("prefetch_factor", [1, 4])
def test_exception_of_a_sampler_is_raised_when_torch_raises_it(option: str, num_workers: int, prefetch_factor: int) -> None:
    def program(kind: Any) -> Any:
        more: dict[str, Any] = {"prefetch_factor": prefetch_factor, "num_workers": 2} if num_workers else {}
        loader = kind(Numbers(8), **{option: FailingSampler(option == "batch_sampler")}, **more)
        try:
            stream = iter(loader)
        except LookupError as error:
            return "at iter", error
        return outcomes(stream)

    same_as_torch(program)


class UnstartableSampler(FailingSampler):
    def __iter__(self) -> Any:
        raise LookupError("sampler")


@WORKERS
def test_exception_in_a_samplers_iter_is_raised_when_torch_raises_it(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        return raised(lambda: next(iter(kind(Numbers(8), sampler=UnstartableSampler(False), num_workers=num_workers))))

    assert same_as_torch(program) == ErrorSummary(LookupError, "sampler", "sampler")


def test_warning_turned_into_an_error_in_a_worker_is_raised() -> None:
    class Warning_(Numbers):  # noqa: N801  # a dataset that warns
        def __getitem__(self, index: int) -> int:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.warn("careful", RuntimeWarning, stacklevel=1)
            return index

    found = same_as_torch(lambda kind: outcomes(iter(kind(Warning_(2), num_workers=1))))
    assert [error.kind for error in found] == [RuntimeWarning] * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_after_an_exception_are_complete(persistent: bool) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Failing(ValueError("x")), batch_size=2, num_workers=2, persistent_workers=persistent)
        for _ in range(3):
            try:
                for _ in loader:
                    pass
            except ValueError as error:
                error.__traceback__ = None
        return outcomes(iter(loader))

    assert len(same_as_torch(program)) == 4


def test_failing_sample_is_read_in_a_worker() -> None:
    class Pid(Numbers):
        def __getitem__(self, index: int) -> int:
            raise ValueError(f"pid {os.getpid()}")

    for kind in (DataLoader, ShmLoader):
        text = error_text(lambda kind=kind: next(iter(kind(Pid(), num_workers=1))))
        assert "ValueError: pid" in text
        assert f"pid {os.getpid()}\n" not in text
