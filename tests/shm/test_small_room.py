"""Rings in memfds: their paths contain descriptor numbers, which are reused when a slot has grown."""

from __future__ import annotations

from typing import Any

import pytest

from shmload import ShmLoader
from shmload.shm import segment
from tests.engine.tuning_kit import change
from tests.sharing.sharing_kit import run_ranks
from tests.shm.mount_kit import in_mount_namespace, needs_unshare, of_size
from tests.shm.small_room import BATCH, Growing, what_is_wrong

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "shm_free_bytes", lambda: 0)


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("seed", [None, 1], ids=["torch mode", "seed mode"])
def test_batches_are_correct_while_slots_grow_repeatedly(seed: int | None) -> None:
    assert what_is_wrong(Growing(120, 800), num_workers=3, seed=seed) == []


@pytest.mark.slow(reason="a trainer that imports torch in its own mount namespace")
@needs_unshare
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(("size", "kilobytes"), [("64m", 60), ("512k", 1), ("0", 1)])
def test_growing_batches_are_correct_in_a_small_dev_shm(method: str, size: str, kilobytes: int) -> None:
    mount = of_size(size) if size != "0" else of_size("4k,ro")
    done = in_mount_namespace(mount, "-m", "tests.shm.small_room", method, str(kilobytes))
    assert done.stdout == "right\n", done.stderr[-2000:]


def read_growing(rank: int) -> list[str]:
    return what_is_wrong(Growing(60, 800), num_workers=2, seed=1, shuffle=False, rank=0, world_size=1, share="node")


@pytest.mark.usefixtures("no_room")
def test_batches_of_a_shared_ring_are_correct_in_other_ranks() -> None:
    assert [(outcome.text, outcome.given) for outcome in run_ranks(read_growing)] == [("", [])] * 2


class Wide:
    """Samples that fill a quarter of a slot of 64 KiB, written in place."""

    schema = {"x": ("uint8", (1 << 14,))}

    def __len__(self) -> int:
        return 400

    def read_into(self, index: int, out: Any) -> None:
        out["x"][:] = index % 251 + 1


@pytest.mark.usefixtures("no_room")
def test_parked_slots_are_delivered_after_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmload.engine.tuning.autotune.WINDOW_S", 1e9)  # the test itself changes the number of workers
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", "4")
    monkeypatch.setattr("shmload.engine.tuning.autotune.first_workers", lambda: 1)
    loader: Any = ShmLoader(Wide(), BATCH, seed=2, num_workers="auto", prefetch_factor="auto")
    with loader:
        for number, batch in enumerate(loader):
            expected = [index % 251 + 1 for index in range(BATCH * number, BATCH * (number + 1))]
            assert (batch["x"].amin(1).tolist(), batch["x"].amax(1).tolist()) == (expected, expected)
            change(loader, *((4, 4) if number % 16 < 8 else (1, 1)))
            del batch
