"""`loader.progress()`, and other libraries' progress bars over a loader."""

from __future__ import annotations

import gc
import io
import re
import weakref
from typing import Any

import pytest
from rich.console import Console
from tqdm import tqdm

from shmload import Mix, ShmLoader
from shmload.modes import progress_bar
from tests.trace.trace_kit import Plain, Rows, Stream, run

MODES = pytest.mark.parametrize("seed", [1, None])


class Terminal(Console):
    """A terminal whose output can be read."""

    def __init__(self, is_terminal: bool = True) -> None:
        self.out = io.StringIO()
        super().__init__(file=self.out, force_terminal=is_terminal, width=120, color_system=None)

    @property
    def last(self) -> str:
        """Returns the bar as it was last drawn."""
        text = re.sub(r"\x1b\[[?0-9]*[a-zA-Z]|\r", "\n", self.out.getvalue())
        return [line for line in text.split("\n") if line.strip()][-1].strip()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Returns a terminal on which every batch is drawn."""
    monkeypatch.setattr("shmload.modes.progress_bar.LOOK_S", 0.0)
    return Terminal()


@MODES
@pytest.mark.parametrize("num_workers", [0, 1])
def test_bar_shows_batches_rate_and_waiting_and_yields_the_loaders_batches(
    seed: int | None, num_workers: int, terminal: Terminal
) -> None:
    with ShmLoader(Rows(), 8, num_workers=num_workers, seed=seed) as loader:
        assert [batch["y"].tolist() for batch in loader.progress("train", console=terminal)] == [
            batch["y"].tolist() for batch in ShmLoader(Rows(), 8, seed=seed)
        ]
    assert terminal.last.startswith("train ")
    assert "8/8" in terminal.last
    assert " samples/s, waiting " in terminal.last
    assert terminal.last.endswith("%")


@MODES
def test_resumed_bar_begins_at_the_position(seed: int | None, terminal: Terminal) -> None:
    first = ShmLoader(Rows(), 8, seed=seed)
    iterator = iter(first)
    for _ in range(5):
        next(iterator)
    resumed = ShmLoader(Rows(), 8, seed=seed)
    assert resumed.first_step == 0
    resumed.load_state_dict(first.state_dict())
    assert resumed.first_step == 5
    progress = resumed.progress(console=terminal)
    next(progress)
    assert "6/8" in terminal.last
    assert len(list(progress)) == 2
    assert "8/8" in terminal.last
    assert resumed.first_step == 0


@MODES
def test_bar_begins_at_zero_after_a_state_from_an_epoch_end(seed: int | None) -> None:
    first = ShmLoader(Rows(), 8, seed=seed)
    run(first)
    resumed = ShmLoader(Rows(), 8, seed=seed)
    resumed.load_state_dict(first.state_dict())
    assert resumed.first_step == 0
    assert run(resumed) == 8


def test_loader_without_a_length_has_a_bar_without_a_total(terminal: Terminal) -> None:
    assert len(list(ShmLoader(Stream(), 4).progress(console=terminal))) == 3
    assert "3/?" in terminal.last
    endless = ShmLoader(Mix([(Plain(), 1), (Plain(), 1)], stop="repeat"), 8, seed=1).progress(console=terminal)
    for _ in range(20):
        next(endless)
    assert "20/?" in terminal.last
    endless.close()  # type: ignore[attr-defined]  # a generator


def test_nothing_is_drawn_without_a_terminal() -> None:
    console = Terminal(is_terminal=False)
    assert len(list(ShmLoader(Rows(), 8, seed=1).progress(console=console))) == 8
    assert console.out.getvalue() == ""


def test_default_is_stderr_which_is_not_a_terminal_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(ShmLoader(Rows(), 8, seed=1).progress())) == 8
    assert capsys.readouterr() == ("", "")


def test_leaving_the_loop_restores_the_terminal(terminal: Terminal) -> None:
    for _ in ShmLoader(Rows(), 8, seed=1).progress(console=terminal):
        break
    gc.collect()
    assert terminal.out.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


def test_bar_keeps_no_batch_alive(terminal: Terminal) -> None:
    with ShmLoader(Rows(), 8, num_workers=1, seed=1) as loader:
        progress = loader.progress(console=terminal)
        batch: Any = next(progress)
        seen = weakref.ref(batch["y"])
        del batch
        next(progress)
        assert seen() is None
        progress.close()  # type: ignore[attr-defined]  # a generator


@MODES
def test_tqdm_shows_the_total_and_begins_at_a_states_position(seed: int | None) -> None:
    first = ShmLoader(Rows(), 8, seed=seed)
    with tqdm(first, file=io.StringIO()) as shown:
        for i, _ in enumerate(shown):
            if i == 4:
                state = first.state_dict()
    assert (shown.total, shown.n) == (8, 8)
    resumed = ShmLoader(Rows(), 8, seed=seed)
    resumed.load_state_dict(state)
    out = io.StringIO()
    with tqdm(resumed, initial=resumed.first_step, file=out) as shown:
        assert sum(1 for _ in shown) == 3
    assert (shown.total, shown.n) == (8, 8)
    assert "5/8" in out.getvalue()


class Halved(Plain):
    """A dataset whose `__getitems__` drops every second sample."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices if index % 2]


def half(batch: Any) -> Any:
    """Returns one row of a batch."""
    return [batch[0][:1], batch[1][:1]]


@MODES
@pytest.mark.parametrize(("after", "expected"), [(None, [4, 8, 10]), (half, [8, 16, 20])])
def test_bar_counts_delivered_samples_not_ordered_ones(
    seed: int | None, after: Any, expected: list[int], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def rate(since: Any, now: tuple[float, int, float]) -> str:
        seen.append(now[1])
        return ""

    monkeypatch.setattr(progress_bar, "_rate", rate)
    for _ in ShmLoader(Halved(20), 8, seed=seed, after_batch=after).progress(console=terminal):
        pass
    assert seen == expected
