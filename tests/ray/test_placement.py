"""The node on which each worker's actor is placed."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload.ray.placement import Node, alive_nodes, options_of, place

NODES = st.lists(st.builds(Node, st.uuids().map(str), st.integers(0, 5), st.booleans()), min_size=1, unique_by=lambda n: n.node_id)


def test_nodes_without_a_gpu_are_filled_first_and_then_all_in_turn() -> None:
    nodes = [Node("a", 2, False), Node("b", 1, False), Node("gpu", 2, True)]
    assert place(nodes, 7) == ["a", "b", "a", "gpu", "gpu", "a", "b"]
    assert place(nodes, 2, first=1) == ["b", "a"]


def test_cluster_without_free_cpus_is_used() -> None:
    assert place([Node("head", 0, False)], 2) == ["head", "head"]


def test_dead_nodes_are_skipped_and_a_cluster_without_nodes_is_an_error() -> None:
    described = [
        {"NodeID": "dead", "Alive": False, "Resources": {}},
        {"NodeID": "b", "Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}},
        {"NodeID": "a", "Alive": True, "Resources": {}},
    ]
    assert alive_nodes(described, going={"a"}) == [Node("b", 2, True)]
    assert alive_nodes(described) == [Node("a", 0, False), Node("b", 2, True)]
    with pytest.raises(ValueError, match="the Ray cluster has no live node"):
        place([], 1)


def test_workers_are_placed_in_proportion_to_each_nodes_data_and_then_elsewhere() -> None:
    nodes = [Node("a", 4, False), Node("b", 2, False), Node("c", 1, False)]
    assert place(nodes, 8, node_nbytes={"a": 300, "b": 200}) == ["a", "b", "a", "b", "a", "a", "c", "a"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, whose strategies it makes")
def test_actor_without_room_may_use_any_node_and_one_without_cpus_keeps_its_node() -> None:
    a, b = "a" * 56, "b" * 56  # as long as Ray's node ids
    nodes = [Node(a, 2, False), Node(b, 1, False)]
    *fitting, last = options_of(nodes, 4, {})
    assert [one["num_cpus"] for one in fitting] == [1] * 3
    assert [one["scheduling_strategy"].node_id for one in fitting] == [a, b, a]
    assert {one["scheduling_strategy"].soft for one in fitting} == {True}
    assert last == {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
    put = [one["scheduling_strategy"] for one in options_of(nodes, 4, {"num_cpus": 0})]
    assert [(strategy.node_id, strategy.soft) for strategy in put] == [(a, False), (b, False), (a, False), (a, False)]
    gpus = {"num_cpus": 0, "resources": {"decoder": 1}}
    assert options_of(nodes, 2, gpus) == [{**gpus, "scheduling_strategy": "SPREAD"}] * 2  # not every node has a decoder
    given = {"num_cpus": 2, "scheduling_strategy": "SPREAD"}
    assert options_of(nodes, 2, given) == [given] * 2


@given(NODES, st.integers(0, 40), st.integers(0, 100))
def test_load_is_even_among_nodes_of_a_kind(nodes: list[Node], num_workers: int, first: int) -> None:
    placed = Counter(place(nodes, num_workers, first))
    assert placed.total() == num_workers
    cpus = {node.node_id: node.num_cpus for node in nodes}
    if 0 < num_workers <= sum(cpus.values()):
        assert all(placed[node_id] <= cpus[node_id] for node_id in cpus)
