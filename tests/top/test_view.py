"""The view of a look: its content, at any width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from shmload.engine.stats import describe
from shmload.tools.top.bars import sparkline
from shmload.tools.top.picture import picture
from shmload.tools.top.quantities import nbytes_text, number, seconds
from shmload.tools.top.watch import totals
from tests.top.live_kit import SECOND, slot, snapshot_with, worker

ORDERED, LEASED = 2, 3


def loader(**words: Any) -> dict[str, Any]:
    """Returns a report as a Watch makes it, over an interval of a second."""
    of_process = {"pid": 42, "owner_pid": 42, "parent_pid": 7, "is_stopped": False, "command": "python train.py", "kind": "shm"}
    given = {name: words.pop(name) for name in list(words) if name in of_process}
    seen = snapshot_with(11, **words)
    report = describe(seen, snapshot_with(10, workers=[worker()] * len(seen["workers"])))
    for one in report["workers"]:
        one.update(is_stopped=False, rss_bytes=234_000_000, private_bytes=1)
    ranks = {name: seen[name] for name in ("rank", "world_size")}
    return {**of_process, **given, **ranks, **report, "history": [1.0, 2.0, 4.0]}


def look(*loaders: dict[str, Any], **parts: Any) -> dict[str, Any]:
    leftovers = {"num": 0, "nbytes": 0, "pids": []}
    return {"loaders": list(loaders), "totals": totals(list(loaders)), "leftovers": leftovers, "unreadable": [], **parts}


def drawn(found: dict[str, Any], width: int = 120) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(picture(found, width))
    return file.getvalue()


def busy_loader(**words: Any) -> dict[str, Any]:
    under_way = slot(state=ORDERED, order=5, epoch=1, step=7, nrows=8, num_chunks=4, num_final=3, num_claimed=1, claims=[(1, 6, 8)])
    done = slot(state=ORDERED, order=6, num_chunks=1, num_final=1)
    workers = [
        worker(pid=100, num_samples=300, busy_ns=SECOND // 4),
        worker(pid=101, now=5 << 16 | 6, index=4711, since_ns=9 * SECOND, claimed_ns=9 * SECOND, num_restarts=2),
    ]
    slots = [slot(), slot(state=LEASED, payload_nbytes=1 << 20), under_way, done]
    counted = {
        "batches": 50,
        "samples": 3200,
        "nbytes": 64_000_000,
        "epoch": 1,
        "step": 6,
        "num_steps": 100,
        "wait_ns": SECOND // 2,
    }
    return loader(**{"workers": workers, "slots": slots, **counted, **words})


def test_view_shows_all_figures_of_a_loader() -> None:
    text = drawn(look(busy_loader(num_bad_samples=3)))
    for words in (
        "1 loader, 2 workers  3,200 samples/s  64 MB/s  1.05 MB in rings",
        "pid 42 · Rows by read_into · seed mode · python train.py",
        "epoch 1 batch 7/100  3,200 samples/s  64 MB/s  50.0 batches/s  ▃▅█",
        " 1 held 1 ready 1 filling 1 free (next: 3/4 chunks)  1.05 MB  3 bad samples",
        "bottleneck is decode: trainer waits 50 % workers wait 19 % free 31 %",
        "remedy: use more workers, if there are idle cores, or cheaper transforms",
        "worker  pid  state     sample    for   busy  samples/s  restarts  batch  foreign     RSS",
        "     0  100  waiting        -      -   25 %        300         -  -            -  234 MB",
        "     1  101  decoding    4711  2.0 s  100 %        0.0         2  1:7          -  234 MB",
    ):
        assert words in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_lines_fit_the_terminal_without_wrapping(width: int) -> None:
    found = look(busy_loader(command="python " + "long " * 60), busy_loader())
    lines = drawn(found, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == 1 + 2 * (2 + 4 + 3)


def test_eighty_columns_show_who_waits_and_what_each_worker_does() -> None:
    text = drawn(look(busy_loader()), 80)
    assert "bottleneck is decode: trainer waits 50 %" in text
    assert "decoding    4711  2.0 s  100 %        0.0         2" in text


def test_a_loader_that_keeps_up_has_no_remedy() -> None:
    assert "remedy" not in drawn(look(busy_loader(wait_ns=0)))


def test_hung_loader_is_shown_with_the_sample_it_waits_for() -> None:
    found = busy_loader(waiting_since_ns=4 * SECOND, awaited=3)
    assert "hung: it has waited 7.0 s for batch 7 of epoch 1: worker 1 (pid 101) is on sample 4711 for 2.0 s" in drawn(look(found))
    found["workers"][1]["is_stopped"] = True
    assert "worker 1 (pid 101) is on sample 4711 and stopped" in drawn(look(found))
    nobody = loader(waiting_since_ns=4 * SECOND, awaited=1, slots=[slot(state=ORDERED, order=1, num_chunks=1, num_open=1)])
    assert "hung: it has waited 7.0 s for batch 0 of epoch 0, which no worker has taken" in drawn(look(nobody))
    assert "hung: it has waited 7.0 s for a batch, which" in drawn(look(loader(waiting_since_ns=4 * SECOND)))


def test_ranks_of_one_run_have_one_line_each() -> None:
    ranks = [busy_loader(rank=rank, world_size=2, wait_ns=rank * SECOND // 2) for rank in (0, 1)]
    text = drawn(look(*ranks, busy_loader()))
    assert "ranks 0, 1 of 2  6,400 samples/s  128 MB/s; rank 1 waits most: 50 %" in text
    assert "pid 42 rank 1/2 ·" in text
    assert "3 loaders, 6 workers  9,600 samples/s" in text


def test_slowest_of_many_workers_are_shown() -> None:
    claims = [(w, w, w + 1) for w in range(20)]
    held = slot(state=ORDERED, order=1, nrows=20, num_chunks=20, num_claimed=20, claims=claims)
    workers = [worker(pid=100 + w, now=1 << 16 | w, since_ns=(10 - w // 4) * SECOND) for w in range(20)]
    text = drawn(look(loader(workers=workers, slots=[held])))
    assert "and 4 more workers" in text
    assert [f"  {100 + w}  decoding" in text for w in range(20)] == [False] * 4 + [True] * 16


def test_missing_loaders_are_mentioned() -> None:
    assert "no loader is running" in drawn(look())
    text = drawn(look(leftovers={"num": 2, "nbytes": 3_000_000, "pids": [1, 2]}))
    assert "2 dead loaders left 2.9 MiB: shmload clean" in text
    text = drawn(look(leftovers={"num": 1, "nbytes": 3000, "pids": [1]}, unreadable=[{"path": "/dev/shm/x", "why": "so"}]))
    assert "1 dead loader left 2.9 KiB: shmload clean" in text
    assert "/dev/shm/x cannot be read: so" in text


def test_loaders_of_other_containers_and_new_ones_are_marked() -> None:
    text = drawn(look(loader(pid=None, num_steps=5, workers=[worker(started_ns=0, pid=0)])))
    assert "pid 42 of another container" in text
    assert "no batch yet of 5" in text
    assert "starting" in text
    assert " stopped · Rows" in drawn(look(loader(is_stopped=True)))


def test_square_brackets_in_names_are_not_markup() -> None:
    assert "[red]x[/]" in drawn(look(loader(dataset_name="[red]x[/]", command="[/]")))


@pytest.mark.parametrize(
    ("value", "told"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_600, "1,000 kB"), (2_000_000, "2 MB"), (7e13, "70 TB")]
)
def test_bytes_are_shown_in_units(value: float, told: str) -> None:
    assert told == nbytes_text(value)


def test_times_and_numbers_have_readable_digits() -> None:
    assert [seconds(value) for value in (0.0123, 1.26, 600)] == ["12 ms", "1.3 s", "10 min"]
    assert [number(value) for value in (0, 12.34, 1234.5)] == ["0.0", "12.3", "1,234"]


def test_sparkline_has_one_character_per_value() -> None:
    assert sparkline([0, 1, 8]) == "▁▂█"
    assert (sparkline([0, 0]), sparkline([])) == ("▁▁", "")


def test_cluster_pool_has_a_line_and_a_column() -> None:
    far = [worker(node="0123456789a", nbytes_fetched=3_000_000, nbytes_remote=1_000_000, num_actors=2), worker()]
    text = drawn(look(loader(workers=far)))
    assert "ray   1 actor on 1 node  3 MB/s from the object store, of these 1 MB/s over the network  1 actor replaced" in text
    assert "node" in text
    assert "0123456789a" in text
    assert "node" not in drawn(look(loader()))


def test_stages_of_a_pipeline_have_one_line() -> None:
    stages = [{"name": "Items(list of 3)", "where": "workers"}, {"name": "Map(a\x1b[2J)", "where": "trainer"}]
    text = drawn(look({**busy_loader(), "stages": stages}))
    assert "stages Items(list of 3) → 'Map(a\\x1b[2J)' in the trainer" in text
    assert "stages" not in drawn(look({**busy_loader(), "stages": None}))
