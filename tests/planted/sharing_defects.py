"""Defects in the memory that ranks of a node share, and the tests that detect them."""

from __future__ import annotations

from tests.planted.operations import Replace, omit
from tests.planted.planting import Defect

WORDS = "tests/sharing/test_words.py::"
SAME = "tests/sharing/test_same_batches.py::"
PARTINGS = "tests/sharing/test_partings.py::"
BALANCING = "tests/sharing/test_balancing.py::"

SHARING_DEFECTS = [
    Defect(
        "G1",
        "ranks that share a ring may have different orders of one type",
        "_must_be_equal",
        Replace("order.identity", "type(order).__name__"),
        ("tests/sharing/test_gathering.py::test_orders_with_different_parameters_are_refused",),
    ),
    Defect(
        "G1",
        "a slot that a follower holds is reused",
        "src/share.h",
        Replace("        if (atomic_load_explicit(shml_hold(share, rank, slot), memory_order_acquire)) return 0;\n", ""),
        (f"{WORDS}test_slot_held_by_a_follower_is_not_reused",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "a batch that a follower has not reached is overwritten",
        "src/share.h",
        Replace(
            "memory_order_acquire) <= round)\n            return 0;\n", "memory_order_acquire) < round)\n            return 0;\n"
        ),
        (f"{WORDS}test_slot_is_reused_only_when_every_rank_is_done_with_it",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "the leader waits for batches of an abandoned round",
        "src/share.h",
        Replace("SHML_REPORT_ROUND), memory_order_acquire) <= round)", "SHML_REPORT_ROUND), memory_order_acquire) <= round + 1)"),
        (f"{WORDS}test_round_that_followers_have_left_is_not_awaited",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "a batch that its leader must order again is taken for ready",
        "src/share.h",
        Replace(" || atomic_load_explicit(&ring->slots[slot].repack, memory_order_acquire) == order) return", ") return"),
        (f"{WORDS}test_rewritten_order_keeps_its_position_and_is_ready_once_refilled",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "a batch that is ordered again waits for followers that have read it",
        "src/share.pxi",
        Replace("epoch == self._newest_epoch and step > self._newest_step))", "epoch == self._newest_epoch))"),
        (f"{WORDS}test_batch_ordered_again_after_an_interrupt_takes_no_slot_from_others",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "what a rank writes into a batch shows in a later one",
        "src/share.h",
        Replace("    madvise((uint8_t *)place->map->base + place->offset, place->nbytes, MADV_DONTNEED);\n", ""),
        (f"{SAME}test_writes_into_a_batch_are_private_to_a_rank",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "followers see what the leader writes into a batch",
        "Ring.__init__",
        Replace("is_private=options.num_ranks > 1", ""),
        (f"{SAME}test_writes_into_a_batch_are_private_to_a_rank",),
    ),
    Defect(
        "G1",
        "a rank that leaves the loop does not announce it",
        "SeedStream.leave",
        omit("engine.leave_pass()"),
        (f"{PARTINGS}test_rank_that_leaves_the_loop_early_is_an_error_in_the_others",),
    ),
    Defect(
        "G1",
        "a leader that ends with its loader open does not wait for slower ranks",
        "_wait_for_slower_ranks",
        omit("leader.closing(is_broken=False)"),
        (f"{PARTINGS}test_rank_that_ends_with_its_loader_open_waits_for_the_others",),
    ),
    Defect(
        "G1",
        "ranks do not check whether the others live",
        "RankSync._see_ended",
        Replace("self._ended", "set()"),
        (f"{PARTINGS}test_other_ranks_fail_soon_after_a_rank_is_killed_while_holding_a_batch",),
    ),
    Defect(
        "G1",
        "the starting positions of ranks are not compared",
        "RankSync._begin",
        Replace("(ended, *place) != (self._count_before, order.epoch, order.step)", "ended != self._count_before"),
        (f"{PARTINGS}test_ranks_that_begin_at_different_positions_raise",),
    ),
    Defect(
        "G1",
        "idle workers of other ranks are not woken",
        "NodeBell.post_up_to",
        omit("pool.bell.post_up_to(min(num_left, num_idle))"),
        ("tests/sharing/test_helpers.py::test_idle_neighbors_are_woken_if_the_pool_is_busy",),
    ),
    Defect(
        "G1",
        "one sample kills one helper after the other",
        "src/protocol.h",
        Replace(
            "            if (w >= num_wanted && atomic_load_explicit((shml_u64 *)&slot->num_lost, memory_order_relaxed)) continue;\n",
            "",
        ),
        ("tests/sharing/test_helpers.py::test_chunk_that_ended_a_worker_is_left_to_the_pool",),
        ("filler",),
    ),
    Defect(
        "G1",
        "helpers are never admitted",
        "Helpers._accept",
        omit("self._ring.accept(record, identity)"),
        (f"{BALANCING}test_rank_with_a_blocked_worker_is_helped_and_batches_are_unchanged",),
    ),
    Defect(
        "G1",
        "chunks of a dead helper are not recovered",
        "Helpers.check",
        omit("while self._ring.recover(record) >= 0:\n    num_taken_back += 1"),
        (
            f"{BALANCING}test_helpers_killed_right_after_their_claim_lose_nothing",
            f"{BALANCING}test_rank_killed_with_its_worker_in_a_neighbors_chunk_does_not_affect_the_neighbor",
        ),
    ),
    Defect(
        "G1",
        "a helper waits for the trainer whose batch it fills",
        "SlotMemory.grow",
        omit("if self._is_helper:\n    ring.ask_repack()\n    return False"),
        (f"{BALANCING}test_helper_never_waits_for_the_trainer_whose_batch_it_fills",),
    ),
]
