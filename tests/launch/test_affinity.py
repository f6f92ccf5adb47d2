"""CPUs for ranks, on machines that hypothesis generates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload.launch.affinity import shares
from shmload.launch.topology import Core


@st.composite
def machines(draw: st.DrawFn) -> list[Core]:
    """Draws nodes of any number and size, with cores of one to four threads, numbered in any order."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    threads = [draw(st.lists(st.integers(1, 4), min_size=size, max_size=size)) for size in sizes]
    numbers = draw(st.permutations(range(sum(map(sum, threads)))))
    cores, used = [], 0
    for node, counts in enumerate(threads):
        for count in counts:
            cores.append(Core(node, tuple(sorted(numbers[used : used + count]))))
            used += count
    return sorted(cores)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Core], list[int | None]]:
    """Draws a machine, and for each rank the node that it should be near."""
    cores = draw(machines())
    return cores, draw(st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=12))


def by_core(cores: list[Core], share: tuple[int, ...]) -> list[Core]:
    return [core for core in cores if set(core.cpus) & set(share)]


@given(jobs())
def test_every_core_belongs_to_one_rank_with_all_its_threads(job: tuple[list[Core], list[int | None]]) -> None:
    cores, wanted = job
    found = shares(cores, wanted)
    assert len(wanted) == len(found)
    if len(cores) < len(wanted):
        assert set(found) == {()}
        return
    everything = [cpu for share in found for cpu in share]
    assert sorted(everything) == sorted(cpu for core in cores for cpu in core.cpus), "each CPU once"
    assert len(cores) == sum(len(by_core(cores, share)) for share in found), "no core is divided"


@given(jobs())
def test_shares_differ_by_one_core_at_most(job: tuple[list[Core], list[int | None]]) -> None:
    cores, wanted = job
    sizes = {len(by_core(cores, share)) for share in shares(cores, wanted)}
    if len(cores) >= len(wanted):
        assert sizes <= {len(cores) // len(wanted), len(cores) // len(wanted) + 1}


@given(jobs())
def test_rank_leaves_the_node_of_its_gpu_only_if_no_core_is_left(job: tuple[list[Core], list[int | None]]) -> None:
    cores, wanted = job
    if len(cores) < len(wanted):
        return
    found = [by_core(cores, share) for share in shares(cores, wanted)]
    nodes = {core.node for core in cores}
    for rank, node in enumerate(wanted):
        there = {core for core in cores if core.node == node}
        if there and any(core.node != node for core in found[rank]):
            neighbors = {core for other, near in enumerate(wanted) if near == node for core in found[other]}
            # a rank without a satisfiable wish may have been put there, too
            free = {core for other, near in enumerate(wanted) if near not in nodes for core in found[other]}
            assert there <= neighbors | free


def machine(*sizes: int) -> list[Core]:
    """Returns nodes of `sizes` single-threaded cores, numbered in order."""
    total = iter(range(sum(sizes)))
    return [Core(node, (next(total),)) for node, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("cores", "wanted", "expected"),
    [
        pytest.param(machine(4, 4), [None] * 2, [(0, 1, 2, 3), (4, 5, 6, 7)], id="a node each"),
        pytest.param(machine(2, 2), [1, 0], [(2, 3), (0, 1)], id="where their GPUs are"),
        pytest.param(machine(5, 5), [None] * 4, [(0, 1, 2), (3, 4), (5, 6, 7), (8, 9)], id="uneven, but no node is divided"),
        pytest.param(machine(2, 2), [0, 0], [(0, 1), (2, 3)], id="all GPUs on one node, no idle core"),
        pytest.param(machine(4), [None, 3], [(0, 1), (2, 3)], id="a node without an allowed core"),
        pytest.param(machine(1, 3), [None] * 2, [(1, 2), (0, 3)], id="a small node"),
        pytest.param(machine(1, 1), [None] * 3, [(), (), ()], id="fewer cores than ranks"),
        pytest.param(
            [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7))],
            [None] * 2,
            [(0, 1, 4, 5), (2, 3, 6, 7)],
            id="hyper-threads",
        ),
    ],
)
def test_known_machines(cores: list[Core], wanted: list[int | None], expected: list[tuple[int, ...]]) -> None:
    assert expected == shares(cores, wanted)
