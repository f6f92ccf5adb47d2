"""Workers of every kind read one copy: nothing grows, next to nothing is pickled, nothing stays."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shmload import SharedIndex, ShmLoader
from shmload.shm import free_memory, segment, segment_group
from shmload.shm.names import SHM_DIR, process_stem
from tests.children import python
from tests.formats.shared_index.index_kit import Files, Photo, gone_within, growth_of_epoch, path_of

MIB = 1 << 20


def names_of_ours() -> set[str]:
    return {name for name in os.listdir(SHM_DIR) if name.startswith(process_stem())}


def mappings(index: SharedIndex) -> list[str]:
    """This process's mappings of an index's segment, as the kernel tells them."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if index._memory.reference.path in line]


@pytest.mark.slow(reason="starts workers, by spawn and forkserver, too")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("loader", [DataLoader, ShmLoader])
@pytest.mark.parametrize("room", [True, False], ids=["shm", "memfd"])
def test_workers_of_every_kind_read_it(loader: Any, method: str, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not room:
        monkeypatch.setattr(segment, "shm_free_bytes", lambda: 0)
    files = Files(40)
    monkeypatch.undo()
    found: list[tuple[str, int]] = []
    for paths, numbers in loader(files, batch_size=8, num_workers=1, multiprocessing_context=method):
        found += zip(paths, numbers.tolist(), strict=True)
    assert found == [(path_of(i), i) for i in range(40)]


@pytest.mark.slow(reason="starts two workers")
@pytest.mark.parametrize("loader", [DataLoader, ShmLoader])
def test_an_index_is_a_dataset_by_itself(loader: Any) -> None:
    rows = [{"path": path_of(i), "label": i} for i in range(20)]
    found: list[dict[str, Any]] = []
    for batch in loader(SharedIndex(rows), batch_size=5, num_workers=2):
        found += [{"path": path, "label": int(label)} for path, label in zip(batch["path"], batch["label"], strict=True)]
    assert found == rows


def test_pickled_it_says_only_where_it_is() -> None:
    index = SharedIndex([Photo(path_of(i), i) for i in range(5000)])
    data = pickle.dumps(index)
    assert len(data) < 1024
    other = pickle.loads(data)
    assert list(other) == list(index)
    assert other.columns == index.columns
    assert list(pickle.loads(pickle.dumps(other[::-7]))) == list(index[::-7])


def test_a_reference_to_what_is_gone_says_so() -> None:
    index = SharedIndex(["a"])
    data = pickle.dumps(index)
    del index
    with pytest.raises(
        FileNotFoundError, match=r"the shared memory at /dev/shm/.* is gone: the process that created it has ended or released it"
    ):
        pickle.loads(data)


def test_a_way_that_leads_elsewhere_by_now_is_not_taken() -> None:
    first, second = SharedIndex(["a"]), SharedIndex(["b"])
    way = first._memory.reference._replace(path=second._memory.reference.path)
    with pytest.raises(FileNotFoundError, match="is gone"):
        type(first._memory).attach(way)


def test_nothing_stays_after_the_last_view() -> None:
    before = names_of_ours()
    index = SharedIndex(map(path_of, range(100)))
    view, column = index[3:], SharedIndex([1, 2]).column(0)
    assert len(names_of_ours() - before) == 1  # the column keeps its memory, whose name has gone with the index
    del index
    gc.collect()
    assert len(names_of_ours() - before) == 1
    assert view[0] == path_of(3)
    assert column.tolist() == [1, 2]
    del view
    gc.collect()
    assert names_of_ours() == before


def test_nothing_stays_of_an_index_that_could_not_be_built() -> None:
    before = names_of_ours(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(TypeError):
            SharedIndex(["a", 1])
    assert (names_of_ours(), len(os.listdir("/proc/self/fd"))) == before


def test_descriptors_and_names_do_not_pile_up() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        SharedIndex(["a"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_memory_is_private_to_its_user() -> None:
    index = SharedIndex(["a"])
    assert os.stat(index._memory.reference.path).st_mode & 0o777 == 0o600


def test_too_little_memory_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names_of_ours()
    monkeypatch.setattr(free_memory, "available_bytes", lambda *_: 0)
    with pytest.raises(
        MemoryError, match=r"an index of 1 entries needs 128 bytes, and this process may take \d+ more: free memory, or store"
    ):
        SharedIndex(["a"])
    assert names_of_ours() == before


@pytest.mark.parametrize("signal_number", [None, signal.SIGKILL], ids=["orderly", "killed"])
@pytest.mark.slow(reason="the owner is a process of its own, which imports numpy")
def test_nothing_stays_when_its_owner_ends(signal_number: int | None) -> None:
    child = python(
        "from shmload import SharedIndex; index = SharedIndex(map(str, range(1000)));"
        "print(index._memory.reference.path, flush=True); input()"
    )
    assert child.stdout is not None
    path = Path(child.stdout.readline().strip())
    assert path.exists()
    if signal_number is not None:
        os.kill(child.pid, signal_number)
    _, stderr = child.communicate("\n")
    assert stderr == ""
    assert gone_within([path], 2)


def test_an_attached_process_keeps_what_its_owner_lets_go() -> None:
    index = SharedIndex(map(path_of, range(100)))
    other = pickle.loads(pickle.dumps(index))
    del index
    gc.collect()
    assert other[99] == path_of(99)
    assert not os.path.exists(other._memory.reference.path)


def test_a_forked_child_neither_removes_nor_closes() -> None:
    index = SharedIndex(["a", "b"])
    pid = os.fork()
    if pid == 0:
        memory = index._memory
        del index
        gc.collect()
        del memory
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert pickle.loads(pickle.dumps(index))[1] == "b"


@pytest.mark.slow(reason="a worker reads 100,000 entries of each of three datasets")
def test_workers_do_not_grow_over_an_epoch() -> None:
    """At a tenth of the size for which 10 MiB are allowed; a list of the same entries shows that growth would be seen."""
    n = 100_000
    index = SharedIndex(map(path_of, range(n)))
    rows = SharedIndex((path_of(i), i) for i in range(n))
    assert growth_of_epoch(index) < 10 * MIB * n / 1_000_000
    assert growth_of_epoch(rows) < 10 * MIB * n / 1_000_000
    assert growth_of_epoch([path_of(i) for i in range(n)]) > 5 * MIB


@pytest.mark.slow(reason="makes an index of a million paths, and a worker reads it")
def test_a_million_paths_do_not_grow_a_worker_by_10_mib() -> None:
    assert growth_of_epoch(SharedIndex(map(path_of, range(1_000_000)))) <= 10 * MIB


def test_every_mapping_is_of_one_file_and_read_only() -> None:
    index = SharedIndex(["a"])
    other = pickle.loads(pickle.dumps(index))
    found = mappings(index)
    assert len(found) == 2
    assert {line.split()[4] for line in found} == {str(other._memory.reference.inode[1])}
    assert {line.split()[1] for line in found} == {"r--s"}


def test_its_group_lives_only_with_it() -> None:
    alive = len(segment_group._alive)
    index = SharedIndex(["a"])
    assert len(segment_group._alive) == alive + 1
    del index
    gc.collect()
    assert len(segment_group._alive) == alive
