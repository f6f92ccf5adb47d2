"""A progress bar over a loader's batches: batches of the total, samples/s, and the share of the time spent waiting.

The loop itself draws the bar, a few times a second, so no thread is needed. It appears on stderr, and only if that is a terminal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, TypeVar

from shmload._core.trainer import Order
from shmload.engine.delivery_log import DeliveryLog

T = TypeVar("T")

LOOK_S = 0.1  # seconds between two updates of the bar
NUM_LOOKS = 30  # updates over which samples/s and the share of waiting are averaged


def with_progress_bar(
    batches: Iterator[T],
    total: int | None,
    done: int,
    log: DeliveryLog,
    description: str,
    console: Any,
    count: Callable[[Order, Any], int],
) -> Iterator[T]:
    """Yield the batches of one pass while a bar is drawn.

    Args:
        batches: an iterator of the pass.
        total: batches of a whole pass, or None if that is unknown.
        done: batches of the pass that were delivered earlier.
        log: `log.last` is the order of the batch just yielded.
        description: the text before the bar.
        console: a `rich` console to draw on, or None for stderr.
        count: (order, batch) -> number of samples delivered.
    """
    # imported here because it is slow and few loaders show a bar
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True) if console is None else console
    title, rate = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[rate]}"))
    columns = title, BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), rate
    looks: deque[tuple[float, int, float]] = deque([(monotonic(), 0, 0.0)], maxlen=NUM_LOOKS)  # when, rows, waited
    rows, waited, due = 0, 0.0, 0.0
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total, completed=done, rate="")
        while True:
            began = monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                progress.update(task, completed=done)
                return
            now = monotonic()
            order = log.last
            assert order is not None
            done, rows, waited = done + 1, rows + count(order, batch), waited + now - began
            if now >= due:
                due = now + LOOK_S
                since = looks[0]
                looks.append((now, rows, waited))
                progress.update(task, completed=done, rate=_rate(since, looks[-1]), refresh=True)
            yield batch
            del batch  # the loop has its own reference: this one must not keep the slot


def _rate(since: tuple[float, int, float], now: tuple[float, int, float]) -> str:
    elapsed, rows, waited = (b - a for a, b in zip(since, now, strict=True))
    return f"{rows / elapsed:,.0f} samples/s, waiting {waited / elapsed:.0%}" if elapsed > 0 else ""
