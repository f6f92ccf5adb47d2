"""Workers of every kind read one copy: memory does not grow, pickles are tiny, and nothing is left behind."""

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
from shmload.formats.shared_bytes import SharedBytes
from shmload.shm import free_memory, segment, segment_group
from shmload.shm.names import SHM_DIR, process_stem
from tests.children import python
from tests.formats.shared_index.index_kit import Files, Photo, gone_within, growth_of_epoch, path_of

MIB = 1 << 20


def shmload_names() -> set[str]:
    return {name for name in os.listdir(SHM_DIR) if name.startswith(process_stem())}


def mappings(index: SharedIndex) -> list[str]:
    """Returns this process's mappings of an index's segment, from /proc."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if index._memory.reference.path in line]


@pytest.mark.slow(reason="starts workers, also by spawn and forkserver")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("loader", [DataLoader, ShmLoader])
@pytest.mark.parametrize("room", [True, False], ids=["shm", "memfd"])
def test_workers_of_every_start_method_read_the_index(
    loader: Any, method: str, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_index_can_be_used_as_a_dataset(loader: Any) -> None:
    rows = [{"path": path_of(i), "label": i} for i in range(20)]
    found: list[dict[str, Any]] = []
    for batch in loader(SharedIndex(rows), batch_size=5, num_workers=2):
        found += [{"path": path, "label": int(label)} for path, label in zip(batch["path"], batch["label"], strict=True)]
    assert found == rows


def test_pickle_contains_only_a_reference() -> None:
    index = SharedIndex([Photo(path_of(i), i) for i in range(5000)])
    data = pickle.dumps(index)
    assert len(data) < 1024
    other = pickle.loads(data)
    assert list(other) == list(index)
    assert other.columns == index.columns
    assert list(pickle.loads(pickle.dumps(other[::-7]))) == list(index[::-7])


def test_reference_to_a_deleted_index_is_an_error() -> None:
    index = SharedIndex(["a"])
    data = pickle.dumps(index)
    del index
    with pytest.raises(
        FileNotFoundError, match=r"the shared memory at /dev/shm/.* is gone: the process that created it has ended or released it"
    ):
        pickle.loads(data)


def test_path_that_now_belongs_to_another_index_is_an_error() -> None:
    first, second = SharedIndex(["a"]), SharedIndex(["b"])
    reference = first._memory.reference._replace(path=second._memory.reference.path)
    with pytest.raises(FileNotFoundError, match="is gone"):
        type(first._memory).attach(reference)


def test_memory_is_removed_with_the_last_view() -> None:
    before = shmload_names()
    index = SharedIndex(map(path_of, range(100)))
    view, column = index[3:], SharedIndex([1, 2]).column(0)
    assert len(shmload_names() - before) == 1  # the column keeps the memory, whose name was removed with the index
    del index
    gc.collect()
    assert len(shmload_names() - before) == 1
    assert view[0] == path_of(3)
    assert column.tolist() == [1, 2]
    del view
    gc.collect()
    assert shmload_names() == before


def test_failed_build_leaves_nothing() -> None:
    before = shmload_names(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(TypeError):
            SharedIndex(["a", 1])
    assert (shmload_names(), len(os.listdir("/proc/self/fd"))) == before


def test_descriptors_do_not_accumulate() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        SharedIndex(["a"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_accessible_only_to_its_user() -> None:
    index = SharedIndex(["a"])
    assert os.stat(index._memory.reference.path).st_mode & 0o777 == 0o600


def test_too_little_memory_is_an_error_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = shmload_names()
    monkeypatch.setattr(free_memory, "available_bytes", lambda *_: 0)
    with pytest.raises(
        MemoryError, match=r"an index of 1 entries needs [\d,]+ bytes, and this process may take \d+ more: free memory, or store"
    ):
        SharedIndex(["a" * 2 * segment.UNCHECKED_NBYTES])
    assert shmload_names() == before


@pytest.mark.parametrize("signal_number", [None, signal.SIGKILL], ids=["orderly", "killed"])
@pytest.mark.slow(reason="the owner is another process, which imports numpy")
def test_memory_is_removed_when_its_owner_ends(signal_number: int | None) -> None:
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
    assert gone_within([path], 60)


def test_attached_process_keeps_the_memory_after_its_owner_deletes_the_index() -> None:
    index = SharedIndex(map(path_of, range(100)))
    other = pickle.loads(pickle.dumps(index))
    del index
    gc.collect()
    assert other[99] == path_of(99)
    assert not os.path.exists(other._memory.reference.path)


def test_forked_child_neither_removes_nor_closes_the_index() -> None:
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


@pytest.mark.slow(reason="a worker reads 100,000 entries from each of three datasets")
def test_workers_do_not_grow_over_an_epoch() -> None:
    """Test with a tenth of the entries for which 10 MiB are allowed, and show with a list that growth would be noticed."""
    n = 100_000
    index = SharedIndex(map(path_of, range(n)))
    rows = SharedIndex((path_of(i), i) for i in range(n))
    assert growth_of_epoch(index) < 10 * MIB * n / 1_000_000
    assert growth_of_epoch(rows) < 10 * MIB * n / 1_000_000
    assert growth_of_epoch([path_of(i) for i in range(n)]) > 5 * MIB


@pytest.mark.slow(reason="makes an index of a million paths, and a worker reads it")
def test_worker_that_reads_a_million_paths_grows_by_less_than_10_mib() -> None:
    assert growth_of_epoch(SharedIndex(map(path_of, range(1_000_000)))) <= 10 * MIB


def test_every_mapping_is_read_only_and_of_one_file() -> None:
    index = SharedIndex(["a"])
    other = pickle.loads(pickle.dumps(index))
    found = mappings(index)
    assert len(found) == 2
    assert {line.split()[4] for line in found} == {str(other._memory.reference.inode[1])}
    assert {line.split()[1] for line in found} == {"r--s"}


def test_segment_group_is_removed_with_the_index() -> None:
    alive = len(segment_group._alive)
    index = SharedIndex(["a"])
    assert len(segment_group._alive) == alive + 1
    del index
    gc.collect()
    assert len(segment_group._alive) == alive


def test_memory_that_cannot_be_mapped_leaves_no_descriptor() -> None:
    index = SharedIndex(["a"])
    reference = index._memory.reference
    assert reference is not None
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="nbytes must be positive"):
        SharedBytes.attach(reference._replace(nbytes=0))
    assert before == len(os.listdir("/proc/self/fd"))
